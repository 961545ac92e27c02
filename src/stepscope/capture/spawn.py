"""Start a command as if without stepscope: same descriptors, process group and signal mask.

As a subreaper the monitor inherits, and accounts for, the orphans of the tree. If the output is
searched for a pattern, the command writes to a pseudo-terminal in place of a terminal, so that
colors and progress bars stay, and to a pipe otherwise. A pump, a separate process that keeps
running if the monitor is killed, forwards the output.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any

import stepscope.inject
from stepscope.capture.request import RunRequest
from stepscope.capture.signals import Signals
from stepscope.errors import CommandNotExecutable, CommandNotFound, MonitorError
from stepscope.inject.events import FOLDER_VARIABLE
from stepscope.inject.pump import OUTPUT_LOST, SOURCE_ENDED, TARGET_GONE
from stepscope.runs.paths import RunPaths

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_DRAIN_S, _DRAIN_POLL_S = 2.0, 0.002
RESTART_S = 0.5
"""Shortest time between two starts of a pump."""
HOOK_SITE = Path(stepscope.inject.__file__).with_name("site")
"""Folder that makes Python load the import hook when it is first in PYTHONPATH."""


def _prctl(option: int, argument: Any) -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(option, argument, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def become_subreaper() -> bool:
    """Become the parent of orphaned descendants (Linux 3.4 or later)."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Subreaper:
    """A reentrant context manager: this process is a subreaper inside of `with subreaper:`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                value = ctypes.c_int(0)
                _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(value))
                self._before = value.value
                become_subreaper()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and not self._before:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)


subreaper = Subreaper()


def find_command(command: list[str]) -> str:
    """Return the path of a command. Raises the error that a shell would report."""
    name = command[0]
    if path := shutil.which(name):
        return path
    if os.path.isdir(name):
        raise CommandNotExecutable(f"`{name}` is a folder", "Specify the program to run")
    if os.path.exists(name) and os.sep in name:
        raise CommandNotExecutable(
            f"`{name}` is not executable",
            f"Run it with its interpreter, or make it executable: chmod +x {name}",
        )
    hint = "Check the name and PATH"
    if len(command) == 1 and shutil.which(name.partition(" ")[0]):
        hint = f"Remove the quotes around the command: stepscope run -- {name}"
    elif name.endswith(".py"):
        hint = f"Run a script with its interpreter: stepscope run -- python {name}"
    raise CommandNotFound(f"Command not found: `{name}`", hint)


def environment_of(request: RunRequest, paths: RunPaths) -> dict[str, str]:
    """Return the environment of the command: with the events folder and the import hook."""
    environment = dict(os.environ)
    environment[FOLDER_VARIABLE] = str(paths.events)
    if request.hook:
        prepend_to_python_path(environment, HOOK_SITE)
    return environment


def prepend_to_python_path(environment: MutableMapping[str, str], folder: Path) -> None:
    current = environment.get("PYTHONPATH")  # an empty entry would mean the current folder
    environment["PYTHONPATH"] = str(folder) + (os.pathsep + current if current else "")


def spawn(
    path: str, command: list[str], environment: dict[str, str], signals: Signals, output: Output
) -> int:
    redirect = [(os.POSIX_SPAWN_DUP2, end, target) for target, end in output.for_command.items()]
    try:
        return os.posix_spawn(
            path,
            command,
            environment,
            file_actions=redirect,
            setsigmask=signals.inherited,
            # Python ignores these two signals; the command needs their default handlers.
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
    except FileNotFoundError as error:  # a script whose interpreter does not exist
        raise CommandNotFound(f"`{path}` cannot be started: {error.strerror}") from None
    except OSError as error:
        raise CommandNotExecutable(
            f"`{path}` cannot be executed: {error.strerror}",
            "A script needs a first line such as #!/bin/sh",
        ) from None


class Pump:
    """A process that forwards one stream of the output.

    The reading end stays open here too: the command can write while a killed pump is started again.
    """

    def __init__(self, source: int, target: int, log: Path, events: Path, pattern: str) -> None:
        self.source, self.target = source, target
        program = Path(stepscope.inject.__file__).with_name("pump.py")
        self._command = [sys.executable, "-I", "-W", "ignore", str(program), str(events)]
        self._command += [f"{os.getpid()}.bin", pattern, str(source), str(target), str(log)]

    def start(self, ready: int = -1) -> None:
        """Start the process, which writes a byte to `ready`. Raises OSError if that fails."""
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [*self._command, str(ready)],
            stdin=subprocess.DEVNULL,
            pass_fds=[self.source] if ready < 0 else [self.source, ready],
        )


class Output:
    """The captured output of a command: the ends for the command, and a pump for each stream."""

    def __init__(self) -> None:
        self.for_command: dict[int, int] = {}
        """Descriptor in the command (1, 2) to the descriptor that replaces it."""
        self.pumps: list[Pump] = []
        self.closed_because = ""
        """Why the command can no longer write to a stream."""
        self._ready = -1

    def capture(self, paths: RunPaths, pattern: str) -> None:
        """Start the pumps for a command that is about to start. Raises OSError."""
        self._ready, ready = os.pipe()
        for descriptor, log in ((1, paths.stdout_log), (2, paths.stderr_log)):
            if not os.get_inheritable(descriptor):
                continue  # it was closed, and stays so
            source, end = os.openpty() if os.isatty(descriptor) else os.pipe()
            with contextlib.suppress(termios.error):  # a pipe
                settings = termios.tcgetattr(end)
                settings[1] &= ~termios.OPOST  # the real terminal already translates line endings
                termios.tcsetattr(end, termios.TCSANOW, settings)
            self.for_command[descriptor] = end
            pump = Pump(source, descriptor, log, paths.events, pattern)
            pump.start(ready)
            self.pumps.append(pump)
        os.close(ready)

    def wait_until_ready(self) -> None:
        """Raise MonitorError if the output cannot be captured."""
        if any(os.read(self._ready, 1) == b"" for _ in self.pumps):
            raise MonitorError("The process that captures the output did not start")

    def abandon(self) -> None:
        """End the pumps of a command that was not started."""
        for pump in self.pumps:
            pump.process.kill()
            pump.process.wait()

    def command_started(self) -> None:
        """Close the command's ends here, so that the pumps end with the last writer."""
        for descriptor in {*self.for_command.values(), self._ready} - {-1}:
            os.close(descriptor)

    def restart_killed(self, report_problem: Callable[[str], None]) -> bool:
        """Start pumps again that were killed, and return whether all are running. If a pump has
        ended by itself, close its stream: the command gets SIGPIPE if nobody reads its output."""
        for pump in list(self.pumps):
            code = pump.process.poll()
            if code in (SOURCE_ENDED, TARGET_GONE, OUTPUT_LOST):
                self.pumps.remove(pump)
                os.close(pump.source)
                name = "standard output" if pump.target == 1 else "standard error"
                if code == TARGET_GONE:
                    self.closed_because = f"the reader of its {name} had exited"
                elif code == OUTPUT_LOST:
                    report_problem(f"part of the command's {name} could not be written")
            elif code is not None and time.monotonic() - pump.started > RESTART_S:
                pump.start()
                report_problem(
                    "the process that captures the output was killed and has been restarted; some "
                    "output may be missing"
                )
        return all(pump.process.returncode is None for pump in self.pumps)

    def drain(self, report_problem: Callable[[str], None]) -> None:
        """Wait until all output was forwarded, for a limited time: survivors may still write."""
        deadline = time.monotonic() + _DRAIN_S
        while self.pumps and time.monotonic() < deadline:
            time.sleep(_DRAIN_POLL_S)
            self.restart_killed(report_problem)


def exit_like(status: int) -> int:
    """Return the exit code of the command. If a signal killed it, kill this process in the same
    way: a shell loop stops at Ctrl-C only if the signal ended the process.
    """
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    number = os.WTERMSIG(status)
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number


def allow_many_descriptors() -> None:
    """Raise the limit of open files: the monitor keeps several open per process of the tree. Call
    it after the command has started, so that the command keeps its own limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
