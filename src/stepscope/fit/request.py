"""What a user asks of `fit`, as one record; the command line and the Python API both build it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from stepscope.errors import CannotTry
from stepscope.trials.limits.spec import Limits, MachineResources, check_limits, parse_size
from stepscope.workloads.probing import ProbeResult
from stepscope.workloads.spec import Workload, nearest

METHODS = ("auto", "linear2019")
_PERCENTAGE = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)\s*%")


@dataclass(frozen=True)
class FitRequest:
    """A workload, and the memory that its batches are to fit into."""

    workload: Workload
    limits: Limits = field(default_factory=Limits)
    """Memory of the GPU or of the host, GPUs, and the stall timeout of a probe."""
    headroom: int = 0
    """Bytes to leave free."""
    headroom_share: float = 0.0
    """The same as a part of the limit, below 1."""
    cards: tuple[int, ...] = ()
    """Bytes of other cards to predict batches for; nothing: those of the usual cards."""
    method: str = "auto"
    prove: bool = False
    estimate: bool = False
    fresh: bool = False
    """Whether to measure again, also where the answer is in the cache."""

    def check(self) -> None:
        """CannotTry where it cannot be answered on any machine, or not within this one's limits."""
        check_limits(self.limits, MachineResources.here())
        if self.method not in METHODS:
            raise CannotTry(f"--method {self.method} is not known", nearest(self.method, METHODS))
        if self.headroom < 0:
            raise CannotTry("--headroom is less than nothing", "Give a size from 0 up")
        if self.workload.device == "cpu" and self.limits.gpus:
            raise CannotTry(
                f"--device cpu leaves out the GPU that --gpus {','.join(self.limits.gpus)} names",
                "Give one of them",
            )

    def check_without_gpu(self) -> list[str]:
        """CannotTry where it is about a GPU; else which options do nothing on the host."""
        for given, option in (
            (self.limits.gpu_memory is not None, "--gpu-memory"),
            (self.cards, "--cards"),
            (self.method == "linear2019", "--method linear2019"),
        ):
            if not given:
                continue
            why = "there is none to probe here"
            hint = "Leave it out to fit host memory, or see: stepscope doctor"
            if self.workload.device == "cpu":
                why = "--device cpu leaves it out"
                hint = f"Leave out {option} to fit host memory, or --device cpu to fit the GPU's"
            raise CannotTry(f"{option} is about a GPU, and {why}", hint)
        if self.workload.needs_gpu:
            raise CannotTry("There is no GPU here", "Leave --device out, or see: stepscope doctor")
        ignored = []
        if self.prove:
            ignored.append(
                "--prove is for a GPU: on the host an answer passes in three fresh processes anyway"
            )
        if self.estimate:
            ignored.append("--estimate is for a GPU: on the host batches are tried up to the limit")
        return ignored


@dataclass(frozen=True)
class FitListener:
    tell: Callable[[str], None] = lambda text: None
    """What the user should know meanwhile."""
    show: Callable[[str], None] = lambda text: None
    """What is under way."""
    tried: Callable[[ProbeResult], None] = lambda result: None
    """A batch that was tried on the host, where each takes seconds."""


def parse_headroom(given: int | str) -> tuple[int, float]:
    """Bytes to leave free, and a part of the limit: one of them is 0."""
    text = str(given).strip()
    if not text.endswith("%"):
        return parse_size(given), 0.0
    if not _PERCENTAGE.fullmatch(text):
        raise CannotTry(f"--headroom {text} is no percentage", "For example: 5%")
    share = float(text[:-1]) / 100
    if share >= 1:
        raise CannotTry(f"--headroom {text} leaves nothing to fit into", "Give less than 100%")
    return 0, share
