"""Deliver every signal to the command exactly once.

Signals are blocked in the monitor and wake it from its sleep between samples. The command receives
signals of the terminal (Ctrl-C) itself; signals that were sent to the monitor alone are forwarded.

`timeout`, shells and schedulers signal whole process groups. The command then already has the
signal, and forwarding it would deliver it twice, which breaks scripts that save a checkpoint on the
first SIGTERM and abort on the second. The kernel does not report the other receivers of a signal.
Therefore a small process in the same process group blocks all signals: a signal that is pending
there was sent to the whole group.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from stepscope.capture.startup import start_error
from stepscope.errors import MonitorError
from stepscope.sensors import procfs

TERMINATION_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED = (*TERMINATION_SIGNALS, signal.SIGUSR1, signal.SIGUSR2)
_FROM_KERNEL = 128
_SETTLE_S = 0.02
"""Time for the sender to signal all processes of the group."""
_MAX_SELECTED = 1024
"""`select` supports descriptors below this number."""


class GroupMember:
    """A process in our group that blocks all signals. A byte in the control pipe discards its
    pending signals; closing the pipe ends it."""

    def __init__(self) -> None:
        """Start the process. Call it before heavy imports and before threads are started."""
        self.pid, self._control = self._fork()

    def _fork(self) -> tuple[int, int]:
        source, control = os.pipe()
        try:
            pid = os.fork()
            if pid == 0:
                _hold_signals(source)
        except OSError:
            os.close(control)
            raise
        finally:
            os.close(source)
        return pid, control

    def restart_if_killed(self) -> None:
        """Start the process again if it has exited; raises OSError if that fails."""
        with contextlib.suppress(ChildProcessError):  # reaped by an earlier call, which failed
            if os.waitpid(self.pid, os.WNOHANG)[0] == 0:
                return
        broken = self._control
        self.pid, self._control = self._fork()
        os.close(broken)

    def received(self, number: int) -> bool:
        """Return whether a signal was sent to the whole process group."""
        time.sleep(_SETTLE_S)
        status = procfs.status(self.pid)
        is_pending = status is not None and status.has_pending(number)
        with contextlib.suppress(BrokenPipeError):  # it was killed
            os.write(self._control, b"f")
        return is_pending

    def end(self) -> None:
        os.close(self._control)  # nothing waits for it: it may be stopped


def _hold_signals(source: int) -> NoReturn:
    """Block all signals, and discard pending ones for each byte from `source`, until it ends."""
    try:
        # It must not keep the files of the monitor open, such as the output of the command.
        os.closerange(0, source)
        os.closerange(source + 1, _MAX_SELECTED)
        everything = signal.valid_signals()
        signal.pthread_sigmask(signal.SIG_BLOCK, everything)
        while os.read(source, 1):
            while signal.sigtimedwait(everything, 0) is not None:
                pass
    finally:
        os._exit(0)


@dataclass(frozen=True)
class Signals:
    """The signals that the monitor intercepts."""

    inherited: set[signal.Signals]
    """The original signal mask, which the command gets."""
    blocked: set[signal.Signals]
    descriptor: int
    """Readable while a blocked signal is pending."""
    group_member: GroupMember


def intercept_signals() -> Signals:
    """Block the signals for the command, to be read with `wait_for_signal`. Ignored signals (nohup)
    stay ignored.

    Call it before importing anything that starts threads: threads inherit the mask, and a signal is
    delivered to any thread that does not block it.
    """
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:  # inherited; children need to be reaped
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    forwarded = {number for number in _FORWARDED if signal.getsignal(number) != signal.SIG_IGN}
    blocked = {signal.SIGCHLD, *forwarded}
    inherited = {signal.Signals(n) for n in signal.pthread_sigmask(signal.SIG_BLOCK, blocked)}
    mask = (ctypes.c_uint64 * 16)(sum(1 << (number - 1) for number in blocked))
    try:
        group_member = GroupMember()
        descriptor = int(ctypes.CDLL(None, use_errno=True).signalfd(-1, mask, os.O_CLOEXEC))
        if descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if descriptor >= _MAX_SELECTED:
            raise MonitorError(
                f"stepscope inherited more than {_MAX_SELECTED} open files",
                "Close some of them before starting stepscope",
            )
    except OSError as error:
        raise start_error("Monitoring cannot start", error) from None
    return Signals(inherited, blocked, descriptor, group_member)


def termination_pending(signals: Signals) -> bool:
    """Return whether a termination signal arrived before the command was started."""
    return bool(signal.sigpending() & set(TERMINATION_SIGNALS) & signals.blocked)


def restore_signals(signals: Signals) -> None:
    """Discard pending signals and restore the original mask, so that Ctrl-C reaches stepscope."""
    while signal.sigtimedwait(signals.blocked, 0) is not None:
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, signals.inherited)
    signals.group_member.end()


def wait_for_signal(signals: Signals, seconds: float) -> signal.struct_siginfo | None:
    """Sleep until a signal arrives or the time is over.

    A timed `sigtimedwait` does not work here: when the process continues after a stop (Ctrl-Z, fg),
    Python may return a signal that was never sent.
    """
    ready, _, _ = select.select([signals.descriptor], [], [], max(0.0, seconds))
    return signal.sigtimedwait(signals.blocked, 0) if ready else None


def forward(info: signal.struct_siginfo, pid: int, signals: Signals) -> bool:
    """Forward a signal that only the monitor received. Return whether the command received a
    termination signal."""
    number = info.si_signo
    if number == signal.SIGCHLD:
        return False
    sent_to_group = signals.group_member.received(number)
    signal.sigtimedwait({number}, 0)  # `timeout` signals its child and then the group: one signal
    if info.si_code != _FROM_KERNEL and not sent_to_group:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return False
        except PermissionError:
            name = signal.Signals(number).name
            raise MonitorError(
                f"{name} was not forwarded: the command runs as another user"
            ) from None
    return number in TERMINATION_SIGNALS


@contextmanager
def signals_as_bytes(numbers: Iterable[int]) -> Iterator[int]:
    """Yield a descriptor from which the numbers of arriving signals can be read."""
    source, sink = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    previous_fd = signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield source
    finally:
        signal.set_wakeup_fd(previous_fd)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(source)
        os.close(sink)
