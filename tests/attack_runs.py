"""`stepscope run` in the background, and commands of other users, for tests that attack them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from attack_trials import children, until
from conftest import STEPSCOPE
from stepscope.opened_run import OpenedRun, open_run

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root and setpriv"
)


def as_user(user: int, *command: str) -> list[str]:
    """Return a command that runs as another user, who may read all files: the interpreter of the
    tests may be in the home folder of root."""
    reads_all = "+dac_read_search"
    options = ["--reuid", str(user), "--regid", str(user), "--clear-groups"]
    options += ["--inh-caps", reads_all, "--ambient-caps", reads_all]
    return ["setpriv", *options, *command]


@dataclass(frozen=True)
class StartedRun:
    """A `stepscope run` in the background. `runs` is its own folder."""

    process: subprocess.Popen[bytes]
    runs: Path

    @property
    def folder(self) -> Path:
        (folder,) = self.runs.iterdir()
        return folder

    @property
    def facts(self) -> dict[str, Any]:
        """The current contents of run.json."""
        return dict(json.loads((self.folder / "run.json").read_text()))

    @property
    def run(self) -> OpenedRun:
        return open_run(self.folder)

    def wait_for_begin(self) -> int:
        """Wait until the command is monitored, and return its pid."""
        assert until(lambda: list(self.runs.glob("*/run.json")) and "root" in self.facts)
        return int(self.facts["root"]["pid"])

    def pumps(self) -> list[int]:
        return children(self.process.pid, "pump.py")

    def finish(self, sent: bytes | None = None) -> tuple[int, str, str]:
        """Close the standard input and wait. Return the exit code, the output and the messages."""
        out, err = self.process.communicate(sent, timeout=100)
        return self.process.returncode, (out or b"").decode(), (err or b"").decode()


def start_run(
    runs: Path,
    *command: str,
    options: tuple[str, ...] = (),
    before: tuple[str, ...] = (),
    program: Sequence[str] = STEPSCOPE,
    **popen: Any,
) -> StartedRun:
    """Start a command under `stepscope run`. By default its three streams are pipes."""
    words = [*before, *program, "run", "--out", str(runs), *options, "--", *command]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = subprocess.Popen(words, start_new_session=True, **{**pipes, **popen})
    _groups.append(process.pid)
    return StartedRun(process, runs)


_groups: list[int] = []


def kill_started() -> None:
    """Kill all processes that are left of the started runs, for example by a failed test."""
    while _groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_groups.pop(), signal.SIGKILL)
