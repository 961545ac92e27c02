"""Fixtures that run the command line in real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from stepscope.opened_run import OpenedRun, open_run

# Deadlines would fail on a busy machine, and every run uses the same examples. `make
# test-long` searches for new ones, to be kept as an `@example`.
settings.register_profile("stepscope", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None, max_examples=1500)
settings.load_profile("stepscope")
# Hundreds of interpreters are started: they must not compile the package again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # it is ignored in background jobs of a shell

STEPSCOPE = [sys.executable, "-m", "stepscope"]
SCRIPTS = Path(__file__).parent / "data" / "scripts"


@dataclass(frozen=True)
class Finished:
    """A finished `stepscope run`: its exit code, its output, and its run."""

    code: int
    out: str
    err: str
    runs: Path

    @property
    def run(self) -> OpenedRun:
        (folder,) = self.runs.iterdir()
        return open_run(folder)


@pytest.fixture
def watch(tmp_path: Path) -> Callable[..., Finished]:
    """Run a command under `stepscope run`: `watch("python", "script.py", options=["--quiet"])`."""

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
    """Write a script to a separate folder, so that it cannot import files of the tests."""

    def write(text: str) -> str:
        folder = tmp_path / "script"
        folder.mkdir(exist_ok=True)
        path = folder / f"script{len(list(folder.iterdir()))}.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture(autouse=True)
def _unmonitored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests may run under stepscope: processes that they start must not report to it."""
    for variable in [name for name in os.environ if name.startswith("STEPSCOPE_")]:
        monkeypatch.delenv(variable)


@pytest.fixture(autouse=True)
def _restore_sigint() -> Iterator[None]:
    """Restore the SIGINT handler, which processes of the next test would inherit."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if before is not None:  # not a Python handler
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Tried:
    """A finished `stepscope trial`: its exit code, its output, and its run folders."""

    code: int
    out: str
    err: str
    runs: Path

    @property
    def told(self) -> dict[str, Any]:
        """The output of `--json` for one trial."""
        return dict(json.loads(self.out))

    @property
    def folders(self) -> list[Path]:
        return sorted(self.runs.glob("*")) if self.runs.is_dir() else []

    @property
    def run(self) -> OpenedRun:
        (folder,) = self.folders
        return open_run(folder)


@pytest.fixture
def trial(tmp_path: Path) -> Callable[..., Tried]:
    """Run a trial: `trial("cnn", "--steps", "8")`. Its noise and data stay in the test folder."""

    def start(*arguments: str, before: Sequence[str] = (), **popen: Any) -> Tried:
        runs = tmp_path / "runs"
        done = subprocess.run(
            [*before, *STEPSCOPE, "trial", *arguments, "--out", str(runs), "--json"],
            env=trial_environment(tmp_path),
            **{"capture_output": True, "text": True, "timeout": 110, **popen},
        )
        return Tried(done.returncode, done.stdout, done.stderr, runs)

    return start


def trial_environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "STEPSCOPE_STATE": str(folder / "state"),
        "STEPSCOPE_DATA": str(folder / "data"),
    }


OWN = """
import os, time
import torch
from torch import nn

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        {item}
        return torch.full((8,), index / 4096), index % 2

def step(model, batch):
    {step}
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)

def workload():
    {begin}
    return {{"model": nn.Linear(8, 2), "step": step, "data": Numbers()}}
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., str]:
    """Write a custom workload with code in some place: `own(step="os.abort()")`."""

    def write(item: str = "", step: str = "", begin: str = "") -> str:
        path = tmp_path / "own.py"
        path.write_text(OWN.format(item=item or "pass", step=step or "pass", begin=begin or "pass"))
        return f"{path}:workload"

    return write
