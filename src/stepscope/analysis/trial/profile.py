"""What the PyTorch profiler saw in some steps: per step, per epoch and per rank.

Each rank stores what its profiled steps took in all. Here that becomes what a step takes, and what
an epoch does: measured where the profiled steps are whole epochs, else scaled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from stepscope.records.codec import from_json

Basis = Literal["measured", "scaled"]

_HOST_SUMS = ("operator_cpu_us", "runtime_cpu_us", "synchronize_cpu_us")
SUMS = (*_HOST_SUMS, "kernels", "kernel_us", "launches", "memcpy_us", "memset_us")
"""What is stored of all operators, calls, kernels and copies together."""


@dataclass(frozen=True)
class ProfiledAmount:
    """What the profiled steps took in all, and what that makes a step and an epoch."""

    total: float
    per_step: float
    per_epoch: float | None


@dataclass(frozen=True)
class ProfiledSpan:
    """The steps that were profiled, and how many make an epoch."""

    steps: int
    steps_per_epoch: int | None

    @property
    def per_epoch_is(self) -> Basis | None:
        """Whether whole epochs were seen, or a part of one stands for all of it."""
        if not self.steps_per_epoch:
            return None
        return "scaled" if self.steps % self.steps_per_epoch else "measured"

    def figure(self, total: float) -> ProfiledAmount:
        per_step = total / self.steps
        per_epoch = per_step * self.steps_per_epoch if self.steps_per_epoch else None
        return ProfiledAmount(total, per_step, per_epoch)


@dataclass(frozen=True)
class OperatorRow:
    """An operator, or a call of the host into CUDA (`runtime`)."""

    name: str
    kind: Literal["operator", "runtime"]
    calls: ProfiledAmount
    self_cpu_us: ProfiledAmount
    """Of the operator itself, without those that it calls: these add up over all rows."""
    cpu_us: ProfiledAmount
    self_cuda_us: ProfiledAmount | None
    """Of the kernels and copies that it started itself. None where no device was seen."""
    cuda_us: ProfiledAmount | None


@dataclass(frozen=True)
class KernelRow:
    name: str
    calls: ProfiledAmount
    us: ProfiledAmount


@dataclass(frozen=True)
class CopyRow:
    direction: str
    calls: ProfiledAmount
    us: ProfiledAmount
    pageable_us: ProfiledAmount | None = None
    """Part of the time: from or to host memory that is not pinned. The host waits for those."""


@dataclass(frozen=True)
class TraceFile:
    file: str
    bytes: int
    unzipped_bytes: int


@dataclass(frozen=True)
class Peak:
    """Most that was held at once; of the host, beyond what was held when the profiling began."""

    allocated: int
    reserved: int | None  # by the allocator; the host has none that reserves


@dataclass(frozen=True)
class RankProfile:
    rank: int
    device: str
    stretch: ProfiledSpan
    step_us: tuple[float, ...]  # how long the host took for each step, slowed by the profiler
    operators: tuple[OperatorRow, ...]
    kernels: tuple[KernelRow, ...]  # those that took longest
    sums: Mapping[str, ProfiledAmount | None]
    """By the names in `SUMS`. None where no device was seen."""
    copies: tuple[CopyRow, ...] | None
    memory: Mapping[str, Peak]
    missing: str  # why nothing is known of a device that was used
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
        means = self._means([rank.kernels for rank in self.ranks], "name")
        return tuple(sorted(means, key=lambda row: -row.us.total))

    @property
    def copies(self) -> tuple[CopyRow, ...]:
        known = [rank.copies for rank in self.ranks if rank.copies is not None]
        return tuple(self._means(known, "direction")) if self.has_device else ()

    @property
    def sums(self) -> dict[str, ProfiledAmount | None]:
        return {name: self._mean([rank.sums.get(name) for rank in self.ranks]) for name in SUMS}

    @property
    def memory(self) -> dict[str, Peak]:
        """By device, the most of any rank."""
        highest: dict[str, Peak] = {}
        for device, peak in (item for rank in self.ranks for item in rank.memory.items()):
            other = highest.get(device, peak)
            reserved = [each.reserved for each in (other, peak) if each.reserved is not None]
            allocated = max(other.allocated, peak.allocated)
            highest[device] = Peak(allocated, max(reserved, default=None))
        return highest

    def _means(self, tables: Iterable[Sequence[Row]], key: str) -> list[Row]:
        alike: dict[str, list[Row]] = {}
        for rows in tables:
            for row in rows:
                alike.setdefault(getattr(row, key), []).append(row)
        means: list[Row] = []
        for rows in alike.values():
            names = [f.name for f in dataclasses.fields(rows[0]) if "ProfiledAmount" in str(f.type)]
            figures = {name: self._mean([getattr(row, name) for row in rows]) for name in names}
            means.append(replace(rows[0], **figures))  # type: ignore[arg-type]
        return means

    def _mean(self, figures: Sequence[ProfiledAmount | None]) -> ProfiledAmount | None:
        """Ranks step together, so that the steps of one are those of all."""
        totals = [figure.total for figure in figures if figure is not None]
        if not totals or len(totals) < len(figures):
            return None
        return self.ranks[0].stretch.figure(sum(totals) / len(self.ranks))


def profile_of(by_rank: Mapping[int, Mapping[str, Any]]) -> Profile:
    ranks: list[RankProfile] = []
    failed: dict[int, str] = {}
    for rank, stored in sorted(by_rank.items()):
        if "error" in stored:
            failed[rank] = str(stored["error"])
            continue
        try:
            ranks.append(_rank_profile(rank, stored))
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            failed[rank] = f"Its profile cannot be read ({type(error).__name__}: {error})"
    return Profile(tuple(ranks), failed)


def by_time(rows: Iterable[OperatorRow]) -> tuple[OperatorRow, ...]:
    """The longest first: on the device, where one was seen, then on the host."""

    def times(row: OperatorRow) -> tuple[float, float]:
        return row.self_cuda_us.total if row.self_cuda_us else 0.0, row.self_cpu_us.total

    return tuple(sorted(rows, key=times, reverse=True))


def _rank_profile(rank: int, stored: Mapping[str, Any]) -> RankProfile:
    span = ProfiledSpan(int(stored["steps"]), stored["steps_per_epoch"])

    def figure(total: float | None) -> ProfiledAmount | None:
        return None if total is None else span.figure(total)

    def row(kind: type[Row], entry: Mapping[str, Any]) -> Row:
        """What older versions stored beside its fields is left out."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(kind):
            is_figure = "ProfiledAmount" in str(field.type)
            values[field.name] = figure(entry.get(field.name)) if is_figure else entry[field.name]
        return kind(**values)

    copies = stored["copies"]
    if copies is not None:
        copies = tuple(row(CopyRow, {"direction": name, **each}) for name, each in copies.items())
    return RankProfile(
        rank=rank,
        device=str(stored["device"]),
        stretch=span,
        step_us=tuple(map(float, stored["step_us"])),
        operators=by_time(row(OperatorRow, each) for each in stored["operators"]),
        kernels=tuple(row(KernelRow, each) for each in stored["kernels"]),
        sums={name: figure(total) for name, total in stored["sums"].items()},
        copies=copies,
        memory={device: Peak(**peak) for device, peak in stored["memory"].items()},
        missing=str(stored["missing"]),
        trace=from_json(TraceFile, stored["trace"]),
    )
