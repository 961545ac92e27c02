"""Options and clock of all scripts with a planted bottleneck.

Only these are shared: the code that a reader would change to fix a script is in the script itself.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

WARM_UP_S = 2.0


@dataclass(frozen=True)
class Options:
    fixed: bool
    seconds: float


def parse_options(about: str | None) -> Options:
    """Parse the two options of every script."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--fixed", action="store_true", help="train without the planted cause")
    parser.add_argument("--seconds", type=float, default=14.0, help="how long to train")
    chosen = parser.parse_args()
    return Options(fixed=chosen.fixed, seconds=chosen.seconds)


class Clock:
    """Ends training after a while, and measures its speed after the warm-up."""

    def __init__(self, seconds: float) -> None:
        self._began = time.perf_counter()
        self._warm_at = self._began + min(WARM_UP_S, seconds / 2)
        self._ends_at = self._began + seconds
        self._measured_from: float | None = None
        self._samples = 0
        self._last = self._began

    def step(self, samples: int) -> None:
        """Count a step; the measurement starts at the end of the warm-up."""
        self._last = time.perf_counter()
        if self._measured_from is not None:
            self._samples += samples
        elif self._last >= self._warm_at:
            self._measured_from = self._last

    def over(self) -> bool:
        return time.perf_counter() >= self._ends_at

    def report(self) -> None:
        """Print the speed that the speed-up bounds are checked against."""
        elapsed = self._last - (self._measured_from or self._last)
        print(f"samples/s: {self._samples / elapsed:.1f}" if elapsed else "samples/s: unknown")
