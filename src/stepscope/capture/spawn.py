"""Starts a command as if alone: with our descriptors, process group and the signal mask we had.

As a subreaper the monitor inherits, and accounts for, the orphans of the tree. Where the output is
searched for a pattern, the command writes into a pseudo-terminal where it wrote into a terminal, so
that colours and progress bars stay, and into a pipe otherwise. A pump, a process of its own that
outlives a killed monitor, passes everything on.
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
"""In front of PYTHONPATH, it has the Pythons of a command load the hook."""


def _prctl(option: int, argument: Any) -> bool:
    try:
        return bool(ctypes.CDLL(None).prctl(option, argument, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


def become_subreaper() -> bool:
    """Orphans of our descendants become our children, on Linux since 3.4."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Adoption:
    """`with adoption:` orphans of our descendants are ours; as before, once nobody needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                answer = ctypes.c_int(0)
                _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer))
                self._before = answer.value
                become_subreaper()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and not self._before:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0)


adoption = Adoption()


def find_command(command: list[str]) -> str:
    """The path of a command, or the error a shell would give."""
    name = command[0]
    found = shutil.which(name)
    if found:
        return found
    if os.path.isdir(name):
        raise CommandNotExecutable(f"{name} is a folder", "Name the program to run")
    if os.path.exists(name) and os.sep in name:
        raise CommandNotExecutable(
            f"{name} is not executable", f"Run it with its interpreter, or: chmod +x {name}"
        )
    hint = "Check its name and the PATH"
    if name.endswith(".py"):
        hint = f"Run a script with its interpreter: stepscope run -- python {name}"
    raise CommandNotFound(f"There is no command {name}", hint)


def environment_of(request: RunRequest, paths: RunPaths) -> dict[str, str]:
    """The command's environment: ours, with where to report and the hook in front of PYTHONPATH."""
    environment = dict(os.environ)
    environment[FOLDER_VARIABLE] = str(paths.events)
    if request.hook:
        prepend_to_python_path(environment, HOOK_SITE)
    return environment


def prepend_to_python_path(environment: MutableMapping[str, str], folder: Path) -> None:
    others = environment.get("PYTHONPATH")  # an empty entry in it means the current folder
    environment["PYTHONPATH"] = str(folder) + (os.pathsep + others if others else "")


def spawn(
    path: str, command: list[str], environment: dict[str, str], signals: Signals, output: Output
) -> int:
    redirect = [(os.POSIX_SPAWN_DUP2, ours, theirs) for theirs, ours in output.for_command.items()]
    try:
        return os.posix_spawn(
            path,
            command,
            environment,
            file_actions=redirect,
            setsigmask=signals.inherited,
            # Python ignores these two for itself; the command must find them as we found them.
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
    except FileNotFoundError as error:  # a script whose interpreter is not there
        raise CommandNotFound(f"{path} cannot be started: {error.strerror}") from None
    except OSError as error:
        raise CommandNotExecutable(
            f"{path} cannot be executed: {error.strerror}",
            "A script needs a first line such as #!/bin/sh",
        ) from None


@dataclass
class Output:
    """The command's side of its captured output, and the pump that reads the other."""

    for_command: dict[int, int] = field(default_factory=dict)
    """Descriptor of the command (1, 2) to the one it gets."""
    pump: subprocess.Popen[bytes] | None = None

    def command_started(self) -> None:
        """Only the command holds its ends now: the pump ends when the last writer does."""
        for descriptor in set(self.for_command.values()):
            os.close(descriptor)

    def drain(self) -> None:
        """Wait until all that the command printed was passed on, unless survivors still print."""
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
            settings[1] &= ~termios.OPOST  # the real terminal translates line ends, not ours too
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


def die_like(status: int) -> int:
    """The exit code for ours, after ending by the same signal where the command did.

    A shell loop stops at Ctrl-C only if what it ran died of it.
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
    """We keep some per process of the tree. After the start of a command: it keeps its limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
