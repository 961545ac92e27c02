"""The causes that can be found. `report.bottleneck.words` has a row of words for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["bottleneck", "healthy", "ends_run", "accepted", "undecided"]
"""How a finding is ranked: what ends the run comes first, a limit that its owner has set (accepted)
after what is healthy, and what blames nothing (undecided) last."""


@dataclass(frozen=True)
class Cause:
    """What can limit a training, or how it should be."""

    key: str
    kind: Kind = "bottleneck"
    explains: tuple[str, ...] = ()
    """What it brings about: a consequence is not a finding of its own beside it."""


_WAITS_FOR_CORES = ("input.preparation", "input.workers", "launch")

# fmt: off
_TABLE = (
    Cause("input.workers"),
    Cause("input.preparation"),
    Cause("input.fetch"),
    Cause("input.collation"),
    Cause("input.handover"),
    Cause("input.startup"),
    Cause("cpu.quota", explains=(*_WAITS_FOR_CORES, "cpu.serial")),
    Cause("cpu.cores", explains=(*_WAITS_FOR_CORES, "cpu.threads")),
    Cause("cpu.threads", explains=(*_WAITS_FOR_CORES, "input.fetch")),
    Cause("cpu.serial"),
    Cause("transfer"),
    Cause("launch"),
    Cause("sync"),
    Cause("sync.logging"),
    Cause("batch.small"),
    Cause("gpu.precision"),
    Cause("gpu.underfilled"),
    Cause("gpu.compute", "healthy"),
    Cause("gpu.bandwidth", "healthy"),
    Cause("cpu.compute", "healthy"),
    Cause("ranks.straggler"),
    Cause("ranks.communication"),
    Cause("outside.checkpoint"),
    Cause("outside.evaluation"),
    Cause("outside.other"),
    Cause("memory.gpu", explains=("launch", "sync")),
    Cause("memory.host"),
    Cause("memory.shm"),
    Cause("leak.host", "ends_run", explains=("drift.steps",)),
    Cause("leak.gpu", "ends_run"),
    Cause("drift.steps"),
    Cause("throttle.power", "accepted"),
    Cause("throttle.heat"),
    Cause("interference.cpu",
          explains=(*_WAITS_FOR_CORES, "input.fetch", "cpu.cores", "drift.steps")),
    Cause("interference.gpu", explains=("launch", "throttle.power", "gpu.underfilled", "sync")),
    Cause("io.bound"),
    Cause("gpu.idle"),
    Cause("short", "undecided"),
    Cause("unclear", "undecided"),
)
# fmt: on

CAUSES: dict[str, Cause] = {cause.key: cause for cause in _TABLE}
