"""The interface of a training framework.

An adapter subclasses `Framework`, declares its capabilities and overrides the methods that it
supports. Importing the adapter must be cheap: it imports the framework itself in `load`, in the
process that trains. `tests/contract/test_frameworks.py` checks any adapter, and
`examples/custom_framework/` contains a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from stepscope.errors import WorkloadError
from stepscope.workloads.probing import ProbeRequest, ProbeResult, Subject
from stepscope.workloads.reporting import FailureKind, RankPlacement, RankReport
from stepscope.workloads.spec import Workload, option_name, setting_default

Memory = Literal["gpu", "host"]


@dataclass(frozen=True)
class Capabilities:
    """What an adapter supports. Everything else is an error before the training starts."""

    devices: tuple[str, ...] = ("cpu",)
    """Values of the setting `device` other than auto."""
    precisions: tuple[str, ...] = ("fp32",)
    fixed_settings: frozenset[str] = frozenset()
    """Settings that it does not support, such as `ranks`: they must keep their defaults."""
    custom_files: bool = False
    """Whether it supports custom workloads: `FILE.py:FUNCTION` as the model."""
    profiling: bool = False
    memory_cap: bool = False
    """Whether it can limit its GPU memory."""
    cycle: bool = False
    """Whether `train` supports `RankPlacement.cycle`."""
    probes: bool = False
    """Whether `build` is supported, so that forks of the process can train."""


@dataclass(frozen=True)
class AllocatorStats:
    """Counters of the framework's device allocator since the process started, sizes in bytes."""

    allocated_peak: int
    reserved_peak: int
    retries: int
    """Number of times that it freed its cache and tried again."""
    ooms: int
    """Number of times that it failed even so."""


class BuiltWorkload(Protocol):
    """A model and some samples in host memory. Each probe is a fork of this process."""

    @property
    def subject(self) -> Subject: ...

    def probe(
        self,
        request: ProbeRequest,
        notify: Callable[[ProbeResult], None],
        trace: Path,
        beside: Sequence[int] = (),
    ) -> None:
        """In a fork, train each batch size for a few steps and report the result.

        A batch size that fails is the last one. `trace` is the file for the allocations, if they
        are requested. `beside` are the numbers of the probes that start at the same time.
        """


class Framework(Protocol):
    """An adapter. A method that it does not override raises an error or has a simple default."""

    name: str
    """The name of the framework in messages."""
    capabilities: Capabilities

    def load(self) -> None:
        """Import the framework, or raise a WorkloadError if it is not installed."""
        return None

    def train(self, workload: Workload, placement: RankPlacement, report: RankReport) -> None:
        """Train one rank. Write steps to `placement.steps` (a `StepLog`) and facts to `report`."""
        raise WorkloadError(f"{self.name} does not support training")

    def launch(self, ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
        """The command that starts `python -m module` once for each rank, with RANK, LOCAL_RANK
        and WORLD_SIZE in the environment."""
        raise WorkloadError(f"{self.name} does not support multiple ranks", "Remove --ranks")

    def load_for_probes(self) -> bool:
        """Import the modules that every probe needs.

        Return False if forks cannot use the device after these imports: the process then restarts
        without them.
        """
        return True

    def build(self, workload: Workload) -> BuiltWorkload:
        raise WorkloadError(
            f"{self.name} does not support probes", "Run a trial for each batch size instead"
        )

    def is_out_of_memory(self, error: BaseException, memory: Memory) -> bool:
        """Whether an error means that this kind of memory ran out."""
        return memory == "host" and isinstance(error, MemoryError)

    def allocator_stats(self) -> AllocatorStats | None:
        """None if no device is in use."""
        return None


def failure_kind(framework: Framework, error: BaseException) -> FailureKind:
    if isinstance(error, WorkloadError):
        return "workload"
    if framework.is_out_of_memory(error, "host"):
        return "host_oom"
    return "gpu_oom" if framework.is_out_of_memory(error, "gpu") else "error"


def check_capabilities(
    framework: Framework, workload: Workload, placement: RankPlacement | None = None
) -> None:
    """Raise a WorkloadError for a setting or request that the framework does not support.

    Otherwise the record of the trial would name a setting that had no effect.
    """
    can, name = framework.capabilities, framework.name
    for setting, values in (
        ("device", ("auto", *can.devices)),
        ("precision", can.precisions),
        *((each, (setting_default(each),)) for each in sorted(can.fixed_settings)),
    ):
        value = getattr(workload, setting)
        if value not in values:
            raise WorkloadError(
                f"{name} does not support `{option_name(setting)} {value}`",
                f"Valid values: {', '.join(map(str, values))}",
            )
    if workload.is_custom and not can.custom_files:
        raise WorkloadError(
            f"{name} does not support custom workloads such as {workload.model}",
            "Use the name of a model",
        )
    if placement is None:
        return
    for is_requested, is_supported, what, hint in (
        (placement.profiled_steps > 0, can.profiling, "profiling", "Remove --profile"),
        (placement.gpu_memory is not None, can.memory_cap, "`--gpu-memory`", "Remove --gpu-memory"),
        (placement.cycle, can.cycle, "the evaluation that `fit` runs after the steps", ""),
    ):
        if is_requested and not is_supported:
            raise WorkloadError(f"{name} does not support {what}", hint)
