"""Cleaning up is not cut short, neither by a second Ctrl-C nor by a terminal that is closed."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def uninterrupted() -> Iterator[list[int]]:
    """What asks us to end meanwhile is noted in a list, and nothing else. Only a main thread is
    asked, and can do this."""
    heard: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield heard
        return
    before = {number: signal.getsignal(number) for number in _ASKING}
    for number in _ASKING:
        if before[number] not in (signal.SIG_IGN, None):
            signal.signal(number, lambda number, frame: heard.append(number))
    try:
        yield heard
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)
