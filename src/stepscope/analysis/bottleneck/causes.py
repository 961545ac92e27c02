"""The causes that `explain` can find. `report.bottleneck.messages` has the texts of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["bottleneck", "healthy", "ends_run", "accepted", "undecided"]
"""Determines the order of findings: `ends_run` first, then bottlenecks, `healthy`, `accepted` (a
limit that the owner has set), and `undecided` (no cause found) last."""


@dataclass(frozen=True)
class Cause:
    """A cause that limits training, or the healthy state."""

    key: str
    kind: Kind = "bottleneck"
    explains: tuple[str, ...] = ()
    """Consequences of this cause, which are not reported as separate findings."""


_WAITS_FOR_CORES = ("input.preparation", "input.workers", "gpu.launch")

# fmt: off
_TABLE = (
    Cause("input.workers"),
    Cause("input.preparation"),
    Cause("input.fetch"),
    Cause("input.collation"),
    Cause("input.ipc"),
    Cause("input.worker_startup"),
    Cause("cpu.quota", explains=(*_WAITS_FOR_CORES, "cpu.serial")),
    Cause("cpu.cores", explains=(*_WAITS_FOR_CORES, "cpu.threads")),
    Cause("cpu.threads", explains=(*_WAITS_FOR_CORES, "input.fetch")),
    Cause("cpu.serial"),
    Cause("gpu.transfer"),
    Cause("gpu.launch"),
    Cause("gpu.sync"),
    Cause("loop.logging"),
    Cause("batch.small"),
    Cause("gpu.precision"),
    Cause("gpu.underutilized"),
    Cause("gpu.compute", "healthy"),
    Cause("gpu.bandwidth", "healthy"),
    Cause("cpu.compute", "healthy"),
    Cause("ranks.straggler"),
    Cause("ranks.communication"),
    Cause("loop.checkpoint"),
    Cause("loop.evaluation"),
    Cause("loop.sleep"),
    Cause("memory.gpu", explains=("gpu.launch", "gpu.sync")),
    Cause("memory.host"),
    Cause("memory.shm"),
    Cause("leak.host", "ends_run", explains=("loop.slowdown",)),
    Cause("leak.gpu", "ends_run"),
    Cause("loop.slowdown"),
    Cause("throttle.power", "accepted"),
    Cause("throttle.thermal"),
    Cause("interference.cpu",
          explains=(*_WAITS_FOR_CORES, "input.fetch", "cpu.cores", "loop.slowdown")),
    Cause("interference.gpu",
          explains=("gpu.launch", "throttle.power", "gpu.underutilized", "gpu.sync")),
    Cause("io.wait"),
    Cause("gpu.idle"),
    Cause("too_short", "undecided"),
    Cause("unknown", "undecided"),
)
# fmt: on

CAUSES: dict[str, Cause] = {cause.key: cause for cause in _TABLE}
