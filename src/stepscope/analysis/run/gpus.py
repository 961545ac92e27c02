"""The GPUs of a run: which ones it used, their activity over time and their energy."""

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
    combined,
    integrate,
)
from stepscope.records import Gpu

_LEAST_BYTES = 32e6
"""Less than any CUDA context needs: smaller amounts of used memory are noise."""


@dataclass(frozen=True)
class RecordedGpu:
    """A GPU or MIG slice with its recorded series by metric."""

    gpu: Gpu
    series: Mapping[str, Series]

    def of(self, metric: str) -> Series:
        return self.series.get(metric, EMPTY)

    @property
    def is_used(self) -> bool:
        """Whether processes of the run used it."""
        return _highest(self.of("gpu_memory_run")) > _LEAST_BYTES or "gpu_reserved" in self.series

    @property
    def may_be_used(self) -> bool:
        """Whether it was active, if memory cannot be attributed to processes."""
        if len(self.of("gpu_memory_run")):
            return False
        memory = self.of("gpu_memory").value
        rose = len(memory) > 0 and memory.max() - memory[0] > _LEAST_BYTES
        return bool(rose) or any(_highest(self.of(m)) > 0 for m in ("gpu_utilization", "gpu_sm"))

    @cached_property
    def memory(self) -> Series:
        """Memory of the run's processes, else of its allocators, else of the whole GPU."""
        known = (self.of(m) for m in ("gpu_memory_run", "gpu_reserved", "gpu_memory"))
        return next((series for series in known if _highest(series) > 0), EMPTY)

    @cached_property
    def utilization(self) -> Curve | None:
        return _curve(self.of("gpu_utilization"))

    @cached_property
    def power(self) -> Curve | None:
        return _curve(self.of("gpu_power"))

    @cached_property
    def counter_over_readings(self) -> float:
        """Ratio of the energy counter to the integrated power readings over the same time.

        Readings are instantaneous, and on some GPUs cover only a quarter of the time; the counter
        is complete but read rarely. So readings give the shape and the counter gives the total.
        """
        counter = self.of("gpu_energy")
        if self.power is None or not len(counter):
            return 1.0
        begins = counter.t - (counter.window * 1e9).astype(np.int64)
        integrated = self.power.within(begins, counter.t)
        both = np.isfinite(integrated)
        by_readings = float(integrated[both].sum())
        by_counter = float((counter.value * counter.window)[both].sum())
        return by_counter / by_readings if by_readings > 0 and by_counter > 0 else 1.0

    def joules(self, begin_ns: int, end_ns: int) -> float | None:
        """Return the energy in a time span; None if neither power nor the counter was read."""
        if self.power is None:
            return integrate(self.of("gpu_energy"), begin_ns, end_ns)
        energy = self.power.amount(begin_ns, end_ns)
        return None if energy is None else energy.total * self.counter_over_readings

    def memory_peak(self, begin_ns: int, end_ns: int) -> float | None:
        """Return the peak memory in a time span; without a reading in it, the last one before."""
        inside = self.memory.between(begin_ns, end_ns)
        if len(inside):
            return float(inside.value.max())
        before = self.memory.value[self.memory.t <= begin_ns]
        return float(before[-1]) if len(before) else None


@dataclass(frozen=True)
class GpuFigures:
    """Activity of GPUs in a time span, named as in `EpochRow`. None: not known."""

    gpu_sm: float | None = None  # SM activity, 0 to 1
    gpu_tensor: float | None = None  # tensor core activity, 0 to 1
    gpu_dram: float | None = None  # memory bandwidth use, 0 to 1
    gpu_utilization: float | None = None  # utilization, 0 to 1
    gpu_memory_peak_bytes: float | None = None  # peak GPU memory, in bytes
    pcie_to_gpu_bytes: float | None = None  # PCIe traffic to the GPU, in bytes
    pcie_from_gpu_bytes: float | None = None  # PCIe traffic from the GPU, in bytes
    joules: float | None = None  # GPU energy, in joules


