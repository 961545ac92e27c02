"""Runs the real command line in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stepscope.runs.reader import Run, open_run

STEPSCOPE = [sys.executable, "-m", "stepscope"]
SCRIPTS = Path(__file__).parent / "data" / "scripts"


@dataclass(frozen=True)
class Finished:
    """A `stepscope run` that ended: what it printed, its code, and the run it left."""

    code: int
    out: str
    err: str
    runs: Path

    @property
    def run(self) -> Run:
        (folder,) = self.runs.iterdir()
        return open_run(folder)


@pytest.fixture
def watch(tmp_path: Path) -> Callable[..., Finished]:
    """Watch a command: `watch("python", "script.py", options=["--quiet"])`."""

    def start(*command: str, options: list[str] | None = None, **popen: Any) -> Finished:
        runs = tmp_path / "runs"
        done = subprocess.run(
            [*STEPSCOPE, "run", "--out", str(runs), *(options or []), "--", *command],
            **{
                "capture_output": True,
                "text": True,
                "timeout": 100,
                **({} if "input" in popen else {"stdin": subprocess.DEVNULL}),
                **popen,
            },
        )
        return Finished(done.returncode, done.stdout, done.stderr, runs)

    return start


@pytest.fixture
def python_file(tmp_path: Path) -> Callable[[str], str]:
    """A script in a folder of its own, so that nothing of ours lies beside it."""

    def write(text: str) -> str:
        folder = tmp_path / "script"
        folder.mkdir(exist_ok=True)
        path = folder / f"script{len(list(folder.iterdir()))}.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture(autouse=True)
def _unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may themselves run under stepscope: what they start must not report there."""
    for variable in [name for name in os.environ if name.startswith("STEPSCOPE_")]:
        monkeypatch.delenv(variable)
