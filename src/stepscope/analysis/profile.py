"""What the PyTorch profiler saw in some steps: per step, per epoch and per rank.

Each rank stores what its profiled steps took in all. Here that becomes what a step takes, and what
an epoch does: measured where the profiled steps are whole epochs, else scaled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from stepscope.analysis.profiletrace import Peak, highest

Basis = Literal["measured", "scaled"]

SUMS = (
    "operator_cpu_us",
    "runtime_cpu_us",
    "synchronize_cpu_us",
    "kernels",
    "kernel_us",
    "launches",
    "memcpy_us",
    "memset_us",
)
"""What is told of all operators, calls, kernels and copies together."""


@dataclass(frozen=True)
class Figure:
    """What the profiled steps took in all, and what that makes a step and an epoch."""

    total: float
    per_step: float
    per_epoch: float | None


@dataclass(frozen=True)
class Stretch:
    """The steps that were profiled, and how many make an epoch."""

    steps: int
    steps_per_epoch: int | None

    @property
    def per_epoch_is(self) -> Basis | None:
        """Whether whole epochs were seen, or a part of one stands for all of it."""
        if not self.steps_per_epoch:
            return None
        return "scaled" if self.steps % self.steps_per_epoch else "measured"

    def figure(self, total: float) -> Figure:
        per_step = total / self.steps
        per_epoch = per_step * self.steps_per_epoch if self.steps_per_epoch else None
        return Figure(total, per_step, per_epoch)


@dataclass(frozen=True)
class OperatorRow:
    """An operator, or a call of the host into CUDA (`runtime`)."""

    name: str
    kind: Literal["operator", "runtime"]
    calls: Figure
    self_cpu_us: Figure
    """Of the operator itself, without those that it calls: these add up over all rows."""
    cpu_us: Figure
    self_cuda_us: Figure | None
    """Of the kernels and copies that it started itself. None where no device was seen."""
    cuda_us: Figure | None


@dataclass(frozen=True)
class KernelRow:
    """A kernel of the device."""

    name: str
    calls: Figure
    us: Figure


@dataclass(frozen=True)
class CopyRow:
    """Copies in one direction."""

    direction: str
    calls: Figure
    bytes: Figure
    us: Figure
    pageable_bytes: Figure


@dataclass(frozen=True)
class TraceFile:
    """The trace that was kept, and how large it is."""

    file: str
    bytes: int
    unzipped_bytes: int
    events: int


@dataclass(frozen=True)
class RankProfile:
    """What the profiler saw of one rank."""

    rank: int
    device: str
    stretch: Stretch
    step_us: tuple[float, ...]
    """How long the host took for each step, slowed by the profiler."""
    operators: tuple[OperatorRow, ...]
    kernels: tuple[KernelRow, ...]
    """Those that took longest."""
    sums: Mapping[str, Figure | None]
    """By the names in `SUMS`. None where no device was seen."""
    copies: tuple[CopyRow, ...] | None
    memory: Mapping[str, Peak]
    """By device."""
    missing: str
    """Why nothing is known of a device that was used."""
    trace: TraceFile


Row = TypeVar("Row", OperatorRow, KernelRow, CopyRow)


@dataclass(frozen=True)
class Profile:
    """What the profiler saw of all ranks, and why nothing of some. Means are over the ranks."""

    ranks: tuple[RankProfile, ...]
    failed: Mapping[int, str]

    @property
    def per_epoch_is(self) -> Basis | None:
        return self.ranks[0].stretch.per_epoch_is if self.ranks else None

    @property
    def has_device(self) -> bool:
        """Whether the device's side is known, of every rank."""
        return bool(self.ranks) and all(rank.copies is not None for rank in self.ranks)

    @property
    def operators(self) -> tuple[OperatorRow, ...]:
        """Means, the longest first; an operator that a rank did not call took 0 there."""
        return by_time(self._means([rank.operators for rank in self.ranks], "name"))

    @property
    def kernels(self) -> tuple[KernelRow, ...]:
        """Means, the longest first."""
        means = self._means([rank.kernels for rank in self.ranks], "name")
        return tuple(sorted(means, key=lambda row: -row.us.total))

    @property
    def copies(self) -> tuple[CopyRow, ...]:
        """Means, by direction."""
        known = [rank.copies for rank in self.ranks if rank.copies is not None]
        return tuple(self._means(known, "direction")) if self.has_device else ()

    @property
    def sums(self) -> dict[str, Figure | None]:
        """Means, by the names in `SUMS`."""
        return {name: self._mean([rank.sums.get(name) for rank in self.ranks]) for name in SUMS}

    @property
    def memory(self) -> dict[str, Peak]:
        """By device, the most of any rank."""
        found: dict[str, list[Peak]] = {}
        for rank in self.ranks:
            for device, peak in rank.memory.items():
                found.setdefault(device, []).append(peak)
        return {device: highest(peaks) for device, peaks in found.items()}

    def _means(self, tables: Iterable[Sequence[Row]], key: str) -> list[Row]:
        alike: dict[str, list[Row]] = {}
        for rows in tables:
            for row in rows:
                alike.setdefault(getattr(row, key), []).append(row)
        return [self._mean_row(rows) for rows in alike.values()]

    def _mean_row(self, rows: Sequence[Row]) -> Row:
        figures = [f.name for f in dataclasses.fields(rows[0]) if "Figure" in str(f.type)]
        means: dict[str, Any] = {
            name: self._mean([getattr(row, name) for row in rows]) for name in figures
        }
        return replace(rows[0], **means)

    def _mean(self, figures: Sequence[Figure | None]) -> Figure | None:
        """Ranks step together, so that the steps of one are those of all."""
        totals = [figure.total for figure in figures if figure is not None]
        if not totals or len(totals) < len(figures):
            return None
        return self.ranks[0].stretch.figure(sum(totals) / len(self.ranks))


