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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from stepscope.capture.signals import signals_as_bytes

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGWINCH)
_READ_BYTES = 1024


@dataclass
class Terminal:
    """Tells of keys and signals when it is asked: nothing interrupts the drawing of a frame."""

    signals: int
    keyboard: int | None

    def wait(self, until: float) -> tuple[str, set[int]]:
        """Keys and signals; none where nothing came until then (on the monotonic clock)."""
        sources = [each for each in (self.signals, self.keyboard) if each is not None]
        ready, _, _ = select.select(sources, [], [], max(0.0, until - time.monotonic()))
        signals = set(os.read(self.signals, _READ_BYTES)) if self.signals in ready else set()
        typed = b""
        if self.keyboard in ready:
            with contextlib.suppress(OSError):
                typed = os.read(self.keyboard, _READ_BYTES)
            if not typed:  # nobody will type any more
                self.keyboard = None
        return typed.decode("utf-8", "replace"), signals


@contextmanager
def taken_terminal() -> Iterator[Terminal]:
    with signals_as_bytes(_SIGNALS) as signals:
        if sys.stdin is None or not sys.stdin.isatty():
            yield Terminal(signals, None)
            return
        keyboard = sys.stdin.fileno()
        modes = termios.tcgetattr(keyboard)
        tty.setcbreak(keyboard, termios.TCSADRAIN)
        try:
            yield Terminal(signals, keyboard)
        finally:
            with contextlib.suppress(termios.error):  # the terminal may be gone
                termios.tcsetattr(keyboard, termios.TCSADRAIN, modes)
