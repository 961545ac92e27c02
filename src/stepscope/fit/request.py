"""The request of a fit. The command line and the Python API both build it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from stepscope.errors import TrialError, WorkloadError
from stepscope.trials.limits.spec import Limits, MachineResources, check_limits, parse_size
from stepscope.trials.request import workload_of
from stepscope.workloads.probing import ProbeResult
from stepscope.workloads.spec import NOT_FOR_FIT, Workload, nearest, option_name

METHODS = ("auto", "linear2019")
_PERCENTAGE = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)\s*%")


@dataclass(frozen=True)
class FitRequest:
    """A workload and the memory budget for its batches."""

    workload: Workload
    limits: Limits = field(default_factory=Limits)
    """GPU memory, host memory, GPUs, and the stall timeout of a probe."""
    headroom: int = 0
    """Bytes that stay free."""
    headroom_share: float = 0.0
    """The same as a share of the limit, less than 1."""
    predict_for: tuple[int, ...] = ()
    """Bytes of other GPUs to predict for; empty: common GPU sizes."""
    method: str = "auto"
    verify: bool = False
    estimate: bool = False
    no_cache: bool = False

    def check(self) -> None:
        """Raise TrialError if the request is invalid on this machine."""
        check_limits(self.limits, MachineResources.here())
        if self.method not in METHODS:
            raise TrialError(f"Unknown method {self.method!r}", nearest(self.method, METHODS))
        if self.headroom < 0:
            raise TrialError("`--headroom` must not be negative", "Pass a size such as 1GiB")
        if self.workload.device == "cpu" and self.limits.gpus:
            raise TrialError(
                f"`--device cpu` and `--gpus {','.join(self.limits.gpus)}` are mutually exclusive",
                "Remove one of them",
            )

    def check_without_gpu(self) -> list[str]:
        """Return notices about options that have no effect on the host.

        Raise TrialError if the request needs a GPU.
        """
        for is_set, option in (
            (self.limits.gpu_memory is not None, "--gpu-memory"),
            (self.predict_for, "--predict-for"),
            (self.method == "linear2019", "--method linear2019"),
        ):
            if not is_set:
                continue
            if self.workload.device == "cpu":
                raise TrialError(
                    f"`{option}` needs a GPU, but `--device cpu` is set",
                    f"Remove {option} to search in host memory, or remove --device cpu",
                )
            raise TrialError(
                f"`{option}` needs a GPU, but no usable GPU was found",
                f"Remove {option} to search in host memory, or run `stepscope doctor` to see why",
            )
        if self.workload.needs_gpu:
            raise TrialError(
                f"`--device {self.workload.device}` needs a GPU, but no usable GPU was found",
                "Remove --device, or run `stepscope doctor` to see why",
            )
        notices = []
        if self.verify:
            notices.append(
                "`--verify` has no effect for host memory: results are always verified in 3 "
                "processes"
            )
        if self.estimate:
            notices.append(
                "`--estimate` has no effect for host memory: batches are always tried up to the "
                "limit"
            )
        return notices


@dataclass(frozen=True)
class FitListener:
    notify: Callable[[str], None] = lambda text: None
    """Called with messages for the user."""
    show: Callable[[str], None] = lambda text: None
    """Called with the current activity."""
    tried: Callable[[ProbeResult], None] = lambda result: None
    """Called after each probe on the host, where a probe takes seconds."""


def fit_workload(model: str, settings: Mapping[str, Any]) -> Workload:
    """Return the checked workload. Raise WorkloadError for settings that `fit` determines."""
    for name in NOT_FOR_FIT:
        if name not in settings:
            continue
        if name == "batch_size":
            raise WorkloadError(
                "`--batch-size` cannot be used with `fit`, which finds the batch size",
                "Remove --batch-size, or use `stepscope trial` to train at a given batch size",
            )
        option = option_name(name)
        raise WorkloadError(
            f"`{option}` cannot be used with `fit`, which sets the length of each probe",
            f"Remove {option}",
        )
    return workload_of(model, settings)


def parse_headroom(value: int | str) -> tuple[int, float]:
    """Parse a headroom into bytes and a share of the limit; one of them is 0."""
    text = str(value).strip()
    if not text.endswith("%"):
        return parse_size(value), 0.0
    if not _PERCENTAGE.fullmatch(text):
        raise TrialError(
            f"Invalid percentage {text!r} in `--headroom`", "Pass a percentage such as 5%"
        )
    share = float(text[:-1]) / 100
    if share >= 1:
        raise TrialError(f"`--headroom {text}` leaves no memory", "Pass less than 100%")
    return 0, share
