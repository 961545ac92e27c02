"""Runners of trials that are dead, and processes of trials, for the tests of cleaning up."""

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
"""The quickest interpreter there is; `SOURCE` leads it to our modules."""
SOURCE = str(Path(stepscope.__file__).parents[1])

SLEEPS = "import time; print('ready', flush=True); time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"


def dead_runner() -> str:
    """The name of a runner that has just ended."""
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
    """Trials of other tests run at the same time, and end all strays that they find: those of this
    test seem to be of another machine to them."""
    home = secrets.token_hex(4)
    monkeypatch.setattr(procfs, "pid_home", lambda: home)
