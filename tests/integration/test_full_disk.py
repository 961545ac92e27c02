"""A full disk: training continues, the user is notified, and written data stays readable."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import STEPSCOPE
from stepscope.opened_run import open_run
from stepscope.runs.reader import latest_run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting a file system needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


TRAINING = """
import os, sys, time, stepscope
for step in range(300):
    stepscope.mark("step", step)
    if step == 100 and sys.argv[1] == "fill":
        ballast = os.open(sys.argv[2] + "/ballast", os.O_WRONLY | os.O_CREAT)
        try:
            while True: os.write(ballast, b"x" * 4096)
        except OSError:
            os.close(ballast)
    if step == 200 and sys.argv[3] == "free":
        os.unlink(sys.argv[2] + "/ballast")
    time.sleep(0.01)
print("trained")
"""


@pytest.mark.parametrize("then", ["stay", "free"])
def test_training_continues(small_disk: Path, python_file: Callable[[str], str], then: str) -> None:
    script = python_file(TRAINING)
    done = subprocess.run(
        [
            *STEPSCOPE,
            "run",
            "--out",
            str(small_disk / "runs"),
            "--",
            sys.executable,
            script,
            "fill",
            str(small_disk),
            then,
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "No space left on device" in done.stderr
    assert "The command continues" in done.stderr
    assert "Traceback" not in done.stderr
    run = open_run(latest_run(small_disk / "runs"))
    steps = run.summary().steps
    times = run.samples("process").column("t_ns").to_pylist()
    assert times == sorted(times)
    if then == "free":
        assert run.exit_status.outcome == "ok"
        covered = (times[-1] - times[0]) / 1e9
        assert covered > 2.5, "samples that could not be written were kept and written later"
        assert steps == 300, "steps that could not be written were kept and written later"
    else:
        assert 100 <= steps < 300


def test_disk_is_full_from_the_start(small_disk: Path) -> None:
    ballast = os.open(small_disk / "ballast", os.O_WRONLY | os.O_CREAT)
    with pytest.raises(OSError):
        while True:
            os.write(ballast, b"x" * 4096)
    os.close(ballast)
    done = subprocess.run(
        [*STEPSCOPE, "run", "--out", str(small_disk / "runs"), "--", "true"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 125
    assert done.stderr.count("\n") == 1 and "No space left" in done.stderr
