"""The whole machine, from /proc/stat, /proc/meminfo, /proc/pressure and /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stepscope.metrics import Scope
from stepscope.records import Entity, Reading
from stepscope.sensors import procfs
from stepscope.sensors.contract import Sensor, why


@dataclass(frozen=True)
class Source:
    """One file, the metrics that come from it, and how its text becomes their values."""

    path: str
    metrics: tuple[str, ...]
    parse: Callable[[bytes], dict[str, float]]
    size: int = 4096
    absent: str = ""
    """Why the file may not be there, in better words than "no such file"."""
    hint: str = ""
    """What would help where it is not."""


class FileSensor(Sensor):
    """A sensor of one entity whose values come from a few small files, each kept open."""

    scope: Scope = "host"

    def __init__(self, entity: Entity, sources: Iterable[Source]) -> None:
        super().__init__()
        self.entity = entity
        self._files: list[tuple[Source, int]] = []
        for source in sources:
            try:
                descriptor = os.open(source.path, os.O_RDONLY | os.O_CLOEXEC)
                self._files.append((source, descriptor))
            except FileNotFoundError as error:
                self.lacks(source.absent or why(error), *source.metrics, hint=source.hint)
            except OSError as error:
                self.lacks(error, *source.metrics)

    def read(self) -> list[Reading]:
        if not self._files:
            return []
        values: dict[str, float | None] = dict.fromkeys(self.metrics)
        for source, descriptor in self._files:
            try:
                found = source.parse(os.pread(descriptor, source.size, 0))
            except OSError as error:
                self.lacks(f"{source.path}: {error.strerror or error}", *source.metrics)
                continue
            except (ValueError, IndexError):
                self.lacks(f"{source.path}: its content is not understood", *source.metrics)
                continue
            for metric in source.metrics:
                if metric not in found:
                    self.lacks(f"{source.path} does not tell it", metric)
            values.update(found)
        return [Reading(self.entity, values)]

    def close(self) -> None:
        for _, descriptor in self._files:
            os.close(descriptor)
        self._files.clear()


class HostSensor(FileSensor):
    """CPU, memory and pressure of the whole machine, other users' work included."""

    name = "host"
    _cpu = ("host_cpu", "host_iowait", "host_steal")
    memory = ("host_memory", "host_available", "page_cache", "dirty", "host_swap")
    _pressure = ("pressure_cpu", "pressure_memory", "pressure_memory_full")
    metrics = (*_cpu, *memory, *_pressure, "pressure_io", "pressure_io_full")

    def __init__(self, proc: str = procfs.PROC) -> None:
        self._iowait = 0.0
        super().__init__(
            Entity("host"),
            (
                # Only the first line is of interest; the rest grows with the number of CPUs.
                Source(f"{proc}/stat", self._cpu, self._cpu_times, 256),
                Source(f"{proc}/meminfo", self.memory, _memory_values),
                _pressure(proc, "cpu", full=False),
                _pressure(proc, "memory", full=True),
                _pressure(proc, "io", full=True),
            ),
        )

    def _cpu_times(self, text: bytes) -> dict[str, float]:
        times = procfs.parse_cpu_times(text)
        # The kernel lets its I/O wait run backwards when a waiting task moves to another CPU.
        self._iowait = max(self._iowait, times.iowait)
        return {"host_cpu": times.busy, "host_iowait": self._iowait, "host_steal": times.steal}


def _memory_values(text: bytes) -> dict[str, float]:
    _, available, used, page_cache, dirty, _, swap_used = procfs.parse_meminfo(text)
    values = zip(HostSensor.memory, (used, available, page_cache, dirty, swap_used), strict=True)
    return {metric: float(value) for metric, value in values if value is not None}


def _pressure(proc: str, resource: str, full: bool) -> Source:
    """Stall times since boot. `full` means nothing for the CPU of a whole machine."""
    names = {b"some": f"pressure_{resource}"}
    if full:
        names[b"full"] = f"pressure_{resource}_full"

    def parse(text: bytes) -> dict[str, float]:
        stalled = procfs.parse_pressure(text)
        return {metric: stalled[kind] for kind, metric in names.items() if kind in stalled}

    return Source(
        f"{proc}/pressure/{resource}",
        tuple(names.values()),
        parse,
        256,
        absent="this kernel keeps no pressure stall information (CONFIG_PSI, psi=1)",
        hint="boot with psi=1, on a kernel with CONFIG_PSI",
    )


class ShmSensor(Sensor):
    """How full /dev/shm is, through which loader workers pass their batches."""

    name = "shm"
    scope: Scope = "host"
    metrics = ("shm_used", "shm_size")

    def __init__(self, path: str = "/dev/shm") -> None:
        super().__init__()
        self.entity = Entity("shm")
        self._path = path

    def read(self) -> list[Reading]:
        try:
            found = os.statvfs(self._path)
        except OSError as error:
            self.lacks(why(error), hint="mount a tmpfs there; for a container: --shm-size 8g")
            return []
        used = float((found.f_blocks - found.f_bfree) * found.f_frsize)
        size = float(found.f_blocks * found.f_frsize)
        if size:
            return [Reading(self.entity, {"shm_used": used, "shm_size": size})]
        # A tmpfs mounted with size=0 has no bound of its own and counts no blocks.
        self.lacks(f"{self._path} is mounted without a size")
        return []
