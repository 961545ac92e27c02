"""What this benchmark measures, in the order of its value: cases, and the work on each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

GIB = 1 << 30
AT_ONCE_GIB = 130
"""Of the GPU: what the memory limits of processes that train at the same time may add up to."""
CARDS = (11, 15, 24, 40)
"""GiB of the cards that are predicted from probes at full memory."""

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
"""In fp32 without TF32, which is slower and takes other algorithms. The others have fp32 as PyTorch
has it by default: TF32 inside of convolutions."""
BY_HAND = ("resnet34", "densenet201", "alexnet")
"""The models of Table 5.8."""
OWN = {
    "gpt2": "examples/own_transformers/workloads.py:gpt2",
    "bert": "examples/own_transformers/workloads.py:bert",
}

RIVALS = ("linear2019", "lightning_binsearch", "lightning_power", "accelerate")
_TRUTH = ("fit", "scan", "three", "long")
_ITEMS: dict[Group, tuple[str, ...]] = {
    "papers": (*_TRUTH, *RIVALS, "rates", "cards"),
    "others": _TRUTH,
    "sizes": ("fit", "scan", "three"),
    "strict": _TRUTH,
}
LAST = "manual"
"""Doubling by hand comes after everything else: it takes long and decides nothing."""

SECONDS = {
    "fit": 20,
    "scan": 8,
    "three": 12,
    "long": 16,
    "linear2019": 15,
    "lightning_binsearch": 30,
    "lightning_power": 20,
    "accelerate": 35,
    "rates": 8,
    "cards": 20,
    "manual": 75,
}
"""About what a piece of work takes; a scan and rates: a batch, for they can stop between two."""
TIMEOUTS = {
    "fit": 150,
    "linear2019": 90,
    "lightning_binsearch": 150,
    "lightning_power": 90,
    "accelerate": 150,
    "cards": 120,
    "manual": 90,
}
"""After which a program is ended; of doubling by hand, each level's."""


@dataclass(frozen=True)
class Case:
    """A model, in numbers of a kind, within a limit of memory."""

    model: str
    gib: int
    precision: str
    group: Group

    @property
    def name(self) -> str:
        return f"{self.model} {self.gib}GiB {self.precision}"

    @property
    def argument(self) -> str:
        """The model, as `stepscope fit` takes it."""
        return OWN.get(self.model, self.model)

    @property
    def cap(self) -> int:
        return self.gib * GIB

    @property
    def items(self) -> tuple[str, ...]:
        items = _ITEMS[self.group]
        if self.model not in SIZED:
            items = tuple(item for item in items if item != "cards")
        return (*items, LAST) if self.group == "papers" and self.model in BY_HAND else items


def all_cases() -> list[Case]:
    return [
        *(Case(model, 15, "tf32", "papers") for model in PAPERS),
        *(Case(model, 15, "bf16", "others") for model in OTHERS),
        *(Case(model, gib, "tf32", "sizes") for gib in SIZES for model in SIZED),
        *(Case(model, 15, "fp32", "strict") for model in STRICT),
    ]


def dry_cases() -> list[Case]:
    """One or two of a kind, for a machine without a GPU."""
    kept = ("resnet50 15GiB tf32", "alexnet 15GiB tf32", "bert 15GiB bf16", "resnet50 24GiB tf32")
    return [case for case in all_cases() if case.name in kept]


def in_order(cases: Sequence[Case]) -> Iterator[tuple[Case, str]]:
    """All work, the most valuable first."""
    for case in cases:
        yield from ((case, item) for item in case.items if item != LAST)
    yield from ((case, LAST) for case in cases if LAST in case.items)
