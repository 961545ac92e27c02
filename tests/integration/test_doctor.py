"""`stepscope doctor` on this machine, with correct sensors and with a wrong one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from conftest import STEPSCOPE
from stepscope.opened_run import open_run
from stepscope.runs.reader import latest_run

# stepscope with a sensor that counts half of the written bytes.
WRONG_SENSOR = """
from stepscope.sensors.process import IoSensor
original = IoSensor._amounts
def halved(self, pid):
    amounts = original(self, pid)
    return amounts and [amounts[0], amounts[1] // 2, *amounts[2:]]
IoSensor._amounts = halved
from stepscope.cli.app import main
main()
"""
pytestmark = pytest.mark.quiet
HOST = (
    "CPU",
    "Worker CPU",
    "Host CPU",
    "Cgroup CPU",
    "Memory",
    "Disk write",
    "Disk read",
    "Loopback",
    "/dev/shm",
    "Phases and marks",
    "Python hook",
)


def doctor(*options: str, program: list[str] | None = None, **more: Any) -> Any:
    return subprocess.run(
        [*(program or STEPSCOPE), "doctor", *options],
        **{"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, **more},
    )


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A complete check, with the run kept."""
    out = tmp_path_factory.mktemp("doctor")
    return doctor("--json", "--no-gpu", "--keep", "--out", str(out)), out


def test_sensors_of_this_machine_are_correct(healthy: tuple[Any, Path]) -> None:
    done, _ = healthy
    report = json.loads(done.stdout)
    wrong = [result for result in report["self_test"] if result["state"] == "wrong"]
    assert wrong == []
    assert (done.returncode, report["ok"], done.stderr) == (0, True, "")
    states = {result["name"]: result["state"] for result in report["self_test"]}
    for name in HOST:
        assert states[name] in ("ok", "not tested"), name
    # These can be tested everywhere.
    for name in ("CPU", "Worker CPU", "Host CPU", "Memory", "Loopback"):
        assert states[name] == "ok", name
    assert states["PCIe to GPU"] == "not tested"


def test_every_sensor_has_a_state_and_a_cost(healthy: tuple[Any, Path]) -> None:
    report = json.loads(healthy[0].stdout)
    sensors = {sensor["name"]: sensor for sensor in report["sensors"]}
    for name in ("process", "process io", "host", "shm", "network", "monitor"):
        assert sensors[name]["state"] in ("works", "partial")
        assert 0 < sensors[name]["cost_s"] < 0.02
        assert 0 < sensors[name]["core_share"] < 0.1
    for sensor in sensors.values():
        assert sensor["state"] == "works" or sensor["missing"], sensor["name"]
    assert 0 < report["monitor_cores"] < 0.2
    topics = {remark["topic"] for remark in report["machine"]}
    assert {"CPUs", "CPU load", "Memory", "Disk"} <= topics


def test_run_is_kept_with_its_report(healthy: tuple[Any, Path]) -> None:
    done, out = healthy
    run = open_run(latest_run(out))
    assert json.loads(done.stdout)["run"] == str(run.path)
    assert run.paths.report_html.exists()
    assert {name for name, *_ in run.summary().phases} >= {"burn", "worker", "write", "read"}


def test_wrong_sensor_is_detected(tmp_path: Path) -> None:
    done = doctor(
        "--no-gpu",
        "--out",
        str(tmp_path),
        program=[sys.executable, "-c", WRONG_SENSOR],
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 1, done.stdout
    lines = done.stdout.splitlines()
    (conclusion,) = [line for line in lines if line.startswith("Wrong readings:")]
    assert "Disk write" in conclusion
    (row,) = [line for line in lines if line.startswith("Disk write")]
    assert row.split() == ["Disk", "write", "wrong", "64.0", "MiB", "32.0", "MiB"]
    assert "50% of expected" in done.stdout
    assert max(map(len, lines)) <= 80
    assert list(tmp_path.iterdir()) == [], "the run is removed"


def test_quick_skips_the_self_test(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = doctor("--quick", env={**os.environ, "TMPDIR": str(tmp_path)}, cwd=tmp_path)
    assert time.monotonic() - begun < 10
    assert done.returncode == 0, done.stderr
    headings = [line.strip() for line in done.stdout.splitlines() if line.strip().isalpha()]
    assert headings == ["Sensors", "Machine"]
    assert "was not tested (--quick)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_removes_the_run(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*STEPSCOPE, "doctor", "--out", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    end = time.monotonic() + 20
    while not list(tmp_path.glob("*/*/events/[0-9]*.bin")) and time.monotonic() < end:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "", "")
    assert list(tmp_path.iterdir()) == []
