"""Monitor a block of a program from a separate process: both sides of the protocol.

The monitor process gets the pid of the program and the `RunRequest` as JSON. It writes READY to its
standard output after the first sample, and reads from its standard input how the block ended. If
the input is closed without a message, the program exited inside the block.
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
from stepscope.errors import MonitorError
from stepscope.inject import finder
from stepscope.inject.events import FOLDER_VARIABLE
from stepscope.records import ExitStatus, Outcome
from stepscope.records.codec import dumps, loads
from stepscope.runs.paths import RunPaths

READY = b"ready\n"
DONE = b"done\n"
FAILED = b"failed "
INTERRUPTED = b"interrupted\n"

_FINISH_S = 120.0
_monitored: set[int] = set()
"""The pid of the monitored process: a process reports to one run at a time."""


@contextlib.contextmanager
def monitor_block(request: RunRequest, monitor_module: str) -> Iterator[Path]:
    """Monitor this process, and every process that it starts, until the block ends. Yields the run
    folder.

    `monitor_module` is the module to run as the monitor process: it calls `monitor_parent`.
    """
    pid = os.getpid()
    if pid in _monitored:
        raise MonitorError(
            "Another stepscope.watch() block is active in this process", "End that block first"
        )
    _monitored.add(pid)
    try:
        try:
            paths = request.make_folder()
        except MonitorError as error:
            raise MonitorError(error.message, "Pass another folder as out=") from None
        process = _start(monitor_module, pid, replace(request, folder=paths.folder))
    except BaseException:
        _monitored.clear()
        raise
    before = {variable: os.environ.get(variable) for variable in (FOLDER_VARIABLE, "PYTHONPATH")}
    events = sys.modules["_stepscope_events"]
    previous_writer = events.report_to(str(paths.events))
    message = DONE
    try:
        os.environ[FOLDER_VARIABLE] = str(paths.events)
        if request.hook:
            prepend_to_python_path(os.environ, HOOK_SITE)  # for the children
            with contextlib.suppress(OSError):  # a full disk must not end the script
                finder.install(str(paths.events))
            finder.attach_to_imported()
        yield paths.folder
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            message = INTERRUPTED
        elif not (isinstance(error, SystemExit) and error.code in (None, 0)):
            message = FAILED + _in_one_line(error)
        raise
    finally:
        if os.getpid() == pid:  # not in a child that was forked inside the block
            for variable, value in before.items():
                if value is None:
                    os.environ.pop(variable, None)
                else:
                    os.environ[variable] = value
            events.report_with(previous_writer).close()
            _stop(process, message)
            _monitored.clear()


def _start(module: str, pid: int, request: RunRequest) -> subprocess.Popen[bytes]:
    """Start the monitor process and wait for its first sample."""
    environment = {k: v for k, v in os.environ.items() if k != FOLDER_VARIABLE}
    prepend_to_python_path(environment, Path(stepscope.__file__).parent.parent)
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(pid), dumps(request)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,  # Ctrl-C must reach the block only
    )
    assert process.stdout is not None
    if process.stdout.readline() != READY:
        process.kill()
        process.wait()
        raise MonitorError(
            "The monitor process did not start", "Use `stepscope run -- python SCRIPT` instead"
        )
    return process


def _stop(process: subprocess.Popen[bytes], message: bytes) -> None:
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(OSError):  # the monitor was killed; its samples remain
        process.stdin.write(message)
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it still finishes its report
        process.wait(_FINISH_S)
    process.stdout.close()


def _in_one_line(error: BaseException) -> bytes:
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = type(error).__name__
    return " ".join(text.split()).encode("utf-8", "replace")[:1000] + b"\n"


def monitor_parent(pid: int, request_json: str, notify: Callable[[str], None]) -> Path:
    """Sample the parent process until its block ends, and return the finished run folder."""
    # Imported here because the monitored process, which imports this module, does not need them.
    import time

    from stepscope.capture.attach import sampling
    from stepscope.capture.session import Session
    from stepscope.sensors import procfs

    request = replace(loads(RunRequest, request_json), command=procfs.command_line(pid))
    assert request.folder is not None
    control, ready = 0, os.dup(1)
    session = Session(request, RunPaths(request.folder), notify)
    session.restart_clock()
    session.safely(session.begin, pid, None, None, (os.getpid(),))
    if not session.has_tree:
        sys.exit(1)
    os.write(ready, READY)
    message = b""
    for readable in sampling(session, [control]):
        if readable:
            data = os.read(control, 4096)
            message += data
            # Children forked inside the block hold the pipe open, so EOF may never arrive.
            if not data or message.endswith(b"\n"):
                break
    session.mark_end_time(time.monotonic_ns())
    session.safely(session.last_sample)
    session.end(_exit_status(message, session.oom_kills()), [])
    return request.folder


def _exit_status(message: bytes, oom_kills: int) -> ExitStatus:
    from stepscope.capture.outcome import oom_kills_text
    from stepscope.inject.masking import mask_text

    if message == DONE:
        return ExitStatus(Outcome.OK, "the monitored block completed")
    if message == INTERRUPTED:
        return ExitStatus(Outcome.INTERRUPTED, "the monitored block was interrupted")
    if message.startswith(FAILED):
        error = message[len(FAILED) :].decode("utf-8", "replace").strip()
        return ExitStatus(Outcome.CRASHED, f"the monitored block raised {mask_text(error)}")
    reason = "the process exited inside the monitored block"
    if oom_kills:
        reason = f"{reason}; {oom_kills_text('in its cgroup', oom_kills)}"
        return ExitStatus(Outcome.HOST_OOM, reason)
    return ExitStatus(Outcome.CRASHED, reason)
