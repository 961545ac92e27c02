"""Signals that wait for the monitor, and reach the command once.

They are blocked in the monitor and wake it from its sleep between samples: what the terminal sends
(Ctrl-C) the command has received itself, what was sent to the monitor alone is passed on.

`timeout`, shells and schedulers signal whole process groups: then the command has the signal
already, and passing it on would deliver it twice, which a script that saves on the first SIGTERM
and gives up on the second does not survive. The kernel does not say to whom else it delivered. So
a small process, the sentinel, sits in our group with every signal blocked: what is pending there
was sent to all.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stepscope.errors import CannotWatch
from stepscope.sensors import procfs

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (*ASKING, signal.SIGUSR1, signal.SIGUSR2)
_FROM_KERNEL = 128
_SETTLE_S = 0.02
"""Whoever signals many processes needs a moment to reach them all."""


@dataclass(frozen=True)
class Sentinel:
    """The process that sits there, and the pipe that tells it to forget, or (closed) to end."""

    pid: int
    control: int

    @classmethod
    def start(cls) -> Sentinel:
        """Fork it: before anything heavy is imported, and before there are threads."""
        source, control = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(control)
            everything = signal.valid_signals()
            signal.pthread_sigmask(signal.SIG_BLOCK, everything)
            try:
                while os.read(source, 1):
                    while signal.sigtimedwait(everything, 0) is not None:
                        pass
            finally:
                os._exit(0)
        os.close(source)
        return cls(pid, control)

    def group_had(self, number: int) -> bool:
        """Whether everybody in our group got a signal that we got."""
        time.sleep(_SETTLE_S)
        status = procfs.status(self.pid)
        had = status is not None and status.has_pending(number)
        os.write(self.control, b"f")
        return had

    def end(self) -> None:
        os.close(self.control)
        os.waitpid(self.pid, 0)


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
    heard = {number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN}
    taken = {signal.SIGCHLD, *heard}
    inherited = {signal.Signals(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, taken)}
    sentinel = Sentinel.start()
    mask = (ctypes.c_uint64 * 16)(sum(1 << (number - 1) for number in taken))
    descriptor = int(ctypes.CDLL(None, use_errno=True).signalfd(-1, mask, os.O_CLOEXEC))
    if descriptor < 0:
        raise CannotWatch(f"Signals cannot be waited for: {os.strerror(ctypes.get_errno())}")
    return Signals(inherited, taken, descriptor, sentinel)


def asked_to_end_already(signals: Signals) -> bool:
    """Whether a Ctrl-C came before there was a command that could have received it."""
    return bool(signal.sigpending() & set(ASKING) & signals.taken)


def give_signals_back(signals: Signals) -> None:
    """What came for the command is forgotten; from now on Ctrl-C is for us."""
    while signal.sigtimedwait(signals.taken, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, signals.inherited)
    signals.sentinel.end()


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
    return number in ASKING


@contextmanager
def signals_as_bytes(numbers: Iterable[int]) -> Iterator[int]:
    """A descriptor from which the numbers of signals can be read that came meanwhile."""
    source, sink = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    woken_before = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield source
    finally:
        signal.set_wakeup_fd(woken_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(source)
        os.close(sink)
