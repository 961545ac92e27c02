"""A terminal taken for a while: keys come one by one, signals wait, and all is put back."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)
_READ_BYTES = 1024


class Terminal:
    """Tells of keys and signals when it is asked: nothing interrupts the drawing of a frame."""

    def __enter__(self) -> Terminal:
        self._tells, self._told = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wakeup = signal.set_wakeup_fd(self._told, warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in _SIGNALS}
        self._keyboard = -1
        self._modes: list[Any] = []
        if sys.stdin is not None and sys.stdin.isatty():
            self._keyboard = sys.stdin.fileno()
            self._modes = termios.tcgetattr(self._keyboard)
            tty.setcbreak(self._keyboard, termios.TCSADRAIN)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._modes:
            with contextlib.suppress(termios.error):  # the terminal may be gone
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._modes)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._tells)
        os.close(self._told)

    def wait(self, until: float) -> tuple[str, set[int]]:
        """Keys and signals; none where nothing came until then (on the monotonic clock)."""
        sources = [self._tells] + [self._keyboard] * (self._keyboard >= 0)
        ready, _, _ = select.select(sources, [], [], max(0.0, until - time.monotonic()))
        signals = set(os.read(self._tells, _READ_BYTES)) if self._tells in ready else set()
        return self._keys() if self._keyboard in ready else "", signals

    def _keys(self) -> str:
        try:
            typed = os.read(self._keyboard, _READ_BYTES)
        except OSError:
            typed = b""
        if not typed:  # nobody will type any more
            self._keyboard = -1
        return typed.decode("utf-8", "replace")
