"""What GPUs did for a run: which of them it used, what they did over time, and their energy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stepscope.analysis.run.series import (
    EMPTY,
    Amount,
    Combine,
    Curve,
    Series,
    SeriesTable,
    amount_of,
    integrate,
    together,
)
from stepscope.records import Gpu

_LEAST_BYTES = 32e6
"""Less than any CUDA context takes: below it, memory in use is noise."""


@dataclass(frozen=True)
class RecordedGpu:
    """A GPU, or a MIG slice, with all that is known of it by metric."""

    gpu: Gpu
    series: Mapping[str, Series]

    def of(self, metric: str) -> Series:
        return self.series.get(metric, EMPTY)

    @property
    def is_ours(self) -> bool:
        """Whether the run's own processes were seen on it."""
        return _highest(self.of("gpu_memory_tree")) > _LEAST_BYTES or "gpu_reserved" in self.series

    @property
    def may_be_ours(self) -> bool:
        """Whether it did anything at all, where nobody can tell for whom."""
        if len(self.of("gpu_memory_tree")):
            return False
        memory = self.of("gpu_memory").value
        rose = len(memory) > 0 and memory.max() - memory[0] > _LEAST_BYTES
        return bool(rose) or any(_highest(self.of(m)) > 0 for m in ("gpu_utilization", "gpu_sm"))

    @cached_property
    def memory(self) -> Series:
        """What the run holds on it: its processes, else its allocators, else everybody."""
        known = (self.of(m) for m in ("gpu_memory_tree", "gpu_reserved", "gpu_memory"))
        return next((series for series in known if _highest(series) > 0), EMPTY)

    @cached_property
    def utilization(self) -> Curve | None:
        return _curve(self.of("gpu_utilization"))

    @cached_property
    def power(self) -> Curve | None:
        return _curve(self.of("gpu_power"))

    @cached_property
    def counter_over_readings(self) -> float:
        """How much more energy its counter tells than its power readings, over the same time.

        Readings are instants, and of some GPUs they see a quarter of the time; the counter sees
        all of it, but is read rarely. So the readings give the shape and the counter the height.
        """
        counter = self.of("gpu_energy")
        if self.power is None or not len(counter):
            return 1.0
        begins = counter.t - (counter.window * 1e9).astype(np.int64)
        drawn = self.power.within(begins, counter.t)
        both = np.isfinite(drawn)
        by_readings = float(drawn[both].sum())
        by_counter = float((counter.value * counter.window)[both].sum())
        return by_counter / by_readings if by_readings > 0 and by_counter > 0 else 1.0

    def joules(self, begin_ns: int, end_ns: int) -> float | None:
        """Energy in a stretch of time; None where neither power nor the counter was read."""
        if self.power is None:
            return integrate(self.of("gpu_energy"), begin_ns, end_ns)
        drawn = self.power.amount(begin_ns, end_ns)
        return None if drawn is None else drawn.total * self.counter_over_readings

    def memory_peak(self, begin_ns: int, end_ns: int) -> float | None:
        """The most that was held; what was read last before, where nothing was read meanwhile."""
        inside = self.memory.between(begin_ns, end_ns)
        if len(inside):
            return float(inside.value.max())
        before = self.memory.value[self.memory.t <= begin_ns]
        return float(before[-1]) if len(before) else None


@dataclass(frozen=True)
class GpuFigures:
    """What GPUs did in a stretch of time, by the names it has in the ledger. None: not known."""

    gpu_sm: float | None = None
    gpu_tensor: float | None = None
    gpu_dram: float | None = None
    gpu_utilization: float | None = None
    gpu_memory_peak_bytes: float | None = None
    pcie_to_gpu_gb: float | None = None
    pcie_from_gpu_gb: float | None = None
    joules: float | None = None


@dataclass(frozen=True)
class GpuRow:
    """What one GPU did over the whole run."""

    gpu: Gpu
    used: bool
    """Whether it is one of the run's."""
    figures: GpuFigures
    power_watts: float | None
    """Mean of the readings, like the two that follow."""
    slowed_power: float | None
    slowed_heat: float | None
    ecc_uncorrected: float | None


@dataclass(frozen=True)
class GpuUse:
    """What GPUs did over the whole run: each of them, and those of the run together."""

    each: tuple[GpuRow, ...] = ()
    together: GpuFigures = GpuFigures()

    @property
    def used(self) -> tuple[GpuRow, ...]:
        return tuple(row for row in self.each if row.used)


