"""Progress of a trial: its phase, its steps, and the time since the last change."""

from __future__ import annotations

import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from stepscope.records.trial import RankFacts
from stepscope.runs.paths import RunPaths
from stepscope.runs.trial import read_rank
from stepscope.steplog import RECORD
from stepscope.workloads.spec import DEFAULT_SECONDS, LEAST_STEPS, Workload

_READ_EVERY_S = 0.2
_RATE_STEPS = 50  # steps for the displayed throughput

PHASES = {
    "start": "starting",
    "import": "importing the framework",
    "data": "preparing data",
    "build": "building the model",
    "first_step": "running the first step",
    "profile": "profiling",
}
"""Phases of a rank and their descriptions."""
_AFTER_STEPS = ("profile", "closing")
_Stamp = tuple[int, int] | None
"""Size and modification time of a file."""


@dataclass(frozen=True)
class Progress:
    phase: str
    steps: int = 0
    planned: int | None = None  # total number of steps, if known
    share: float | None = None  # of the training
    samples_per_second: float | None = None
    elapsed_s: float = 0.0
    silent_s: float = 0.0  # since the last change of its files


class Heartbeat:
    """Reads the small files that the ranks of a trial write, a few times a second."""

    def __init__(self, paths: RunPaths, workload: Workload) -> None:
        self._paths = paths
        self._workload = workload
        self._began = self._changed_at = time.monotonic()
        self._read_at = 0.0
        self._rank_stamps: list[_Stamp] = []
        self._step_stamps: list[_Stamp] = []
        self._first = RankFacts()
        self._last = Progress("starting")
        self._planned: int | None = None
        self._first_step_at: float | None = None

    def ranks(self) -> list[RankFacts]:
        ranks = (read_rank(self._paths, rank) for rank in range(self._workload.ranks))
        return [rank for rank in ranks if rank.pid is not None]

    def read(self, at_once: bool = False) -> Progress:
        """Return the progress, at most 0.2 s old unless `at_once`."""
        now = time.monotonic()
        if now < self._read_at and not at_once:
            return self._last
        self._read_at = now + _READ_EVERY_S
        numbers = range(self._workload.ranks)
        rank_stamps = [_stamp(self._paths.trial_rank(number)) for number in numbers]
        step_stamps = [_stamp(self._paths.trial_steps(number)) for number in numbers]
        if rank_stamps != self._rank_stamps:
            self._first = next(iter(self.ranks()), RankFacts())
        if (rank_stamps, step_stamps) != (self._rank_stamps, self._step_stamps):
            self._rank_stamps, self._step_stamps, self._changed_at = rank_stamps, step_stamps, now
        size, _ = step_stamps[0] or (0, 0)
        steps = size // RECORD.size
        first = self._first
        if steps and self._first_step_at is None:
            self._first_step_at = now
        if steps and self._planned is None:
            self._planned = first.planned_steps
        share = None
        if self._first_step_at is not None:
            seconds = self._workload.seconds or DEFAULT_SECONDS
            by_time = (now - self._first_step_at) / seconds
            by_steps = steps / (self._planned or LEAST_STEPS)
            share = min(1.0, by_steps if self._planned else min(by_time, by_steps))
        phase = first.phase or "start"
        is_training = steps and phase not in _AFTER_STEPS
        self._last = Progress(
            phase="training" if is_training else PHASES.get(phase, phase),
            steps=steps,
            planned=self._planned,
            share=share,
            samples_per_second=self._rate(steps),
            elapsed_s=now - self._began,
            silent_s=now - self._changed_at,
        )
        return self._last

    def _rate(self, steps: int) -> float | None:
        count = min(_RATE_STEPS, steps - 1)
        if count < 1:
            return None
        try:
            with self._paths.trial_steps(0).open("rb") as file:
                file.seek((steps - 1 - count) * RECORD.size)
                first, *_ = RECORD.unpack(file.read(RECORD.size))
                file.seek((steps - 1) * RECORD.size)
                last, *_ = RECORD.unpack(file.read(RECORD.size))
        except (OSError, struct.error):
            return None
        return float(count * self._workload.global_batch / max(1e-9, (last - first) / 1e9))


def _stamp(path: Path) -> _Stamp:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns
