"""A block of a program is monitored by a side process: what the two say to each other.

The side process is started with our pid and the `RunRequest` as JSON. It says READY on its standard
output once it has taken its first sample, and is told on its standard input how the block ended.
Where that is closed without a word, the process died inside the block.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import stepscope
from stepscope.capture.request import RunRequest
from stepscope.capture.spawn import HOOK_SITE, prepend_to_python_path
from stepscope.errors import CannotWatch
from stepscope.inject import finder
from stepscope.inject.events import FOLDER_VARIABLE
from stepscope.records import Ending, Outcome
from stepscope.records.codec import dumps, loads
from stepscope.runs.paths import RunPaths

READY = b"ready\n"
DONE = b"done\n"
FAILED = b"failed "
INTERRUPTED = b"interrupted\n"

_FINISH_S = 120.0
_watched: set[int] = set()
"""The process that is monitored: it reports to one run at a time."""


@contextlib.contextmanager
def monitor_block(request: RunRequest, side_process: str) -> Iterator[Path]:
    """Monitor this process, and all that it starts, until the block ends; the run folder.

    `side_process` is the module to start beside us: it calls `monitor_parent`.
    """
    pid = os.getpid()
    if pid in _watched:
        raise CannotWatch(
            "This process is being watched by another stepscope.watch()", "End that block first"
        )
    _watched.add(pid)
    try:
        try:
            paths = request.make_folder()
        except CannotWatch as error:
            raise CannotWatch(error.message, "Give another out=") from None
        process = _start(side_process, pid, replace(request, folder=paths.folder))
    except BaseException:
        _watched.clear()
        raise
    before = {variable: os.environ.get(variable) for variable in (FOLDER_VARIABLE, "PYTHONPATH")}
    reporter = sys.modules["_stepscope_events"]
    reported_before = reporter.report_to(str(paths.events))
    said = DONE
    try:
        os.environ[FOLDER_VARIABLE] = str(paths.events)
        if request.hook:
            prepend_to_python_path(os.environ, HOOK_SITE)  # for the children
            with contextlib.suppress(OSError):  # a full disk is no reason to end the script
                finder.install(str(paths.events))
            finder.attach_to_imported()
        yield paths.folder
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            said = INTERRUPTED
        elif not (isinstance(error, SystemExit) and error.code in (None, 0)):
            said = FAILED + _in_one_line(error)
        raise
    finally:
        if os.getpid() == pid:  # not in a child that was forked in the block and leaves it
            for variable, value in before.items():
                if value is None:
                    os.environ.pop(variable, None)
                else:
                    os.environ[variable] = value
            reporter.report_with(reported_before).close()
            _stop(process, said)
            _watched.clear()


def _start(module: str, pid: int, request: RunRequest) -> subprocess.Popen[bytes]:
    """Start the side process and wait until it has taken its first sample."""
    environment = {k: v for k, v in os.environ.items() if k != FOLDER_VARIABLE}
    prepend_to_python_path(environment, Path(stepscope.__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(pid), dumps(request)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # a Ctrl-C is for the block, not for who monitors it
    )
    assert process.stdout is not None
    if process.stdout.readline() != READY:
        process.kill()
        process.wait()
        raise CannotWatch("The side process that samples did not start", "Try: stepscope run")
    return process


def _stop(process: subprocess.Popen[bytes], said: bytes) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):  # it was killed: what it wrote is there
        process.stdin.write(said)
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it goes on writing its report by itself
        process.wait(_FINISH_S)
    process.stdout.close()


def _in_one_line(error: BaseException) -> bytes:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return " ".join(text.split()).encode("utf-8", "replace")[:1000] + b"\n"


def monitor_parent(pid: int, request_json: str, tell: Callable[[str], None]) -> Path:
    """In the side process: sample until told how the block ended; the finished run folder."""
    # Not in the process that is monitored: it needs none of this.
    import time

    from stepscope.capture.attach import sampling
    from stepscope.capture.session import Session
    from stepscope.sensors import procfs

    request = replace(loads(RunRequest, request_json), command=procfs.command_line(pid))
    assert request.folder is not None
    control, ready = 0, os.dup(1)
    session = Session(request, RunPaths(request.folder), tell)
    session.restart_clock()
    session.begin(pid, None, None, exclude=(os.getpid(),))
    os.write(ready, READY)
    said = b""
    for readable in sampling(session, [control]):
        if readable:
            data = os.read(control, 4096)
            said += data
            # Children that were forked in the block hold the pipe open: its end may never come.
            if not data or said.endswith(b"\n"):
                break
    session.mark_end_time(time.monotonic_ns())
    session.last_sample()
    session.end(_ending(said, session.oom_kills()), [])
    return request.folder


def _ending(said: bytes, oom_kills: int) -> Ending:
    """The block says how it ended; if it says nothing, its process died in it."""
    from stepscope.runs.masking import mask_text

    if said == DONE:
        return Ending(Outcome.OK, "the watched block ended normally")
    if said == INTERRUPTED:
        return Ending(Outcome.INTERRUPTED, "the watched block was interrupted")
    if said.startswith(FAILED):
        what = said[len(FAILED) :].decode("utf-8", "replace").strip()
        return Ending(Outcome.CRASHED, f"the watched block raised {mask_text(what)}")
    if oom_kills:
        reason = "the process died inside the watched block; its cgroup counted an OOM kill"
        return Ending(Outcome.HOST_OOM, reason)
    return Ending(Outcome.CRASHED, "the process died inside the watched block")
