"""Whole runs with GPUs of the fake NVML: recorded metrics and failures."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

import fake_nvml
from conftest import Finished
from gpus import LOST, NO_PERMISSION, NOT_SUPPORTED
from stepscope.metrics import of_scope
from stepscope.opened_run import open_run

SLEEP = ("-c", "import time; time.sleep(1.2)")
SLEEP_LONGER = ("-c", "import time; time.sleep(2.6)")
"""Long enough for metrics that are read every two seconds."""
ALL = {metric.key for metric in of_scope("gpu")}


def machine(scenario: dict[str, Any], **more: str) -> dict[str, str]:
    """Environment variables with which stepscope finds the GPUs of a scenario."""
    inherited = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(fake_nvml.STAND_IN), inherited))),
        fake_nvml.SCENARIO_VARIABLE: json.dumps(scenario),
        **more,
    }


def read_of(done: Finished, entity: str) -> set[str]:
    return {metric for metric, name in done.run.data.series if name == entity}


def uuids(done: Finished) -> list[str]:
    return [gpu["uuid"] for gpu in done.run.json["environment"]["gpus"]]


def test_run_records_its_gpu(watch: Callable[..., Finished]) -> None:
    done = watch(sys.executable, *SLEEP_LONGER, env=machine(fake_nvml.ONE_H200))
    assert done.code == 0
    (gpu,) = done.run.json["environment"]["gpus"]
    assert (gpu["label"], gpu["model"], gpu["power_limit_watts"]) == ("GPU 0", "NVIDIA H200", 700)
    assert done.run.json["environment"]["driver"].startswith("580.")
    assert read_of(done, gpu["uuid"]) >= ALL
    series = done.run.data.series
    assert series["gpu_sm", gpu["uuid"]].value.mean() == pytest.approx(0.96, abs=0.05)
    assert series["gpu_energy", gpu["uuid"]].value.mean() == pytest.approx(700, rel=0.2)
    assert not ALL & set(done.run.json["sensors"]["missing"])


def test_lost_gpu_is_reported_and_the_other_is_monitored(watch: Callable[..., Finished]) -> None:
    lost = {"errors": {"*": {"code": LOST, "after": 0.8}}}
    done = watch(sys.executable, *SLEEP, env=machine({"gpus": [lost, {"load": "idle"}]}))
    assert done.code == 0
    first, second = uuids(done)
    (remark,) = done.run.json["sensors"]["notes"]
    assert "GPU 0" in remark and "fallen off the bus" in remark
    assert "was lost" in " ".join(done.err.split())
    power = done.run.data.series["gpu_power", second]
    assert power.t[-1] > done.run.data.series["gpu_power", first].t[-1]


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, 999])
def test_run_is_monitored_despite_driver_errors(watch: Callable[..., Finished], code: int) -> None:
    broken = {"errors": {"*": {"code": code, "after": 0.3}}}
    done = watch(sys.executable, *SLEEP, env=machine({"gpus": [broken]}))
    assert done.code == 0
    assert done.run.exit_status.outcome.value == "ok"
    assert done.run.summary().core_seconds is not None
    assert "failed" not in done.err and "Traceback" not in done.err


@pytest.mark.parametrize(("code", "words"), [(9, "not loaded"), (12, "no NVIDIA driver")])
def test_missing_driver_is_the_reason_of_every_metric(
    watch: Callable[..., Finished], code: int, words: str
) -> None:
    done = watch(sys.executable, *SLEEP, env=machine({"init": code, "gpus": []}))
    assert done.code == 0
    missing = done.run.json["sensors"]["missing"]
    assert set(missing) >= ALL and all(words in missing[key] for key in ALL)


def test_slow_driver_does_not_delay_the_command(
    watch: Callable[..., Finished], python_file: Callable[[str], str]
) -> None:
    slow = {**fake_nvml.ONE_H200, "wakes_up_in": 1.5}
    done = watch(sys.executable, "-c", "import time; time.sleep(3)", env=machine(slow))
    assert done.code == 0
    (gpu,) = uuids(done)
    run = done.run
    began = (run.data.series["gpu_power", gpu].t[0] - run.begin_ns) / 1e9
    assert 0.3 < began < 3
    assert run.data.of("rss").t[0] - run.begin_ns < 1.2e9


@pytest.mark.parametrize("function", ["nvmlDeviceGetMemoryInfo", "nvmlGpmSampleGet"])
def test_hanging_driver_does_not_block_the_run(
    watch: Callable[..., Finished], function: str
) -> None:
    hangs = {"gpus": [{"naps": {function: {"after": 0.7, "seconds": 600}}}]}
    begun = time.monotonic()
    done = watch(sys.executable, "-c", "import time; time.sleep(3); exit(7)", env=machine(hangs))
    assert (done.code, time.monotonic() - begun < 60) == (7, True)
    (remark,) = done.run.json["sensors"]["notes"]
    assert remark == "the NVIDIA driver did not respond at the end: the last readings are missing"
    times = done.run.data.of("rss").t
    assert len(times) > 10 and max(b - a for a, b in pairwise(times)) < 1.5e9


def test_driver_that_never_opens_does_not_block_the_run(watch: Callable[..., Finished]) -> None:
    asleep = {**fake_nvml.ONE_H200, "wakes_up_in": 600}
    begun = time.monotonic()
    done = watch(sys.executable, *SLEEP, env=machine(asleep))
    assert (done.code, time.monotonic() - begun < 60) == (0, True)
    missing = done.run.json["sensors"]["missing"]
    assert all("did not respond" in missing[key] for key in ALL)


def test_only_visible_gpus_are_monitored(watch: Callable[..., Finished]) -> None:
    env = machine(fake_nvml.TWO_GPUS, CUDA_VISIBLE_DEVICES="1")
    done = watch(sys.executable, *SLEEP, env=env)
    (gpu,) = done.run.json["environment"]["gpus"]
    assert gpu["index"] == 1
    none = watch(
        "true",
        options=["--out", str(done.runs.parent / "none")],
        env=machine(fake_nvml.TWO_GPUS, CUDA_VISIBLE_DEVICES=""),
    )
    assert none.code == 0
    (folder,) = (done.runs.parent / "none").iterdir()
    assert open_run(folder).json["environment"]["gpus"] == []


def test_old_nvml_package_only_lacks_its_missing_metrics(
    watch: Callable[..., Finished],
) -> None:
    old = {
        "gpus": [{}],
        "unknown": [
            "nvmlDeviceGetTotalEccErrors",
            "nvmlGpmQueryDeviceSupport",
            "NVML_FI_DEV_PCIE_COUNT_RX_BYTES",
        ],
    }
    done = watch(sys.executable, *SLEEP, env=machine(old))
    (gpu,) = uuids(done)
    assert {"gpu_power", "gpu_memory", "gpu_utilization"} <= read_of(done, gpu)
    missing = done.run.json["sensors"]["missing"]
    assert "not supported by the installed version" in missing["gpu_ecc_corrected"]


def test_gpu_number_with_mig_selects_its_slices(watch: Callable[..., Finished]) -> None:
    done = watch(sys.executable, *SLEEP, env=machine(fake_nvml.MIG, CUDA_VISIBLE_DEVICES="0"))
    labels = [gpu["label"] for gpu in done.run.json["environment"]["gpus"]]
    assert labels == ["GPU 0", "GPU 0 slice 0", "GPU 0 slice 1"]


def test_mig_slices_are_separate_gpus(watch: Callable[..., Finished]) -> None:
    done = watch(sys.executable, *SLEEP, env=machine(fake_nvml.MIG))
    labels = [gpu["label"] for gpu in done.run.json["environment"]["gpus"]]
    assert labels == ["GPU 0", "GPU 0 slice 0", "GPU 0 slice 1"]
    _, *slices = uuids(done)
    for uuid in slices:
        assert {"gpu_sm", "gpu_memory"} <= read_of(done, uuid)
        assert "gpu_power" not in read_of(done, uuid)


def test_gpu_out_of_memory_is_an_outcome(
    watch: Callable[..., Finished], python_file: Callable[[str], str]
) -> None:
    script = python_file(
        "import torch\n"
        "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 GiB.')\n"
    )
    done = watch(sys.executable, script)
    assert done.code == 1
    exit_status = done.run.exit_status
    assert exit_status.outcome.value == "gpu_oom"
    assert exit_status.reason == "exit code 1; CUDA out of memory"
    assert "20.00 GiB" in exit_status.evidence["message"]


def test_out_of_memory_of_a_child_does_not_explain_a_later_failure(
    watch: Callable[..., Finished], python_file: Callable[[str], str]
) -> None:
    script = python_file("import torch; raise torch.OutOfMemoryError('CUDA out of memory')")
    done = watch("sh", "-c", f"{sys.executable} {script} 2>/dev/null; exit 3")
    assert (done.code, done.run.exit_status.outcome.value) == (3, "crashed")


def test_caught_out_of_memory_is_not_the_outcome(
    watch: Callable[..., Finished], python_file: Callable[[str], str]
) -> None:
    script = python_file(
        "import sys, torch\n"
        "try: raise torch.OutOfMemoryError('CUDA out of memory')\n"
        "except torch.OutOfMemoryError: sys.exit(3)\n"
    )
    done = watch(sys.executable, script)
    assert (done.code, done.run.exit_status.outcome.value) == (3, "crashed")
