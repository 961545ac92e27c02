"""`stepscope doctor` on this machine, as it is and with a sensor that lies."""

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

# The very program, with a sensor that sees half of what is written and all of it as reads, too.
LIAR = """
from stepscope.sensors.process import IoSensor
honest = IoSensor._amounts
def halved(self, pid):
    amounts = honest(self, pid)
    return amounts and [amounts[0], amounts[1] // 2, *amounts[2:]]
IoSensor._amounts = halved
from stepscope.cli.app import main
main()
"""
pytestmark = pytest.mark.quiet
HOST = (
    "CPU",
    "CPU of a worker",
    "CPU of the machine",
    "CPU of the cgroup",
    "Memory",
    "Disk written",
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
    """A whole examination, the run kept."""
    out = tmp_path_factory.mktemp("doctor")
    return doctor("--json", "--no-gpu", "--keep", "--out", str(out)), out


def test_the_sensors_of_this_machine_tell_the_truth(healthy: tuple[Any, Path]) -> None:
    done, _ = healthy
    found = json.loads(done.stdout)
    wrong = [verdict for verdict in found["self_test"] if verdict["state"] == "wrong"]
    assert wrong == []
    assert (done.returncode, found["ok"], done.stderr) == (0, True, "")
    states = {verdict["name"]: verdict["state"] for verdict in found["self_test"]}
    for name in HOST:
        assert states[name] in ("ok", "not tried"), name
    # These can be tried everywhere.
    for name in ("CPU", "CPU of a worker", "CPU of the machine", "Memory", "Loopback"):
        assert states[name] == "ok", name
    assert states["PCIe to GPU"] == "not tried"


def test_every_sensor_has_a_state_and_a_cost(healthy: tuple[Any, Path]) -> None:
    found = json.loads(healthy[0].stdout)
    sensors = {sensor["name"]: sensor for sensor in found["sensors"]}
    for name in ("process", "process io", "host", "shm", "network", "watcher"):
        assert sensors[name]["state"] in ("works", "in part")
        assert 0 < sensors[name]["cost_s"] < 0.02
        assert 0 < sensors[name]["core_share"] < 0.1
    for sensor in sensors.values():
        assert sensor["state"] == "works" or sensor["missing"], sensor["name"]
    assert 0 < found["watcher_cores"] < 0.2
    assert {"CPUs", "Memory", "Disk"} <= {remark["topic"] for remark in found["surroundings"]}


def test_the_run_is_kept_with_its_report(healthy: tuple[Any, Path]) -> None:
    done, out = healthy
    run = open_run(latest_run(out))
    assert json.loads(done.stdout)["run"] == str(run.path)
    assert run.paths.report_html.exists()
    assert {name for name, *_ in run.summary().phases} >= {"burn", "worker", "write", "read"}


def test_a_sensor_that_lies_is_found(tmp_path: Path) -> None:
    liar = doctor(
        "--no-gpu",
        "--out",
        str(tmp_path),
        program=[sys.executable, "-c", LIAR],
        env={**os.environ, "COLUMNS": "80"},
    )
    assert liar.returncode == 1, liar.stdout
    (advice,) = [line for line in liar.stdout.splitlines() if line.startswith("Do not trust:")]
    assert "Disk written" in advice
    (line,) = [line for line in liar.stdout.splitlines() if line.startswith("Disk written")]
    assert line.split() == ["Disk", "written", "wrong", "67.1", "MB", "33.6", "MB"]
    assert "50 % of what was done" in liar.stdout
    assert max(map(len, liar.stdout.splitlines())) <= 80
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_quick_is_quick_and_tests_nothing(tmp_path: Path) -> None:
    begun = time.monotonic()
    done = doctor("--quick", env={**os.environ, "TMPDIR": str(tmp_path)}, cwd=tmp_path)
    assert time.monotonic() - begun < 10
    assert done.returncode == 0, done.stderr
    headings = [line.strip() for line in done.stdout.splitlines() if line.strip().isalpha()]
    assert headings == ["Sensors", "Surroundings"]
    assert "was not tested (--quick)" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
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
