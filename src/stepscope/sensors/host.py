"""The whole machine, from /proc/stat, /proc/meminfo and /proc/pressure."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from stepscope.metrics import Scope
from stepscope.records import Entity, Reading
from stepscope.sensors.contract import KeptFile, Sensor, why


@dataclass(frozen=True)
class Source:
    """One file, the metrics that come from it, and how its text becomes their values."""

    path: str
    metrics: tuple[str, ...]
    parse: Callable[[bytes], dict[str, float]]
    size: int = 4096
    absent: str = ""
    """Why the file may not be there, in better words than "no such file"."""


class FileSensor(Sensor):
    """A sensor of one entity whose values come from a few small files, each kept open."""

    scope: Scope = "host"

    def __init__(self, entity: Entity, sources: Iterable[Source]) -> None:
        super().__init__()
        self.entity = entity
        self._files: list[tuple[Source, KeptFile]] = []
        for source in sources:
            try:
                self._files.append((source, KeptFile(source.path, source.size)))
            except FileNotFoundError as error:
                self.lacks(source.absent or why(error), *source.metrics)
            except OSError as error:
                self.lacks(why(error), *source.metrics)

    def read(self) -> list[Reading]:
        if not self._files:
            return []
        values: dict[str, float | None] = dict.fromkeys(self.metrics)
        for source, file in self._files:
            values.update(self._values(source, file))
        return [Reading(self.entity, values)]

    def _values(self, source: Source, file: KeptFile) -> dict[str, float]:
        try:
            values = source.parse(file.read())
        except OSError as error:
            self.lacks(f"{source.path}: {error.strerror or error}", *source.metrics)
            return {}
        except (ValueError, IndexError):
            self.lacks(f"{source.path}: its content is not understood", *source.metrics)
            return {}
        for metric in source.metrics:
            if metric not in values:
                self.lacks(f"{source.path} does not tell it", metric)
        return values

    def close(self) -> None:
        for _, file in self._files:
            file.close()
        self._files.clear()


class HostSensor(FileSensor):
    """CPU, memory and pressure of the whole machine, other users' work included."""

    name = "host"
    metrics = (
        "host_cpu", "host_iowait", "host_steal",
        "host_memory", "host_available", "page_cache", "dirty", "host_swap",
        "pressure_cpu", "pressure_memory", "pressure_memory_full",
        "pressure_io", "pressure_io_full",
    )  # fmt: skip

    def __init__(self, proc: str = "/proc") -> None:
        self._iowait = 0.0
        super().__init__(Entity("host"), self._sources(proc))

    def _sources(self, proc: str) -> tuple[Source, ...]:
        # Only the first line is of interest; the rest grows with the number of CPUs.
        stat = Source(
            f"{proc}/stat", ("host_cpu", "host_iowait", "host_steal"), self._cpu_times, 256
        )
        memory = ("host_memory", "host_available", "page_cache", "dirty", "host_swap")
        return (
            stat,
            Source(f"{proc}/meminfo", memory, memory_values),
            _pressure(proc, "cpu", full=False),
            _pressure(proc, "memory", full=True),
            _pressure(proc, "io", full=True),
        )

    def _cpu_times(self, text: bytes) -> dict[str, float]:
        values = cpu_times(text)
        # The kernel lets its I/O wait run backwards when a waiting task moves to another CPU.
        self._iowait = values["host_iowait"] = max(self._iowait, values["host_iowait"])
        return values


_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


def cpu_times(text: bytes) -> dict[str, float]:
    """Core-seconds since boot, from the text of /proc/stat. Guests are part of `user` there."""
    words = text.split(b"\n", 1)[0].split()
    if words[0] != b"cpu":
        raise ValueError(words[0])
    user, nice, system, _, iowait, irq, softirq, steal = (int(word) for word in words[1:9])
    return {
        "host_cpu": (user + nice + system + irq + softirq) * _TICK,
        "host_iowait": iowait * _TICK,
        "host_steal": steal * _TICK,
    }


_MEMORY_LINE = re.compile(
    rb"^(MemTotal|MemAvailable|Buffers|Cached|SwapTotal|SwapFree|Dirty|Shmem): +(\d+)", re.MULTILINE
)


def memory_values(text: bytes) -> dict[str, float]:
    """Bytes, from the text of /proc/meminfo; what the kernel does not list is left out.

    The page cache is taken without shared memory: `Cached` counts the pages of tmpfs and of shared
    mappings too, but those hold no file of a disk and cannot be dropped to make room.
    """
    kib = {name: int(count) for name, count in _MEMORY_LINE.findall(text)}
    values: dict[str, float] = {}
    if b"MemAvailable" in kib:
        values["host_available"] = kib[b"MemAvailable"] * 1024.0
        values["host_memory"] = (kib[b"MemTotal"] - kib[b"MemAvailable"]) * 1024.0
    if b"Cached" in kib:
        cache = kib[b"Cached"] + kib.get(b"Buffers", 0) - kib.get(b"Shmem", 0)
        values["page_cache"] = max(cache, 0) * 1024.0
    if b"Dirty" in kib:
        values["dirty"] = kib[b"Dirty"] * 1024.0
    if b"SwapTotal" in kib and b"SwapFree" in kib:
        values["host_swap"] = (kib[b"SwapTotal"] - kib[b"SwapFree"]) * 1024.0
    return values


_PRESSURE_LINE = re.compile(rb"^(some|full) .*total=(\d+)", re.MULTILINE)


def _pressure(proc: str, resource: str, full: bool) -> Source:
    """Stall times since boot. `full` means nothing for the CPU of a whole machine."""
    names = {b"some": f"pressure_{resource}"}
    if full:
        names[b"full"] = f"pressure_{resource}_full"

    def parse(text: bytes) -> dict[str, float]:
        found = _PRESSURE_LINE.findall(text)
        return {names[kind]: int(total) / 1e6 for kind, total in found if kind in names}

    return Source(
        f"{proc}/pressure/{resource}",
        tuple(names.values()),
        parse,
        256,
        absent="this kernel keeps no pressure stall information (CONFIG_PSI, psi=1)",
    )
