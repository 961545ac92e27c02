"""The table of sensors, from facts of runs that never were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stepscope.doctor.examine import disk_folder, filesystem_of
from stepscope.doctor.sensors import hint_for, labels, sensor_metrics, sensor_states
from stepscope.sensors.host import HostSensor
from stepscope.sensors.shm import ShmSensor

NO_PRESSURE = "this kernel keeps no pressure stall information (CONFIG_PSI, psi=1)"


def facts(missing: dict[str, str], **costs: float) -> dict[str, Any]:
    return {
        "sensors": {
            "missing": missing,
            "costs": {
                name: {"cpu_s": cost, "period_s": 1.0, "slowed_to_s": 0.0}
                for name, cost in costs.items()
            },
        }
    }


def test_a_sensor_that_works() -> None:
    (shm,) = sensor_states(facts({}, shm=30e-6), set(ShmSensor.metrics))
    assert (shm.name, shm.state, shm.missing) == ("shm", "works", {})
    assert shm.share == 30e-6


def test_a_sensor_that_was_slowed_down_costs_less() -> None:
    record = facts({}, shm=30e-6)
    record["sensors"]["costs"]["shm"]["slowed_to_s"] = 3.0
    (shm,) = sensor_states(record, set(ShmSensor.metrics))
    assert (shm.period_s, shm.share) == (3.0, pytest.approx(10e-6))


def test_what_is_missing_in_part_has_a_reason_and_a_hint() -> None:
    lost = [metric for metric in HostSensor.metrics if metric.startswith("pressure")]
    recorded = set(HostSensor.metrics) - set(lost)
    (host,) = sensor_states(facts(dict.fromkeys(lost, NO_PRESSURE), host=2e-4), recorded)
    assert host.state == "in part"
    assert set(host.missing) == set(lost)
    assert host.hints == ("boot with psi=1, on a kernel with CONFIG_PSI",)


def test_a_sensor_without_any_value_is_missing_also_if_it_was_never_read() -> None:
    reason = "no NVIDIA driver is installed (libnvidia-ml.so.1 is not there)"
    states = sensor_states(facts({"gpu_power": reason, "shm_used": "x", "shm_size": "x"}), set())
    assert {state.name: state.state for state in states} == {
        "shm": "missing",
        "gpu power": "missing",
    }
    (hint,) = (hint for state in states for hint in state.hints)
    assert "--gpus all" in hint


def test_what_was_missing_for_a_moment_is_not_missing() -> None:
    (shm,) = sensor_states(facts({"shm_used": "gone"}, shm=1e-5), {"shm_used", "shm_size"})
    assert shm.state == "works"


def test_no_limit_is_no_loss() -> None:
    (cgroup,) = sensor_states(facts({"cgroup_memory_limit": "no limit is set"}, cgroup=1e-4), set())
    assert cgroup.state == "works"


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("performance counters (GPM) need a Hopper GPU or a later one", "PCIe traffic is sampled"),
        ("/proc/12/io: Permission denied", "sudo"),
        ("/dev/shm: No such file or directory", "--shm-size"),
        ("the driver was updated: its library and its kernel module differ", "restart"),
        ("no cgroup file system is mounted here", "mount it"),
    ],
)
def test_hints(reason: str, words: str) -> None:
    assert words in (hint_for(reason) or "")


def test_a_reason_nobody_knows_has_no_hint() -> None:
    assert hint_for("the moon is full") is None


def test_every_sensor_is_known() -> None:
    known = sensor_metrics()
    assert {"process", "process io", "pss", "host", "cgroup", "network", "shm", "watcher"} <= set(
        known
    )
    assert labels(["cpu", "unheard_of"]) == "CPU, unheard_of"


MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:5 / /tmp rw - tmpfs tmpfs rw
24 22 0:6 / /mnt/my\\040data rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/home/x", "ext4"), ("/tmp/y", "tmpfs"), ("/tmpfile", "ext4"), ("/mnt/my data/z", "xfs")],
)
def test_the_file_system_of_a_folder(folder: str, kind: str) -> None:
    assert filesystem_of(Path(folder), MOUNTS) == kind


def test_a_folder_in_memory_is_no_disk(tmp_path: Path) -> None:
    assert disk_folder([Path("/dev/shm"), Path("/proc")]) == (None, "")
    folder, filesystem = disk_folder([Path("/dev/shm"), tmp_path / "runs"])
    assert (folder, bool(filesystem)) in ((tmp_path, True), (None, False))
