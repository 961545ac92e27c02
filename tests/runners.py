"""Exited runners and trial processes, for the tests of the cleanup."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest

import stepscope
from stepscope.sensors import procfs
from stepscope.trials.processes import trial_processes

PYTHON = [sys.executable, "-I", "-S", "-c"]
"""An interpreter that starts quickly; add `SOURCE` to its path for our modules."""
SOURCE = str(Path(stepscope.__file__).parents[1])

SLEEPS = "import time; print('ready', flush=True); time.sleep(60)"
IGNORES_SIGTERM = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"


def exited_runner() -> str:
    """Return the name of a runner that has just exited."""
    code = (
        "import sys; sys.path.append(sys.argv[1]); "
        "from stepscope.trials.processes import trial_processes; "
    )
    done = subprocess.run(
        [*PYTHON, f"{code} print(trial_processes.runner_name())", SOURCE],
        capture_output=True,
        text=True,
        check=True,
    )
    pid, started, _ = done.stdout.strip().split(".")
    return ".".join((pid, started, trial_processes.runner_name().split(".")[2]))


def hide_from_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make processes of this test look like those of another machine. Otherwise concurrent trials
    of other tests would end its stale processes."""
    home = secrets.token_hex(4)
    monkeypatch.setattr(procfs, "pid_home", lambda: home)
