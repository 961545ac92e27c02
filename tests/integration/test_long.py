"""What takes long: a day of samples, and a long look for gaps under load."""

from __future__ import annotations

import subprocess
import sys
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


A_DAY = """
import sys, time
from pathlib import Path
from synthetic import Plan, write_run
from stepscope.report.derive import derive
from stepscope.runs.reader import open_run
folder = Path(sys.argv[1])
folder.mkdir()
write_run(folder, Plan(seconds=86400.0, epochs=90, batches=9600))
began = time.monotonic()
derive(open_run(folder))
print(time.monotonic() - began)
"""


def test_the_report_of_a_day_at_ten_hertz(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", A_DAY, str(tmp_path / "day")],
        capture_output=True, text=True, cwd=Path(__file__).parents[1], timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 30
    assert (next(tmp_path.rglob("report.html"))).stat().st_size < 5_000_000
