"""The cases of the benchmark and the measurements of each, the most valuable first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
AT_ONCE_GIB = 130
"""Upper bound for the sum of the memory limits of processes that train at the same time."""
PREDICTED_GIB = (11, 15, 24, 40)
"""Memory sizes that are predicted from probes without a limit."""

Group = Literal["papers", "others", "sizes", "strict"]

PAPERS = (
    "resnet50",
    "vgg16",
    "alexnet",
    "resnet34",
    "densenet201",
    "resnet152",
    "inception_v3",
    "r3d_18",
    "cnn",
)
OTHERS = ("vit_b_16", "gpt2", "bert", "swin_t", "convnext_tiny", "efficientnet_b0", "lstm")
SIZED = ("resnet50", "vgg16", "densenet201", "alexnet")
SIZES = (24, 11, 40, 80)
STRICT = ("vgg16", "resnet50")
"""Models in fp32 without TF32, which is slower and uses other algorithms. The other cases use the
default of PyTorch: TF32 in convolutions."""
MANUAL = ("resnet34", "densenet201", "alexnet")
"""The models of Table 5.8."""
CUSTOM = {
    "gpt2": "examples/workload_transformers/workloads.py:gpt2",
    "bert": "examples/workload_transformers/workloads.py:bert",
}

BASELINES = ("linear2019", "lightning_binsearch", "lightning_power", "accelerate")
_TRUTH = ("fit", "scan", "repeats", "long")
_ITEMS: dict[Group, tuple[str, ...]] = {
    "papers": (*_TRUTH, *BASELINES, "throughput", "predictions"),
    "others": _TRUTH,
    "sizes": ("fit", "scan", "repeats"),
    "strict": _TRUTH,
}
LAST = "manual"
"""Manual doubling comes last: it takes long and affects no criterion."""

SECONDS = {
    "fit": 20,
    "scan": 8,
    "repeats": 12,
    "long": 16,
    "linear2019": 15,
    "lightning_binsearch": 30,
    "lightning_power": 20,
    "accelerate": 35,
    "throughput": 8,
    "predictions": 20,
    "manual": 75,
}
"""Approximate duration of each measurement; for `scan` and `throughput`, of one batch."""
TIMEOUTS = {
    "fit": 150,
    "linear2019": 90,
    "lightning_binsearch": 150,
    "lightning_power": 90,
    "accelerate": 150,
    "predictions": 120,
    "manual": 90,
}
"""Seconds after which a program is ended; for manual doubling, each level."""


@dataclass(frozen=True)
class Case:
    """A model, a precision and a memory limit."""

    model: str
    gib: int
    precision: str
    group: Group

    @property
    def name(self) -> str:
        return f"{self.model} {self.gib}GiB {self.precision}"

    @property
    def argument(self) -> str:
        """The model argument of `stepscope fit`."""
        return CUSTOM.get(self.model, self.model)

    @property
    def cap(self) -> int:
        return self.gib * GIB

    @property
    def items(self) -> tuple[str, ...]:
        items = _ITEMS[self.group]
        if self.model not in SIZED:
            items = tuple(item for item in items if item != "predictions")
        return (*items, LAST) if self.group == "papers" and self.model in MANUAL else items


def all_cases() -> list[Case]:
    return [
        *(Case(model, 15, "tf32", "papers") for model in PAPERS),
        *(Case(model, 15, "bf16", "others") for model in OTHERS),
        *(Case(model, gib, "tf32", "sizes") for gib in SIZES for model in SIZED),
        *(Case(model, 15, "fp32", "strict") for model in STRICT),
    ]


def dry_cases() -> list[Case]:
    """A few cases of each group, for a machine without a GPU."""
    kept = ("resnet50 15GiB tf32", "alexnet 15GiB tf32", "bert 15GiB bf16", "resnet50 24GiB tf32")
    return [case for case in all_cases() if case.name in kept]


def in_order(cases: Sequence[Case]) -> Iterator[tuple[Case, str]]:
    """Yield all measurements, the most valuable first."""
    for case in cases:
        yield from ((case, item) for item in case.items if item != LAST)
    yield from ((case, LAST) for case in cases if LAST in case.items)
