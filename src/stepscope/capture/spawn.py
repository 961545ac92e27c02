"""Starts a command as if alone, and waits for it and for signals at once.

The command inherits our descriptors, our process group and the signal mask we were started with.
Signals are blocked in the watcher and wake it from its sleep between samples: what the
terminal sends (Ctrl-C) the command has received itself, what was sent to the watcher alone is
passed on. As a subreaper the watcher inherits, and accounts for, the orphans of the tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import threading
from dataclasses import dataclass

from stepscope.capture.output import Output
from stepscope.capture.sentinel import Sentinel
from stepscope.errors import CannotWatch, CommandNotExecutable, CommandNotFound

PASSED_ON = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FROM_KERNEL = 128
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


@dataclass(frozen=True)
class Signals:
    """The mask the command gets, what was blocked for the watcher, and who got signals with us."""

    inherited: set[signal.Signals]
    taken: set[signal.Signals]
    descriptor: int
    """Readable while one of them is pending."""
    sentinel: Sentinel


def take_signals() -> Signals:
    """From now on signals wait for `sigtimedwait`. What was ignored (nohup) stays ignored.

    Call it before anything is imported that starts threads: they inherit the mask, and a signal
    goes to whatever thread has not blocked it.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # inherited: nobody's end would be told
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    heard = {number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN}
    taken = {signal.SIGCHLD, *heard}
    inherited = signal.pthread_sigmask(signal.SIG_BLOCK, taken)
    sentinel = Sentinel.start()
    return Signals(
        {signal.Signals(n) for n in inherited}, taken, _signal_descriptor(taken), sentinel
    )


def _signal_descriptor(taken: set[signal.Signals]) -> int:
    mask = (ctypes.c_uint64 * 16)(sum(1 << (number - 1) for number in taken))
    descriptor = int(ctypes.CDLL(None, use_errno=True).signalfd(-1, mask, os.O_CLOEXEC))
    if descriptor < 0:
        raise CannotWatch(f"Signals cannot be waited for: {os.strerror(ctypes.get_errno())}")
    return descriptor


def asked_to_end_already(signals: Signals) -> bool:
    """Whether a Ctrl-C came before there was a command that could have received it."""
    return bool(signal.sigpending() & set(_ASKING) & signals.taken)


def give_signals_back(signals: Signals) -> None:
    """What came for the command is forgotten; from now on Ctrl-C is for us."""
    while signal.sigtimedwait(signals.taken, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, signals.inherited)
    signals.sentinel.end()


def become_subreaper() -> bool:
    """Orphans of our descendants become our children, on Linux since 3.4."""
    try:
        return bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)
    except (OSError, AttributeError):
        return False


class Adoption:
    """`with adoption:` orphans of our descendants are ours; as before, once nobody needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before = 0

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = _was_subreaper()
                become_subreaper()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and not self._before:
                with contextlib.suppress(OSError, AttributeError):
                    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


adoption = Adoption()


def _was_subreaper() -> int:
    answer = ctypes.c_int(0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0)
    return answer.value


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


def spawn(
    path: str, command: list[str], environment: dict[str, str], signals: Signals, output: Output
) -> int:
    """Start the command and return its pid."""
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


def wait_for_signal(signals: Signals, seconds: float) -> signal.struct_siginfo | None:
    """Sleep, or be woken by a signal.

    Not with a timed `sigtimedwait`: continued after a stop (Ctrl-Z, fg), Python's may return a
    signal that never came.
    """
    ready, _, _ = select.select([signals.descriptor], [], [], max(0.0, seconds))
    return signal.sigtimedwait(signals.taken, 0) if ready else None


def pass_on(info: signal.struct_siginfo, pid: int, signals: Signals) -> bool:
    """Give the command a signal that only we got; True if it was asked to end."""
    number = info.si_signo
    if number == signal.SIGCHLD:
        return False
    by_all = signals.sentinel.group_had(number)
    signal.sigtimedwait({number}, 0)  # `timeout` sends to us and then to all: that is one signal
    if info.si_code != _FROM_KERNEL and not by_all:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
    return asks_to_end(info)


def asks_to_end(info: signal.struct_siginfo) -> bool:
    return info.si_signo in _ASKING


def has_ended(pid: int) -> bool:
    """Whether a child is a zombie, which it stays: its last figures can still be read."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def die_like(status: int) -> int:
    """The exit code for ours, after ending by the same signal where the command did.

    A shell loop stops at Ctrl-C only if what it ran died of it.
    """
    if not os.WIFSIGNALED(status):
        return os.waitstatus_to_exitcode(status)
    number = os.WTERMSIG(status)
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number
