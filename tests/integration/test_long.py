"""What takes long: a day of samples, and a long look for gaps under load."""

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
    assert done.run.summary().watcher["longest_gap_s"] <= 2 * interval


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A day with a GPU, ended and killed; made aside, as it takes more memory than it may take to
    explain it, and a child begins with what its parent has."""
    folder = tmp_path_factory.mktemp("day")
    program = Path(__file__).parents[1] / "synthetic_day.py"
    subprocess.run([sys.executable, str(program), str(folder), "1"], check=True, timeout=600)
    return folder


def cost(*command: str) -> tuple[float, int]:
    """Seconds and peak bytes of a process."""
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.monotonic() - began
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return seconds, used.ru_maxrss * 1024


@pytest.mark.parametrize("ending", ["ended", "killed"])
def test_a_day_is_explained_in_two_seconds_and_a_gibibyte(day: Path, ending: str) -> None:
    command = [sys.executable, "-m", "stepscope", "explain", str(day / ending), "--json"]
    found = [cost(*command) for _ in range(3)]
    assert min(seconds for seconds, _ in found) < 2.0
    assert max(peak for _, peak in found) < 2**30


@pytest.mark.parametrize("ending", ["ended", "killed"])
def test_the_report_of_a_day(day: Path, ending: str) -> None:
    seconds, peak = cost(sys.executable, "-m", "stepscope", "report", str(day / ending))
    assert seconds < 30
    assert peak < 1.5 * 2**30
    assert (day / ending / "derived" / "report.html").stat().st_size < 5_000_000
