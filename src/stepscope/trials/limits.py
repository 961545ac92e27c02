"""What a trial may use: CPUs, host memory, GPU memory, GPUs and time."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeVar

from stepscope.errors import CannotTry
from stepscope.sensors.cgroup import allowed_cpus, find_cgroup

_T = TypeVar("_T", int, float)

LEAST_CPUS = 0.01
LEAST_MEMORY = 64 << 20
"""An interpreter with nothing but NumPy needs about that much."""

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_FORMS = "Give bytes, or a number with KiB, MiB, GiB (1024), kB, MB, GB (1000), or k, m, g (1024)"
_GPU = re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")


@dataclass(frozen=True)
class Limits:
    """What a trial may use; None is as much as there is."""

    cpus: float | None = None
    memory: int | None = None
    """Bytes of host memory, of all its processes together."""
    gpu_memory: int | None = None
    """Bytes of device memory, of each rank."""
    gpus: tuple[str, ...] | None = None
    """Numbers as nvidia-smi shows them, or UUIDs; an empty tuple is none at all."""
    timeout_s: float | None = None
    hang_s: float = 300.0
    """When nothing was heard of it for so long, a trial is taken to hang."""

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Room:
    """What this process may use of the machine itself."""

    cpus: float
    memory: int

    @classmethod
    def here(cls) -> Room:
        own = find_cgroup(os.getpid())
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(allowed_cpus(os.getpid(), own), min(machine, own.memory_limit() or machine))


def check_limits(limits: Limits, room: Room) -> None:
    """CannotTry unless the limits make sense and are within what there is."""
    if limits.cpus is not None:
        _check_least("--cpus", limits.cpus, LEAST_CPUS, "{:g}".format)
        if limits.cpus > room.cpus:
            raise CannotTry(
                f"--cpus {limits.cpus:g} is more than there are",
                f"This process may use {room.cpus:g}",
            )
    if limits.memory is not None:
        _check_least("--memory", limits.memory, LEAST_MEMORY, size_text)
        if limits.memory > room.memory:
            raise CannotTry(
                f"--memory {size_text(limits.memory)} is more than there is",
                f"This process may use {size_text(room.memory)}",
            )
    if limits.gpu_memory is not None:
        _check_least("--gpu-memory", limits.gpu_memory, 1, size_text)
    for name in limits.gpus or ():
        if not _GPU.fullmatch(name):
            raise CannotTry(f"--gpus {name} names no GPU", "Give numbers or UUIDs: nvidia-smi -L")
    for option, seconds in (("--timeout", limits.timeout_s), ("--hang", limits.hang_s)):
        if seconds is not None and not seconds > 0:
            raise CannotTry(f"{option} {seconds:g} is no time", "Give a number of seconds above 0")


def _check_least(option: str, value: _T, least: _T, text: Callable[[_T], str]) -> None:
    if not value >= least:  # nor is it where it is no number at all
        raise CannotTry(f"{option} {text(value)} is too small", f"Give at least {text(least)}")


def parse_size(text: str | int) -> int:
    """Bytes of `8GiB`, `16GB`, `500MiB`, `1.5g` or a plain number.

    A letter alone is binary, as docker has it; k, M, G, T with B are decimal, with iB binary.
    """
    found = _SIZE.fullmatch(str(text).strip())
    if found is None or (found[3] and not found[2]):
        raise CannotTry(f"{text!r} is no size", _FORMS)
    number, prefix, binary, byte = found.groups()
    base = 1000 if prefix and byte and not binary else 1024
    return int(Decimal(number) * base ** " kmgt".index(prefix.lower() or " "))


def size_text(size: int) -> str:
    """A size in the unit that suits it, such as `parse_size` takes: 1.5 GiB."""
    for prefix, bits in (("T", 40), ("G", 30), ("M", 20), ("K", 10)):
        if size >= 1 << bits:
            return f"{size / (1 << bits):.4g} {prefix}iB"
    return f"{size} B"
