"""What stepscope asks of a training framework.

An adapter subclasses `Framework`, declares its capabilities, and overrides what it can do. It must
be cheap to import: the framework itself is imported in `load`, in the process that trains.
`tests/contract/test_frameworks.py` checks any adapter; `examples/own_framework/` has a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from stepscope.errors import BadWorkload
from stepscope.workloads.probing import ProbeRequest, ProbeResult, Subject
from stepscope.workloads.reporting import FailureKind, RankPlacement, RankReport
from stepscope.workloads.spec import Workload, option_name, setting_default

Memory = Literal["gpu", "host"]


@dataclass(frozen=True)
class Capabilities:
    """What an adapter can do. Everything else is refused before it trains."""

    devices: tuple[str, ...] = ("cpu",)
    """Values of the setting `device`, beside auto."""
    precisions: tuple[str, ...] = ("fp32",)
    fixed_settings: frozenset[str] = frozenset()
    """Settings that it cannot follow: they must keep their defaults (`ranks`, `compile`)."""
    own_files: bool = False
    """Whether a model may be `FILE.py:FUNCTION` of a user."""
    profiling: bool = False
    memory_cap: bool = False
    """Whether it can limit the GPU memory that it allocates."""
    cycle: bool = False
    """Whether `train` can go on after its steps as a probe does: `RankPlacement.cycle`."""
    probes: bool = False
    """Whether forks of a process that has called `build` can train."""


@dataclass(frozen=True)
class AllocatorStats:
    """What the framework's allocator for the device tells, in bytes and since it began."""

    allocated_peak: int
    reserved_peak: int
    retries: int
    """How often it freed its cache and tried again."""
    ooms: int
    """How often even that did not help."""


class BuiltWorkload(Protocol):
    """A model and some samples in host memory: each probe is a fork of the process with it."""

    @property
    def subject(self) -> Subject: ...

    def probe(
        self,
        request: ProbeRequest,
        tell: Callable[[ProbeResult], None],
        trace: Path,
        beside: Sequence[int] = (),
    ) -> None:
        """In a fork: train each batch for a moment and tell how it went; one that fails is the
        last. `trace` is where allocations go if they are asked for, `beside` are the numbers of
        the probes that were asked at the same time."""


class Framework(Protocol):
    """An adapter. What it does not override is refused, or done as a plain library would."""

    name: str
    """As its users write it, for messages."""
    capabilities: Capabilities

    def load(self) -> None:
        """Import the framework; BadWorkload where it is not installed."""
        return None

    def train(self, workload: Workload, placement: RankPlacement, report: RankReport) -> None:
        """One rank's training: steps to `placement.steps` (a `StepLog`), facts to `report`."""
        raise BadWorkload(f"{self.name} cannot train")

    def launch(self, ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
        """The command that starts `python -m module` once for each rank, with RANK, LOCAL_RANK
        and WORLD_SIZE in the environment."""
        raise BadWorkload(f"{self.name} cannot train with several ranks", "Leave --ranks out")

    def load_for_probes(self) -> bool:
        """Import what each probe would. False where forks can no longer use the device then: the
        process starts anew without it."""
        return True

    def build(self, workload: Workload) -> BuiltWorkload:
        raise BadWorkload(f"{self.name} cannot be probed", "Use a trial for each batch size")

    def is_out_of_memory(self, error: BaseException, memory: Memory) -> bool:
        """Whether an error says that this kind of memory ran out."""
        return memory == "host" and isinstance(error, MemoryError)

    def allocator_stats(self) -> AllocatorStats | None:
        """None where no device is in use."""
        return None


def failure_kind(framework: Framework, error: BaseException) -> FailureKind:
    if isinstance(error, BadWorkload):
        return "workload"
    if framework.is_out_of_memory(error, "host"):
        return "host_oom"
    return "gpu_oom" if framework.is_out_of_memory(error, "gpu") else "error"


def check_capabilities(
    framework: Framework, workload: Workload, placement: RankPlacement | None = None
) -> None:
    """Refuse what the framework does not declare: it would be recorded as if it were done."""
    can, name = framework.capabilities, framework.name
    for setting, values in (
        ("device", ("auto", *can.devices)),
        ("precision", can.precisions),
        *((each, (setting_default(each),)) for each in sorted(can.fixed_settings)),
    ):
        value = getattr(workload, setting)
        if value not in values:
            known = " or ".join(map(str, values))
            raise BadWorkload(
                f"{name} cannot follow {option_name(setting)} {value}", f"Give {known}"
            )
    if workload.is_own and not can.own_files:
        raise BadWorkload(f"{name} cannot train {workload.model}", "Give the name of a model")
    if placement is None:
        return
    for wanted, is_possible, what in (
        (placement.profiled_steps > 0, can.profiling, "be profiled"),
        (placement.gpu_memory is not None, can.memory_cap, "limit its GPU memory"),
        (placement.cycle, can.cycle, "follow its steps with an evaluation, as fit needs it"),
    ):
        if wanted and not is_possible:
            raise BadWorkload(f"{name} cannot {what}")