def profile_of(stored: Mapping[int, Mapping[str, Any]]) -> Profile:
    """The profile of a trial, from what each of its ranks stored."""
    ranks: list[RankProfile] = []
    failed: dict[int, str] = {}
    for rank, told in sorted(stored.items()):
        if "error" in told:
            failed[rank] = str(told["error"])
            continue
        try:
            ranks.append(_rank_profile(rank, told))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            failed[rank] = f"Its profile cannot be read ({type(error).__name__}: {error})"
    return Profile(tuple(ranks), failed)


def by_time(rows: Iterable[OperatorRow]) -> tuple[OperatorRow, ...]:
    """The longest first: on the device, where one was seen, then on the host."""
    return tuple(
        sorted(rows, key=lambda row: (-_total(row.self_cuda_us), -_total(row.self_cpu_us)))
    )


def _total(figure: Figure | None) -> float:
    return figure.total if figure else 0.0


def _rank_profile(rank: int, told: Mapping[str, Any]) -> RankProfile:
    stretch = Stretch(int(told["steps"]), told["steps_per_epoch"])
    copies = told["copies"]
    return RankProfile(
        rank=rank,
        device=str(told["device"]),
        stretch=stretch,
        step_us=tuple(map(float, told["step_us"])),
        operators=by_time(
            OperatorRow(each["name"], each["kind"], **_figures(each, stretch))
            for each in told["operators"]
        ),
        kernels=tuple(
            KernelRow(each["name"], **_figures(each, stretch)) for each in told["kernels"]
        ),
        sums=_figures(told["sums"], stretch),
        copies=None
        if copies is None
        else tuple(CopyRow(name, **_figures(each, stretch)) for name, each in copies.items()),
        memory={device: Peak(**peak) for device, peak in told["memory"].items()},
        missing=str(told["missing"]),
        trace=TraceFile(**told["trace"]),
    )


def _figures(told: Mapping[str, Any], stretch: Stretch) -> dict[str, Any]:
    """Every number that was stored, and what is not known, by its name."""
    return {
        name: None if total is None else stretch.figure(total)
        for name, total in told.items()
        if not isinstance(total, str)
    }
