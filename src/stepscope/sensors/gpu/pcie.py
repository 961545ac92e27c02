"""PCIe traffic of GPUs without performance counters (GPM)."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from stepscope.sensors.gpu.nvml import NvmlGpu, Unreadable
from stepscope.sensors.gpu.sensors import GpuSensor, MonitoredGpu, Values

_ESTIMATED_PCIE = "extrapolated from one 20 ms sample per direction per second"
_PAUSE_S = 1.0


class PcieSensor(GpuSensor):
    """PCIe traffic of GPUs without performance counters, from byte counters or from samples.

    A 32-bit byte counter is only used if it cannot wrap around between two readings. Otherwise a
    thread samples the driver, which takes 20 ms per direction.
    """

    name = "gpu pcie"
    metrics = ("gpu_pcie_received", "gpu_pcie_sent")
    period = 0.2
    share = 0.005

    def __init__(self, gpus: Sequence[MonitoredGpu], sample_only: bool = False) -> None:
        super().__init__(gpus)
        self._sources: dict[str, _ByteCounter | _TrafficSampler] = {}
        for monitored in gpus:
            counter = None if sample_only else _ByteCounter.of(monitored, self.period)
            self._sources[monitored.facts.uuid] = counter or _TrafficSampler(monitored)
        self._samplers = [
            each for each in self._sources.values() if isinstance(each, _TrafficSampler)
        ]
        self._closed = threading.Event()
        self._thread = threading.Thread(None, self._sample_loop, "stepscope-pcie", daemon=True)
        if self._samplers:
            self.estimated.update(dict.fromkeys(self.metrics, _ESTIMATED_PCIE))
            self._thread.start()

    def values_of(self, monitored: MonitoredGpu) -> Values:
        return self.query(monitored, *self.metrics, by=self._sources[monitored.facts.uuid].read)

    def close(self) -> None:
        self._closed.set()
        if self._samplers:
            self._thread.join(timeout=1.0)

    def _sample_loop(self) -> None:
        while not self._closed.is_set():
            for sampler in self._samplers:
                sampler.sample()
            self._closed.wait(_PAUSE_S)


class _ByteCounter:
    """Totals from a counter that may wrap around at 2^32."""

    def __init__(self, gpu: NvmlGpu, wraps_after_s: float) -> None:
        self._gpu = gpu
        self._wraps_after_s = wraps_after_s
        self._last = gpu.pcie_count()
        self._read_at = time.monotonic()
        self._totals = (0.0, 0.0)

    @classmethod
    def of(cls, monitored: MonitoredGpu, period_s: float) -> _ByteCounter | None:
        """Return a counter that cannot wrap around unnoticed within a period, if there is one."""
        try:
            count = monitored.gpu.pcie_count()
        except Unreadable:
            return None
        link = monitored.facts.link_bytes_per_s
        if count.wraps_at is None:
            return cls(monitored.gpu, float("inf"))
        if link is None or count.wraps_at / link < 1.2 * period_s:
            return None
        return cls(monitored.gpu, count.wraps_at / link)

    def read(self) -> tuple[float, float]:
        """Return the totals to and from the device. After a gap in which the counter may have
        wrapped around, raises Unreadable once and continues from the current value."""
        now, count = time.monotonic(), self._gpu.pcie_count()
        late = now - self._read_at > self._wraps_after_s
        wraps_at = count.wraps_at or 0
        received = _difference(self._last.received, count.received, wraps_at)
        sent = _difference(self._last.sent, count.sent, wraps_at)
        self._last, self._read_at = count, now
        if late:
            raise Unreadable("read too late: the counter may have wrapped around")
        self._totals = (self._totals[0] + received, self._totals[1] + sent)
        return self._totals


def _difference(before: int, now: int, wraps_at: int) -> int:
    return (now - before) % wraps_at if wraps_at else max(0, now - before)


class _TrafficSampler:
    """Totals that extrapolate the last sampled rate."""

    def __init__(self, monitored: MonitoredGpu) -> None:
        self._monitored = monitored
        self._rates: tuple[float, float] | Unreadable = (0.0, 0.0)
        self._totals = (0.0, 0.0)
        self._read_at = time.monotonic()

    def sample(self) -> None:
        """Query the driver; called in the thread, because it blocks."""
        if self._monitored.lost:
            return
        try:
            self._rates = self._monitored.gpu.pcie_sample()
        except Unreadable as error:
            self._rates = error

    def read(self) -> tuple[float, float]:
        """Return the bytes to and from the device so far."""
        now, rates = time.monotonic(), self._rates
        if isinstance(rates, Unreadable):
            raise rates
        seconds, self._read_at = now - self._read_at, now
        self._totals = (self._totals[0] + rates[0] * seconds, self._totals[1] + rates[1] * seconds)
        return self._totals
