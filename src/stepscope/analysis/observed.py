"""What is known of a run when one asks what holds it back: samples, steps, loaders, looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from stepscope.analysis.passes import Records, Timeline
from stepscope.analysis.summary import Recorded
from stepscope.records import Ending

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NO_RECORDS: Records = np.empty(
    0, [("t", "<i8"), ("kind", "<u2"), ("flags", "<u2"), ("number", "<u4"), ("a", "<i8"),
        ("b", "<i8")],
)  # fmt: skip


@dataclass(frozen=True)
class Loader:
    """What a data loader was told to do."""

    number: int
    workers: int
    prefetch: int
    batch_size: int | None
    pins: bool
    persists: bool
    where: str | None = None
    """The line of code that made it: "train.py:41"."""
    line: str | None = None


@dataclass(frozen=True)
class Place:
    """Where the training thread was found."""

    where: str
    """The user's line: "train.py:41"."""
    code: str
    """What that line was about."""
    inner: str = ""
    """The innermost function, "torch/nn/modules/linear.py:forward", and its code."""
    inner_code: str = ""
    part: str = ""
    """Which part of PyTorch it went through: "loader", "save", "ranks", "backward", …"""


@dataclass(frozen=True)
class Looks:
    """How long a thread was where, told every few seconds: `place` points into `places`."""

    t: Ints
    place: Ints
    seconds: Floats
    places: Sequence[Place] = ()

    def between(self, begin_ns: int, end_ns: int) -> dict[Place, float]:
        """Seconds by place, of what was told in a stretch of time."""
        inside = (self.t > begin_ns) & (self.t <= end_ns)
        totals = np.bincount(
            self.place[inside], weights=self.seconds[inside], minlength=len(self.places)
        )
        return {
            place: float(total) for place, total in zip(self.places, totals, strict=False) if total
        }


NO_LOOKS = Looks(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))


@dataclass(frozen=True)
class Trainer:
    """One process that trains: what it reported of itself."""

    timeline: Timeline
    loaders: Mapping[int, Loader] = field(default_factory=dict)
    device_steps: Records = field(default_factory=lambda: NO_RECORDS)
    """Steps that were timed on a GPU: `a` ns from batch to end, `b` ns to queue them."""
    looks: Looks = NO_LOOKS
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def rank(self) -> int | None:
        return self.timeline.rank


@dataclass(frozen=True)
class Work:
    """What preparing batches took, batch by batch: when it was done, and seconds."""

    t: Ints
    wall: Floats
    cpu: Floats
    without_cpu: Floats
    """Ready to run, but no CPU was free."""

    def __len__(self) -> int:
        return len(self.t)

    def between(self, begin_ns: int, end_ns: int) -> Work:
        inside = (self.t > begin_ns) & (self.t <= end_ns)
        return Work(self.t[inside], self.wall[inside], self.cpu[inside], self.without_cpu[inside])

    @property
    def blocked(self) -> Floats:
        """Neither computing nor waiting for a CPU: for storage, the network, a lock."""
        left: Floats = np.clip(self.wall - self.cpu - self.without_cpu, 0.0, None)
        return left


NO_WORK = Work(np.empty(0, np.int64), *[np.empty(0)] * 3)


@dataclass(frozen=True)
class Machine:
    """What the run could have used. None where it is not known."""

    cpus: int | None = None
    """Of the machine; how many of them the run may use is in `Recorded.cpu_allowed`."""
    memory_bytes: float | None = None
    max_sm_clock: float | None = None


@dataclass(frozen=True)
class Observed:
    """All that an explanation is made of."""

    recorded: Recorded
    trainers: tuple[Trainer, ...] = ()
    samples: Work = NO_WORK
    """What reading and transforming the samples of each batch took, in all workers."""
    collation: Work = NO_WORK
    machine: Machine = Machine()
    ending: Ending | None = None
    hook: str = ""
    """Why nothing is known of steps, where the hook said so."""
