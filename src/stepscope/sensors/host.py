"""Sensors of the whole machine: /proc/stat, /proc/meminfo, /proc/pressure and /dev/shm."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stepscope.metrics import Scope
from stepscope.records import Entity, Reading
from stepscope.sensors import procfs
from stepscope.sensors.contract import Sensor, error_reason


@dataclass(frozen=True)
class Source:
    """A file, the metrics read from it, and the parser of its contents."""

    path: str
    metrics: tuple[str, ...]
    parse: Callable[[bytes], dict[str, float]]
    size: int = 4096
    absent: str = ""
    """Why the file may be missing; more helpful than "No such file or directory"."""
    hint: str = ""
    """What to do if the file is missing."""


class FileSensor(Sensor):
    """A sensor of one entity that reads a few small files and keeps them open."""

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
                self.mark_missing(
                    source.absent or error_reason(error), *source.metrics, hint=source.hint
                )
            except OSError as error:
                self.mark_missing(error, *source.metrics)

    def read(self) -> list[Reading]:
        if not self._files:
            return []
        values: dict[str, float | None] = dict.fromkeys(self.metrics)
        for source, descriptor in self._files:
            try:
                parsed = source.parse(os.pread(descriptor, source.size, 0))
            except OSError as error:
                self.mark_missing(f"{source.path}: {error.strerror or error}", *source.metrics)
                continue
            except (ValueError, IndexError):
                self.mark_missing(f"{source.path}: unexpected contents", *source.metrics)
                continue
            for metric in source.metrics:
                if metric not in parsed:
                    self.mark_missing(f"{source.path} does not contain this value", metric)
            values.update(parsed)
        return [Reading(self.entity, values)]

    def close(self) -> None:
        for _, descriptor in self._files:
            os.close(descriptor)
        self._files.clear()


class HostSensor(FileSensor):
    """CPU, memory and pressure of the whole machine, including other users."""

    name = "host"
    _cpu = ("host_cpu", "host_iowait", "host_steal")
    memory = ("host_memory", "host_available", "page_cache", "dirty_pages", "host_swap")
    _pressure = ("pressure_cpu", "pressure_memory", "pressure_memory_full")
    metrics = (*_cpu, *memory, *_pressure, "pressure_io", "pressure_io_full")

    def __init__(self, proc: str = procfs.PROC) -> None:
        self._iowait = 0.0
        super().__init__(
            Entity("host"),
            (
                # Only the first line is needed; the rest grows with the number of CPUs.
                Source(f"{proc}/stat", self._cpu, self._cpu_times, 256),
                Source(f"{proc}/meminfo", self.memory, _memory_values),
                _pressure(proc, "cpu", full=False),
                _pressure(proc, "memory", full=True),
                _pressure(proc, "io", full=True),
            ),
        )

    def _cpu_times(self, text: bytes) -> dict[str, float]:
        times = procfs.parse_cpu_times(text)
        # The kernel's I/O wait can decrease when a waiting task moves to another CPU.
        self._iowait = max(self._iowait, times.iowait)
        return {"host_cpu": times.busy, "host_iowait": self._iowait, "host_steal": times.steal}


def _memory_values(text: bytes) -> dict[str, float]:
    _, available, used, page_cache, dirty_pages, _, swap_used = procfs.parse_meminfo(text)
    values = zip(
        HostSensor.memory, (used, available, page_cache, dirty_pages, swap_used), strict=True
    )
    return {metric: float(value) for metric, value in values if value is not None}


def _pressure(proc: str, resource: str, full: bool) -> Source:
    """Stall times since boot. `full` is not meaningful for the CPU of a whole machine."""
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
        absent="this kernel does not provide pressure stall information (CONFIG_PSI, psi=1)",
        hint="Boot a kernel that has CONFIG_PSI, with psi=1",
    )


class ShmSensor(Sensor):
    """Usage of /dev/shm, which loader workers use to pass batches."""

    name = "shm"
    scope: Scope = "host"
    metrics = ("shm_used", "shm_size")

    def __init__(self, path: str = "/dev/shm") -> None:
        super().__init__()
        self.entity = Entity("shm")
        self._path = path

    def read(self) -> list[Reading]:
        try:
            status = os.statvfs(self._path)
        except OSError as error:
            self.mark_missing(
                error_reason(error), hint="Mount a tmpfs there; in a container, use --shm-size 8g"
            )
            return []
        used = float((status.f_blocks - status.f_bfree) * status.f_frsize)
        size = float(status.f_blocks * status.f_frsize)
        if size:
            return [Reading(self.entity, {"shm_used": used, "shm_size": size})]
        # A tmpfs mounted with size=0 has no limit and does not count blocks.
        self.mark_missing(f"{self._path} is mounted without a size limit")
        return []
