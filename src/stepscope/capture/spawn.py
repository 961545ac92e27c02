"""Start a command as if without stepscope: same descriptors, process group and signal mask.

As a subreaper the monitor inherits, and accounts for, the orphans of the tree. If the output is
searched for a pattern, the command writes to a pseudo-terminal in place of a terminal, so that
colors and progress bars stay, and to a pipe otherwise. The pump, a separate process that keeps
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
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import stepscope.inject
from stepscope.capture.request import RunRequest
from stepscope.capture.signals import Signals
from stepscope.errors import CommandNotExecutable, CommandNotFound
from stepscope.inject.events import FOLDER_VARIABLE
from stepscope.runs.paths import RunPaths

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
_DRAIN_S = 2.0
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


@dataclass
class Output:
    """The command's ends of its captured output, and the pump that reads the other ends."""

    for_command: dict[int, int] = field(default_factory=dict)
    """Descriptor in the command (1, 2) to the descriptor that replaces it."""
    pump: subprocess.Popen[bytes] | None = None

    def command_started(self) -> None:
        """Close the command's ends here, so that the pump ends with the last writer."""
        for descriptor in set(self.for_command.values()):
            os.close(descriptor)

    def drain(self) -> None:
        """Wait until all output was forwarded, for a limited time: survivors may still write."""
        if self.pump is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.pump.wait(_DRAIN_S)


def capture_output(paths: RunPaths, pattern: str) -> Output:
    """Start a pump for the standard output and error of a command that is about to start."""
    for_command: dict[int, int] = {}
    arguments, sources = [], []
    for descriptor, log in ((1, paths.stdout_log), (2, paths.stderr_log)):
        source, end = os.openpty() if os.isatty(descriptor) else os.pipe()
        with contextlib.suppress(termios.error):  # a pipe
            settings = termios.tcgetattr(end)
            settings[1] &= ~termios.OPOST  # the real terminal already translates line endings
            termios.tcsetattr(end, termios.TCSANOW, settings)
        for_command[descriptor] = end
        sources.append(source)
        arguments.append(f"{source}:{descriptor}:{log}")
    program = Path(stepscope.inject.__file__).with_name("pump.py")
    pump = subprocess.Popen(
        [sys.executable, "-I", str(program), str(paths.events), pattern, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=sources,
    )
    for source in sources:
        os.close(source)
    return Output(for_command, pump)


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
