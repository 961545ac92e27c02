"""Tests that take long: the samples of a day, and gaps between samples under load."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Finished

pytestmark = pytest.mark.long

BUSY = """
import os, time
for _ in range(7):
    if os.fork() == 0: break
end = time.monotonic() + 60
while time.monotonic() < end: pass
"""


@pytest.mark.parametrize("interval", [0.1, 0.02])
def test_no_gap_longer_than_two_intervals_with_every_core_busy(
    watch: Callable[..., Finished], python_file: Callable[[str], str], interval: float
) -> None:
    done = watch(sys.executable, "-S", python_file(BUSY), options=["--interval", str(interval)])
    assert done.run.summary().monitor["longest_gap_s"] <= 2 * interval


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of a day with a GPU, finished and killed. A separate process generates them: its memory
    would otherwise be inherited by the measured processes."""
    folder = tmp_path_factory.mktemp("day")
    program = Path(__file__).parents[1] / "synthetic_day.py"
    subprocess.run([sys.executable, str(program), str(folder), "1"], check=True, timeout=600)
    return folder


def cost(*command: str) -> tuple[float, int]:
    """Return the seconds and the peak bytes of a process."""
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.monotonic() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return seconds, used.ru_maxrss * 1024


@pytest.mark.parametrize("exit_status", ["ended", "killed"])
def test_explain_of_a_day_takes_two_seconds_and_one_gibibyte(day: Path, exit_status: str) -> None:
    command = [sys.executable, "-m", "stepscope", "explain", str(day / exit_status), "--json"]
    costs = [cost(*command) for _ in range(3)]
    assert min(seconds for seconds, _ in costs) < 2.0
    assert max(peak for _, peak in costs) < 2**30


@pytest.mark.parametrize("exit_status", ["ended", "killed"])
def test_report_of_a_day(day: Path, exit_status: str) -> None:
    seconds, peak = cost(sys.executable, "-m", "stepscope", "report", str(day / exit_status))
    assert seconds < 30
    assert peak < 1.5 * 2**30
    assert (day / exit_status / "derived" / "report.html").stat().st_size < 5_000_000