def recorded_gpus(gpus: Sequence[Gpu], table: SeriesTable) -> tuple[RecordedGpu, ...]:
    return tuple(
        RecordedGpu(gpu, {metric: s for (metric, entity), s in table.items() if entity == gpu.uuid})
        for gpu in gpus
    )


def gpus_of_run(gpus: Sequence[RecordedGpu]) -> tuple[RecordedGpu, ...]:
    """The GPUs that the run used; only these count in its means, sums and panels.

    They are those on which its processes held memory, or of which its allocators told. Where no
    GPU tells whose memory it holds, all that did anything are taken for the run's. Where none did
    anything, the run used none, and everything about GPUs is unknown rather than 0. A GPU of which
    slices are used is not counted beside them.
    """
    found = [gpu for gpu in gpus if gpu.is_ours] or [gpu for gpu in gpus if gpu.may_be_ours]
    sliced = {each.gpu.mig_of for each in found}
    return tuple(each for each in found if each.gpu.uuid not in sliced)


def figures(gpus: Sequence[RecordedGpu], begin_ns: int, end_ns: int) -> GpuFigures:
    """What some GPUs did in a stretch of time: means over them, sums over them, the fullest."""

    def mean_of(metric: str) -> float | None:
        return _mean(amount_of(gpu.of(metric), begin_ns, end_ns) for gpu in gpus)

    def gigabytes_of(metric: str) -> float | None:
        bytes_moved = _sum(integrate(gpu.of(metric), begin_ns, end_ns) for gpu in gpus)
        return None if bytes_moved is None else bytes_moved / 1e9

    peaks = [gpu.memory_peak(begin_ns, end_ns) for gpu in gpus]
    curves = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    return GpuFigures(
        gpu_sm=mean_of("gpu_sm"),
        gpu_tensor=mean_of("gpu_tensor"),
        gpu_dram=mean_of("gpu_dram"),
        gpu_utilization=_mean(curve.amount(begin_ns, end_ns) for curve in curves),
        gpu_memory_peak_bytes=max((peak for peak in peaks if peak is not None), default=None),
        pcie_to_gpu_gb=gigabytes_of("gpu_pcie_received"),
        pcie_from_gpu_gb=gigabytes_of("gpu_pcie_sent"),
        joules=_sum(gpu.joules(begin_ns, end_ns) for gpu in gpus),
    )


def use_of(
    gpus: Sequence[RecordedGpu], used: Sequence[RecordedGpu], begin_ns: int, end_ns: int
) -> GpuUse:
    """What all GPUs did in a run, and together those that it `used`."""
    ours = {each.gpu.uuid for each in used}
    rows = tuple(
        GpuRow(
            gpu=each.gpu,
            used=each.gpu.uuid in ours,
            figures=figures([each], begin_ns, end_ns),
            power_watts=_mean_reading(each.of("gpu_power")),
            slowed_power=_mean_reading(each.of("gpu_slowed_power")),
            slowed_heat=_mean_reading(each.of("gpu_slowed_heat")),
            ecc_uncorrected=_last_reading(each.of("gpu_ecc_uncorrected")),
        )
        for each in gpus
    )
    return GpuUse(rows, figures(used, begin_ns, end_ns))


def side_by_side(gpus: Sequence[RecordedGpu], metric: str, combine: Combine) -> Series:
    """A metric of several GPUs as one series: their mean, sum or maximum at every time."""
    return together([gpu.of(metric) for gpu in gpus], combine)


def _mean(amounts: Iterable[Amount | None]) -> float | None:
    """The mean over time and GPUs, as far as both are known."""
    known = [amount for amount in amounts if amount is not None]
    seconds = sum(amount.seconds for amount in known)
    return sum(amount.total for amount in known) / seconds if seconds > 0 else None


def _sum(amounts: Iterable[float | None]) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known else None


def _mean_reading(gauge: Series) -> float | None:
    return float(gauge.value.mean()) if len(gauge) else None


def _last_reading(gauge: Series) -> float | None:
    return float(gauge.value[-1]) if len(gauge) else None


def _curve(gauge: Series) -> Curve | None:
    return Curve(gauge) if len(gauge) else None


def _highest(series: Series) -> float:
    return float(series.value.max(initial=0.0))
