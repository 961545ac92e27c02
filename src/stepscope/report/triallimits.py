"""The limits of a trial in words: in binary units, as people ask for them. What was measured is
decimal, as everywhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from stepscope.analysis.trial import number
from stepscope.report.format import bytes_text

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))


def limit_texts(limits: Mapping[str, Any]) -> list[str]:
    """What was asked for, by what it was enforced, and how far it was used."""
    return [
        _limit_text(show(limit["asked"]), limit)
        for name, show in _LIMITS.items()
        if isinstance(limit := limits.get(name), Mapping) and limit.get("asked") is not None
    ]


def peak_text(limits: Mapping[str, Any]) -> str:
    """How much of its host memory was used at once, as the kernel counts; empty if not told."""
    asked, peak = number(limits, "memory", "asked"), number(limits, "memory", "peak")
    if asked is None or peak is None:
        return ""
    return f"peak {size_text(peak, asked)} of {size_text(asked)}, page cache included"


def host_memory_text(peak: float | None, limits: Mapping[str, Any]) -> str:
    """What the processes held. It may be more than a control group allows, as the kernel charges
    a page that several groups share to one of them only."""
    if peak is None:
        return ""
    asked, memory = number(limits, "memory", "asked"), limits.get("memory") or {}
    is_more = asked is not None and peak > asked and str(memory.get("by")).startswith("cgroup")
    why = ", with shared library pages that its limit does not count" if is_more else ""
    return f"{bytes_text(peak)} at its peak{why}"


def size_text(size: float, like: float | None = None) -> str:
    """A size in the unit that suits it, or that suits another one: 1 GiB, 0.98 GiB."""
    unit, scale = next(
        (each for each in _UNITS if (size if like is None else like) >= each[1]), _UNITS[-1]
    )
    return f"{size / scale:.{4 if like is None else 3}g} {unit}"


def _limit_text(what: str, limit: Mapping[str, Any]) -> str:
    how = "; ".join(str(limit[key]) for key in ("by", "why", "note") if limit.get(key))
    peak = number(limit, "peak")
    used = f", peak {size_text(peak, limit['asked'])} of it, page cache included" if peak else ""
    escaped = len(limit.get("escaped") or ())
    many = "process" if escaped == 1 else "processes"
    but = f", and {escaped} {many} escaped it" if escaped else ""
    return what + (f" ({how})" if how else "") + used + but


_LIMITS: dict[str, Callable[[Any], str]] = {
    "cpus": lambda asked: f"{asked:g} CPU{'s' * (asked != 1)}",
    "memory": lambda asked: f"{size_text(asked)} of host memory",
    "gpu_memory": lambda asked: f"{size_text(asked)} of GPU memory, each rank",
    "gpus": lambda asked: f"GPU {', '.join(map(str, asked))}" if asked else "no GPU",
}