@dataclass(frozen=True)
class GpuRow:
    """Activity of one GPU over the whole run."""

    gpu: Gpu
    used: bool  # whether the run used the GPU
    figures: GpuFigures
    power_watts: float | None  # mean power, in watts
    throttled_power: float | None  # share of readings with clocks reduced by a power limit, 0 to 1
    throttled_thermal: float | None  # share of readings with clocks reduced by temperature, 0 to 1
    ecc_uncorrected: float | None  # uncorrectable ECC errors


@dataclass(frozen=True)
class GpuUse:
    """Activity over the whole run: of each GPU, and of those that the run used together."""

    each: tuple[GpuRow, ...] = ()
    overall: GpuFigures = GpuFigures()

    @property
    def used(self) -> tuple[GpuRow, ...]:
        return tuple(row for row in self.each if row.used)


def recorded_gpus(gpus: Sequence[Gpu], table: SeriesTable) -> tuple[RecordedGpu, ...]:
    return tuple(
        RecordedGpu(gpu, {metric: s for (metric, entity), s in table.items() if entity == gpu.uuid})
        for gpu in gpus
    )


def gpus_of_run(gpus: Sequence[RecordedGpu]) -> tuple[RecordedGpu, ...]:
    """Return the GPUs that the run used; only these count in its means, sums and panels.

    These are the GPUs on which its processes held memory or its allocators reported some. If no
    GPU attributes memory to processes, all active ones count. If none was active, the run used no
    GPU, and all GPU values are unknown rather than 0. A GPU with used MIG slices does not count in
    addition to them.
    """
    used = [gpu for gpu in gpus if gpu.is_used] or [gpu for gpu in gpus if gpu.may_be_used]
    sliced = {each.gpu.mig_of for each in used}
    return tuple(each for each in used if each.gpu.uuid not in sliced)


def figures(gpus: Sequence[RecordedGpu], begin_ns: int, end_ns: int) -> GpuFigures:
    """Return the activity of GPUs in a time span: means, sums and the highest peak memory."""

    def mean_of(metric: str) -> float | None:
        return _mean(amount_of(gpu.of(metric), begin_ns, end_ns) for gpu in gpus)

    def total_of(metric: str) -> float | None:
        return _sum(integrate(gpu.of(metric), begin_ns, end_ns) for gpu in gpus)

    peaks = [gpu.memory_peak(begin_ns, end_ns) for gpu in gpus]
    curves = [gpu.utilization for gpu in gpus if gpu.utilization is not None]
    return GpuFigures(
        gpu_sm=mean_of("gpu_sm"),
        gpu_tensor=mean_of("gpu_tensor"),
        gpu_dram=mean_of("gpu_dram"),
        gpu_utilization=_mean(curve.amount(begin_ns, end_ns) for curve in curves),
        gpu_memory_peak_bytes=max((peak for peak in peaks if peak is not None), default=None),
        pcie_to_gpu_bytes=total_of("gpu_pcie_received"),
        pcie_from_gpu_bytes=total_of("gpu_pcie_sent"),
        joules=_sum(gpu.joules(begin_ns, end_ns) for gpu in gpus),
    )


def use_of(
    gpus: Sequence[RecordedGpu], used: Sequence[RecordedGpu], begin_ns: int, end_ns: int
) -> GpuUse:
    """Return the activity of all GPUs over a run, and of the `used` ones together."""
    used_uuids = {each.gpu.uuid for each in used}
    rows = tuple(
        GpuRow(
            gpu=each.gpu,
            used=each.gpu.uuid in used_uuids,
            figures=figures([each], begin_ns, end_ns),
            power_watts=_mean_reading(each.of("gpu_power")),
            throttled_power=_mean_reading(each.of("gpu_throttled_power")),
            throttled_thermal=_mean_reading(each.of("gpu_throttled_thermal")),
            ecc_uncorrected=_last_reading(each.of("gpu_ecc_uncorrected")),
        )
        for each in gpus
    )
    return GpuUse(rows, figures(used, begin_ns, end_ns))


def combined_metric(gpus: Sequence[RecordedGpu], metric: str, combine: Combine) -> Series:
    """Combine a metric of several GPUs into one series: their mean, sum or maximum."""
    return combined([gpu.of(metric) for gpu in gpus], combine)


def _mean(amounts: Iterable[Amount | None]) -> float | None:
    """Return the mean over time and GPUs, weighted by known time."""
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
