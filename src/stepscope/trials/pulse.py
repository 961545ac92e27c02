"""Whether a trial lives: its phase, its steps, and since when nothing new was heard of it."""

from __future__ import annotations

import json
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.runs.paths import RunPaths
from stepscope.steplog import RECORD
from stepscope.workloads.spec import DEFAULT_SECONDS, LEAST_STEPS, Workload

_LOOK_S = 0.2
_RATE_OVER = 50
"""The rate that is shown is that of so many steps."""


_AFTER_STEPS = ("profile", "closing")
_WORDS = {
    "start": "starting",
    "import": "importing the framework",
    "data": "preparing data",
    "build": "building the model",
    "first step": "taking the first step",
    "profile": "profiling",
}


@dataclass(frozen=True)
class Progress:
    """How far a trial is."""

    phase: str
    steps: int
    planned: int | None
    """How many it will be, once that is known."""
    share: float | None
    """Of the way to its end."""
    samples_per_second: float | None
    elapsed_s: float
    silent_s: float


class Pulse:
    """Looks at the small files that a trial's ranks write, a few times a second."""

    def __init__(self, paths: RunPaths, workload: Workload) -> None:
        self._paths = paths
        self._workload = workload
        self._began = self._news_at = time.monotonic()
        self._look_at = 0.0
        self._sign: tuple[Any, ...] = ()
        self._last = Progress("starting", 0, None, None, None, 0.0, 0.0)
        self._planned: int | None = None
        self._first_step_at: float | None = None

    def feel(self, now: bool = False) -> Progress:
        """How it is, or was a moment ago."""
        time_now = time.monotonic()
        if now or time_now >= self._look_at:
            self._look_at = time_now + _LOOK_S
            self._last = self._look(time_now)
        return self._last

    def ranks(self) -> list[dict[str, Any]]:
        """What each rank says of itself, as far as it can be read."""
        found = []
        for rank in range(self._workload.ranks):
            try:
                found.append(json.loads(self._paths.trial_rank(rank).read_text()))
            except (OSError, ValueError):
                continue
        return found

    def _look(self, now: float) -> Progress:
        sign = tuple(
            _stamp(path)
            for rank in range(self._workload.ranks)
            for path in (self._paths.trial_rank(rank), self._paths.trial_steps(rank))
        )
        if sign != self._sign:
            self._sign, self._news_at = sign, now
        steps = _size(self._paths.trial_steps(0)) // RECORD.size
        if steps and self._first_step_at is None:
            self._first_step_at = now
        if steps and self._planned is None:
            self._planned = next((r.get("planned_steps") for r in self.ranks()), None)
        return Progress(
            self._phase(steps),
            steps,
            self._planned,
            self._share(steps, now),
            self._rate(steps),
            now - self._began,
            now - self._news_at,
        )

    def _phase(self, steps: int) -> str:
        """What it does: a person wants to know what there is to wait for."""
        told = next(iter(self.ranks()), {}).get("phase") or "start"
        return "training" if steps and told not in _AFTER_STEPS else _WORDS.get(told, told)

    def _share(self, steps: int, now: float) -> float | None:
        if self._first_step_at is None:
            return None
        if self._planned:
            return min(1.0, steps / self._planned)
        seconds = self._workload.seconds or DEFAULT_SECONDS
        return min(1.0, (now - self._first_step_at) / seconds, steps / LEAST_STEPS)

    def _rate(self, steps: int) -> float | None:
        count = min(_RATE_OVER, steps - 1)
        if count < 1:
            return None
        try:
            with self._paths.trial_steps(0).open("rb") as file:
                file.seek((steps - 1 - count) * RECORD.size)
                first = int(RECORD.unpack(file.read(RECORD.size))[0])
                file.seek((steps - 1) * RECORD.size)
                last = int(RECORD.unpack(file.read(RECORD.size))[0])
        except (OSError, struct.error):
            return None
        return count * self._workload.global_batch / max(1e-9, (last - first) / 1e9)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _size(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
