"""Runners of trials that are dead, and processes of trials, for the tests of cleaning up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import stepscope

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
    return done.stdout.strip()
