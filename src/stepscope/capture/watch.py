"""`with stepscope.watch("name"):` watches this process and its children from a side process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import stepscope
import stepscope.inject
from stepscope.capture.attach import DONE, FAILED, READY
from stepscope.capture.session import check_interval
from stepscope.errors import CannotWatch
from stepscope.inject import finder
from stepscope.inject.events import FOLDER_VARIABLE
from stepscope.runs.paths import DEFAULT_FOLDER, new_run_folder

if TYPE_CHECKING:
    from stepscope.records import Summary
    from stepscope.runs.reader import Run

SIDECAR = "stepscope.cli.sidecar"
_FINISH_S = 120.0


@dataclass(frozen=True)
class WatchedBlock:
    """The run that a watched block leaves. Complete once the block has ended."""

    path: Path

    def run(self) -> Run:
        from stepscope.runs.reader import open_run

        return open_run(self.path)

    def summary(self) -> Summary:
        return self.run().summary()


@contextmanager
def watch(
    name: str = "watch",
    *,
    interval: float = 0.1,
    out: str | Path = DEFAULT_FOLDER,
    hook: bool = True,
) -> Iterator[WatchedBlock]:
    """Watch this process, and all that it starts, until the block ends.

    Sampling happens in a side process; epochs and steps of PyTorch and Keras are seen as under
    `stepscope run` (`hook=False` to leave the frameworks alone). The run, with its report, is in
    the `path` of what the block gets.
    """
    check_interval(interval)
    _only_one(os.getpid())
    try:
        paths = new_run_folder(Path(out), name)
    except OSError as error:
        _watched.clear()
        raise CannotWatch(
            f"The run folder cannot be made in {out}: {error.strerror}", "Give another out="
        ) from None
    spec = {
        "name": name,
        "interval": interval,
        "folder": str(paths.folder),
        "pid": os.getpid(),
        "hook": hook,
    }
    try:
        sidecar = _start_sidecar(spec)
    except BaseException:
        _watched.clear()
        raise
    before = dict(os.environ)
    os.environ[FOLDER_VARIABLE] = str(paths.events)
    reporter = sys.modules["_stepscope_events"]
    reported_before = reporter.report_to(str(paths.events))
    if hook:
        _install_hook(paths.events)
    said = DONE
    try:
        yield WatchedBlock(paths.folder)
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)):
            said = FAILED + _in_one_line(error)
        raise
    finally:
        if os.getpid() == spec["pid"]:  # not in a child that was forked in the block and leaves it
            _restore(before, FOLDER_VARIABLE, "PYTHONPATH")
            reporter.report_with(reported_before).close()
            _stop_sidecar(sidecar, said)
            _watched.clear()


_watched: set[int] = set()


def _only_one(pid: int) -> None:
    """A process reports to one run at a time."""
    if pid in _watched:
        raise CannotWatch(
            "This process is being watched by another stepscope.watch()", "End that block first"
        )
    _watched.add(pid)


def _in_one_line(error: BaseException) -> bytes:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return " ".join(text.split()).encode("utf-8", "replace")[:1000] + b"\n"


def _restore(before: dict[str, str], *variables: str) -> None:
    for variable in variables:
        if variable in before:
            os.environ[variable] = before[variable]
        else:
            os.environ.pop(variable, None)


def _start_sidecar(spec: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start it and wait until it has taken its first sample."""
    package = str(Path(stepscope.__file__).parent.parent)
    environment = {k: v for k, v in os.environ.items() if k != FOLDER_VARIABLE}
    others = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = package + (os.pathsep + others if others else "")
    process = subprocess.Popen(
        [sys.executable, "-m", SIDECAR, json.dumps(spec)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # a Ctrl-C is for the block, not for who watches it
    )
    assert process.stdout is not None
    if process.stdout.readline() != READY:
        process.kill()
        process.wait()
        raise CannotWatch("The side process that samples did not start", "Try: stepscope run")
    return process


def _stop_sidecar(sidecar: subprocess.Popen[bytes], said: bytes) -> None:
    assert sidecar.stdin is not None and sidecar.stdout is not None
    try:
        sidecar.stdin.write(said)
        sidecar.stdin.close()
    except OSError:  # it was killed: what it wrote is there
        pass
    try:
        sidecar.wait(_FINISH_S)
    except subprocess.TimeoutExpired:  # it goes on writing its report by itself
        pass
    sidecar.stdout.close()


def _install_hook(events: Path) -> None:
    """Attach to what is imported already, and to what will be, here and in children."""
    site = Path(stepscope.inject.__file__).with_name("site")
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(site) + (os.pathsep + others if others else "")
    finder.install(str(events))
    finder.load_hook().attach_to_imported()
