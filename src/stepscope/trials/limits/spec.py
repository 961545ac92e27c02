"""The limits of a trial: CPUs, host memory, GPU memory, GPUs and time."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from stepscope.errors import TrialError
from stepscope.sensors.cgroup import allowed_cpus, find_cgroup

MIN_CPUS = 0.01
MIN_MEMORY = 64 << 20  # about the size of an interpreter with NumPy
THREAD_VARIABLES = [
    f"{library}_NUM_THREADS" for library in ("OMP", "MKL", "OPENBLAS", "BLIS", "NUMEXPR")
]

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kmgt]?)(i?)(b?)", re.IGNORECASE)
_SIZE_HINT = (
    "Use bytes or a number with a unit: KiB, MiB, GiB, kB, MB, GB (k, m, g mean KiB, MiB, GiB)"
)
_ROUNDED_UP = 1023.5 / 1024
"""From here, a size is shown in this unit: in the smaller one it is rounded to 1024."""
_GPU = re.compile(r"[0-9]+|(GPU|MIG)-[0-9A-Za-z/-]+")


@dataclass(frozen=True)
class Limits:
    """The limits of a trial; None means unlimited."""

    cpus: float | None = None
    memory: int | None = None  # bytes of host memory of all processes together
    gpu_memory: int | None = None  # bytes of device memory of each rank
    gpus: tuple[str, ...] | None = None
    """Indices as in nvidia-smi, or UUIDs; an empty tuple means no GPU."""
    timeout_s: float | None = None
    stall_timeout_s: float = 300.0  # maximum time without progress

    @classmethod
    def of(
        cls,
        cpus: float | None = None,
        memory: int | str | None = None,
        gpu_memory: int | str | None = None,
        gpus: int | str | Sequence[int | str] | None = None,
        timeout: float | None = None,
        stall_timeout: float = 300.0,
    ) -> Limits:
        """Parse user input: sizes such as "8GiB", GPUs such as "0,1"."""
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
    """The CPUs and the memory that this process may use."""

    cpus: float
    memory: int

    @classmethod
    def here(cls) -> MachineResources:
        own = find_cgroup(os.getpid())
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return cls(allowed_cpus(os.getpid(), own), min(machine, own.memory_limit() or machine))


def check_limits(limits: Limits, available: MachineResources) -> None:
    """Raise TrialError if a limit is invalid or exceeds the available resources."""
    for option, number in (
        ("--cpus", limits.cpus),
        ("--timeout", limits.timeout_s),
        ("--stall-timeout", limits.stall_timeout_s),
    ):
        if number is not None and not isinstance(number, int | float):
            raise TrialError(f"`{option}` must be a number, got {number!r}")
    for option, value, low, high, text in (
        ("--cpus", limits.cpus, MIN_CPUS, available.cpus, "{:g}".format),
        ("--memory", limits.memory, MIN_MEMORY, available.memory, size_text),
        ("--gpu-memory", limits.gpu_memory, 1, math.inf, size_text),
    ):
        if value is None:
            continue
        given = f"`{option} {text(value).replace(' ', '')}`"
        if not value >= low:  # also rejects NaN
            in_bytes = text is size_text and value < 1024
            hint = f"A size without a unit is in bytes. Did you mean {value:g}GiB?"
            raise TrialError(f"{given} must be at least {text(low)}", hint if in_bytes else "")
        if value > high:
            most = f"{text(high)} CPUs" if option == "--cpus" else text(high)
            raise TrialError(f"{given} is more than stepscope may use on this machine ({most})")
    for name in limits.gpus or ():
        if not _GPU.fullmatch(name):
            hint = "Use indices or UUIDs as listed by nvidia-smi -L"
            raise TrialError(f"Invalid GPU '{name}' in `--gpus`", hint)
    for option, seconds in (
        ("--timeout", limits.timeout_s),
        ("--stall-timeout", limits.stall_timeout_s),
    ):
        if seconds is not None and not seconds > 0:
            raise TrialError(f"`{option} {seconds:g}` must be greater than 0 (seconds)")


def parse_gpus(listed: int | str | Sequence[int | str]) -> tuple[str, ...]:
    """Parse a list such as `0, 1` or `GPU-1b2c...,GPU-3d4e...`, or a sequence of names."""
    names = str(listed).split(",") if isinstance(listed, int | str) else map(str, listed)
    return tuple(name.strip() for name in names if name.strip())


def parse_size(text: str | int) -> int:
    """Parse a size such as `8GiB`, `16GB`, `500MiB`, `1.5g` or a plain number into bytes.

    A letter alone is binary, as in Docker; k, M, G, T with B are decimal, with iB binary.
    """
    match = _SIZE.fullmatch(str(text).strip())
    if match is None or (match[3] and not match[2]):
        raise TrialError(f"Invalid size '{text}'", _SIZE_HINT)
    number, prefix, binary, byte = match.groups()
    base = 1000 if prefix and byte and not binary else 1024
    return int(Decimal(number) * base ** " kmgt".index(prefix.lower() or " "))


def size_text(size: float, like: float | None = None) -> str:
    """Format a size such as 1.5 GiB, which `parse_size` accepts; `like` selects the unit of another
    size, for example 0.98 GiB."""
    for prefix, bits in (("T", 40), ("G", 30), ("M", 20), ("K", 10)):
        number = size / (1 << bits)
        if (number if like is None else like / (1 << bits)) >= _ROUNDED_UP:
            digits = 4 if like is None and number >= 1 else 3
            return f"{number:.{digits}g} {prefix}iB"
    return f"{size:g} B"
