"""PCIe traffic of GPUs that have no performance counters."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from stepscope.sensors.gpu.nvml import NvmlGpu, Unreadable
from stepscope.sensors.gpu.sensors import GpuSensor, Values, WatchedGpu

_ESTIMATED_PCIE = "one look of 20 ms each way in every second, taken for the whole of it"


_PAUSE_S = 1.0


class PcieSensor(GpuSensor):
    """PCIe traffic of GPUs that have no performance counters: by byte counters, or by looking.

    A byte counter of 32 bits is of use only where it cannot run around between two readings.
    Elsewhere the driver is asked in a thread of its own: its answer takes 20 ms each way.
    """

    name = "gpu pcie"
    metrics = ("gpu_pcie_received", "gpu_pcie_sent")
    period = 0.2
    share = 0.005

    def __init__(self, gpus: Sequence[WatchedGpu], only_look: bool = False) -> None:
        super().__init__(gpus)
        self._sources: dict[str, _ByteCounter | _Looks] = {}
        for watched in gpus:
            counter = None if only_look else _ByteCounter.of(watched, self.period)
            self._sources[watched.facts.uuid] = counter or _Looks(watched)
        self._looks = [each for each in self._sources.values() if isinstance(each, _Looks)]
        self._ended = threading.Event()
        self._looker = threading.Thread(None, self._keep_looking, "stepscope-pcie", daemon=True)
        if self._looks:
            self.estimated.update(dict.fromkeys(self.metrics, _ESTIMATED_PCIE))
            self._looker.start()

    def values_of(self, watched: WatchedGpu) -> Values:
        return self.ask(watched, *self.metrics, by=self._sources[watched.facts.uuid].read)

    def close(self) -> None:
        self._ended.set()
        if self._looks:
            self._looker.join(timeout=1.0)

    def _keep_looking(self) -> None:
        while not self._ended.is_set():
            for look in self._looks:
                look.look()
            self._ended.wait(_PAUSE_S)


class _ByteCounter:
    """Bytes by a counter that may begin again at 2^32: differences, added up."""

    def __init__(self, gpu: NvmlGpu, wraps_after_s: float) -> None:
        self._gpu = gpu
        self._wraps_after_s = wraps_after_s
        self._last = gpu.pcie_count()
        self._read_at = time.monotonic()
        self._totals = (0.0, 0.0)

    @classmethod
    def of(cls, watched: WatchedGpu, period_s: float) -> _ByteCounter | None:
        """A counter that cannot run around unseen at this pace, if the GPU has one."""
        try:
            count = watched.gpu.pcie_count()
        except Unreadable:
            return None
        link = watched.facts.link_bytes_per_s
        if count.wraps_at is None:
            return cls(watched.gpu, float("inf"))
        if link is None or count.wraps_at / link < 1.2 * period_s:
            return None
        return cls(watched.gpu, count.wraps_at / link)

    def read(self) -> tuple[float, float]:
        """Totals to and from the device. A gap in which the counter may have run around counts as
        what it shows, and no more: it is told as unreadable once."""
        now, count = time.monotonic(), self._gpu.pcie_count()
        late = now - self._read_at > self._wraps_after_s
        turn = count.wraps_at or 0
        received = _difference(self._last.received, count.received, turn)
        sent = _difference(self._last.sent, count.sent, turn)
        self._last, self._read_at = count, now
        if late:
            raise Unreadable("read too late: the counter may have begun again meanwhile")
        self._totals = (self._totals[0] + received, self._totals[1] + sent)
        return self._totals


def _difference(before: int, now: int, turn: int) -> int:
    return (now - before) % turn if turn else max(0, now - before)


class _Looks:
    """What was seen of a GPU's traffic when it was last looked at, taken to go on like that."""

    def __init__(self, watched: WatchedGpu) -> None:
        self._watched = watched
        self._rates: tuple[float, float] | Unreadable = (0.0, 0.0)
        self._totals = (0.0, 0.0)
        self._read_at = time.monotonic()

    def look(self) -> None:
        """Ask the driver, in the thread that may block."""
        if self._watched.lost:
            return
        try:
            self._rates = self._watched.gpu.pcie_look()
        except Unreadable as error:
            self._rates = error

    def read(self) -> tuple[float, float]:
        """Bytes to and from the device so far."""
        now, rates = time.monotonic(), self._rates
        if isinstance(rates, Unreadable):
            raise rates
        seconds, self._read_at = now - self._read_at, now
        self._totals = (self._totals[0] + rates[0] * seconds, self._totals[1] + rates[1] * seconds)
        return self._totals
