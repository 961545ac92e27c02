"""The limits of a trial: CPUs, host memory, GPU memory, GPUs and time."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from stepscope.errors import CannotTry
from stepscope.sensors.cgroup import allowed_cpus, find_cgroup

LEAST_CPUS = 0.01
LEAST_MEMORY = 64 << 20  # an interpreter with nothing but NumPy needs about that much
THREAD_VARIABLES = [
    f"{library}_NUM_THREADS" for library in ("OMP", "MKL", "OPENBLAS", "BLIS", "NUMEXPR")
]

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_FORMS = "Give bytes, or a number with KiB, MiB, GiB (1024), kB, MB, GB (1000), or k, m, g (1024)"
_GPU = re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")


@dataclass(frozen=True)
class Limits:
    """The limits of a trial; None is as much as there is."""

    cpus: float | None = None
    memory: int | None = None  # bytes of host memory, of all its processes together
    gpu_memory: int | None = None  # bytes of device memory, of each rank
    gpus: tuple[str, ...] | None = None
    """Numbers as nvidia-smi shows them, or UUIDs; an empty tuple is none at all."""
    timeout_s: float | None = None
    stall_timeout_s: float = 300.0  # without progress for so long it is ended

    @classmethod
    def of(
        cls,
        cpus: float | None = None,
        memory: int | str | None = None,
        gpu_memory: int | str | None = None,
        gpus: str | Sequence[str] | None = None,
        timeout: float | None = None,
        stall_timeout: float = 300.0,
    ) -> Limits:
        """From what a user gives: sizes may be texts such as 8GiB, GPUs a list such as 0,1."""
        return cls(
            cpus,
            None if memory is None else parse_size(memory),
            None if gpu_memory is None else parse_size(gpu_memory),
            None if gpus is None else parse_gpus(gpus),
            timeout,
            stall_timeout,
        )


@dataclass(frozen=True)
class MachineResources:
    """What this process may use of the machine itself."""

    cpus: float
    memory: int

    @classmethod
    def here(cls) -> MachineResources:
        own = find_cgroup(os.getpid())
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(allowed_cpus(os.getpid(), own), min(machine, own.memory_limit() or machine))


def check_limits(limits: Limits, available: MachineResources) -> None:
    """CannotTry unless the limits make sense and are within what there is."""
    for option, value, least, most, text in (
        ("--cpus", limits.cpus, LEAST_CPUS, available.cpus, "{:g}".format),
        ("--memory", limits.memory, LEAST_MEMORY, available.memory, size_text),
        ("--gpu-memory", limits.gpu_memory, 1, math.inf, size_text),
    ):
        if value is None:
            continue
        if not value >= least:  # nor is it where it is no number at all
            raise CannotTry(f"{option} {text(value)} is too small", f"Give at least {text(least)}")
        if value > most:
            there = "are" if option == "--cpus" else "is"
            problem = f"{option} {text(value)} is more than there {there}"
            raise CannotTry(problem, f"This process may use {text(most)}")
    for name in limits.gpus or ():
        if not _GPU.fullmatch(name):
            raise CannotTry(f"--gpus {name} names no GPU", "Give numbers or UUIDs: nvidia-smi -L")
    for option, seconds in (("--timeout", limits.timeout_s), ("--hang", limits.stall_timeout_s)):
        if seconds is not None and not seconds > 0:
            raise CannotTry(f"{option} {seconds:g} is no time", "Give a number of seconds above 0")


def parse_gpus(listed: str | Sequence[str]) -> tuple[str, ...]:
    """The names in `0, 1` or `GPU-1b2c...,GPU-3d4e...`, or in a sequence; none in an empty one."""
    names = listed.split(",") if isinstance(listed, str) else listed
    return tuple(name.strip() for name in names if name.strip())


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


def size_text(size: float, like: float | None = None) -> str:
    """A size in the unit that suits it, such as `parse_size` takes: 1.5 GiB; or in the unit that
    suits another one: 0.98 GiB."""
    for prefix, bits in (("T", 40), ("G", 30), ("M", 20), ("K", 10)):
        if (size if like is None else like) >= 1 << bits:
            return f"{size / (1 << bits):.{4 if like is None else 3}g} {prefix}iB"
    return f"{size:g} B"
