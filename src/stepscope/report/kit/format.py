"""Formats numbers for display. Sizes are in binary units: 1 GiB is 2^30 bytes."""

from __future__ import annotations

import math
from typing import TypeGuard

MISSING = "–"

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_JOULE_UNITS = ("J", "kJ", "MJ", "GJ")
_PLAIN_UNITS = ("W", "°C", "MHz")


def significant(value: float, digits: int = 3) -> str:
    """Format with at least this many significant digits: 0.0123, 1.23, 123, 12,345."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")  # 9.996 becomes 10.0, not 10.00
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"


def bytes_text(value: float | None) -> str:
    """Format a size: 512 B, 1.50 KiB, 2.31 GiB."""
    if not is_known(value):
        return MISSING
    scaled, unit = _scaled(value, _BYTE_UNITS, 1024)
    number = f"{scaled:.0f}" if unit == "B" else significant(scaled)
    return f"{number} {unit}"


def joules_text(value: float | None) -> str:
    """Format an energy: 85.2 J, 412 kJ, 1.20 MJ."""
    if not is_known(value):
        return MISSING
    scaled, unit = _scaled(value, _JOULE_UNITS)
    return f"{significant(scaled)} {unit}"


def _scaled(value: float, units: tuple[str, ...], base: int = 1000) -> tuple[float, str]:
    """Return the value in the first unit in which it has at most three digits."""
    power = 0
    while abs(value) >= 999.5 and power < len(units) - 1:
        value, power = value / base, power + 1
    return float(value), units[power]


def seconds_text(value: float | None) -> str:
    """Format a duration: 12 ms, 0.85 s, 12.3 s, 2 min 05 s, 3 h 04 min, 2 d 03 h."""
    if not is_known(value):
        return MISSING
    if value < 0.0995:
        return f"{value * 1000:.0f} ms" if value else "0 s"
    if value < 59.95:
        return f"{value:.2f} s" if value < 0.995 else f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(round(value / 60), 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(round(value / 3600), 24)
    return f"{days} d {hours:02d} h"


def share_text(value: float | None) -> str:
    """Format a fraction as a percentage: 0.3%, 4.5%, 81%."""
    if not is_known(value):
        return MISSING
    percent = value * 100
    return f"{percent:.1f}%" if 0 < percent < 9.95 else f"{percent:.0f}%"


def count_text(value: float | None) -> str:
    """Format a count: 12, 12,345. A fractional count below 100 keeps one decimal."""
    if not is_known(value):
        return MISSING
    return f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:.1f}"


def plural(count: float, noun: str, several: str = "") -> str:
    """Return the singular or plural of a noun: 1 rank, 2 ranks, 3 processes."""
    return noun if count == 1 else several or f"{noun}s"


def cores_text(value: float | None) -> str:
    """Format a number of cores in use: 0.04, 1.62, 12.5, 128."""
    if not is_known(value):
        return MISSING
    return f"{value:.2f}" if value < 9.995 else significant(value)


def allowed_text(cores: float) -> str:
    """Format a number of allowed cores: 2, 1.50."""
    return f"{cores:.0f}" if cores == round(cores) else cores_text(cores)


def rate_text(value: float | None) -> str:
    """Format a rate without its unit: 0.52, 41.3, 12,345."""
    return significant(value) if is_known(value) else MISSING


def value_text(value: float | None, unit: str) -> str:
    """Format the value of a metric with the unit from the metrics table."""
    if not is_known(value):
        return MISSING
    if unit == "bytes":
        return bytes_text(value)
    if unit == "bytes/s":
        return f"{bytes_text(value)}/s"
    if unit == "1/s":
        return f"{rate_text(value)} /s"
    if unit in _PLAIN_UNITS:
        return f"{value:,.0f} {unit}"
    formatters = {"cores": cores_text, "share": share_text, "seconds": seconds_text}
    return formatters.get(unit, count_text)(value)


TONE_COLORS = {"good": "green", "bad": "red", "warning": "yellow", "neutral": "cyan"}
"""Terminal color of each tone."""


def printable(text: str) -> str:
    """Replace control characters, which user-provided names and commands may contain."""
    return "".join(character if character.isprintable() else "�" for character in text)


def printable_lines(text: str) -> str:
    """Return text that keeps its line breaks but cannot control the terminal."""
    return "\n".join(printable(line.expandtabs(4)) for line in text.splitlines())


def is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def upper_first(text: str) -> str:
    """Capitalize the first letter and keep the rest: "GPU memory" is unchanged."""
    return text[:1].upper() + text[1:]
