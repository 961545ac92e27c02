"""Numbers as people read them. Units are decimal: 1 GB is 10^9 bytes."""

from __future__ import annotations

import math
from typing import TypeGuard

MISSING = "–"

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_JOULE_UNITS = ("J", "kJ", "MJ", "GJ")
_PLAIN_UNITS = ("W", "°C", "MHz")


def significant(value: float, digits: int = 3) -> str:
    """A number in plain notation, with so many digits at least: 0.0123, 1.23, 123, 12,345."""
    if value == 0:
        return "0"
    rounded = float(f"{value:.{digits - 1}e}")  # 9.996 becomes 10.0, not 10.00
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(rounded))))
    return f"{value:,.{decimals}f}"


def bytes_text(value: float | None) -> str:
    """An amount of bytes: 512 B, 1.50 kB, 2.31 GB."""
    if not is_known(value):
        return MISSING
    scaled, unit = _scaled(value, _BYTE_UNITS)
    number = f"{scaled:.0f}" if unit == "B" else significant(scaled)
    return f"{number} {unit}"


def gigabytes_text(value: float | None) -> str:
    """Gigabytes in the unit that suits them: 0.0015 is 1.50 MB."""
    return bytes_text(value * 1e9 if is_known(value) else None)


def joules_text(value: float | None) -> str:
    """An amount of energy: 85.2 J, 412 kJ, 1.20 MJ."""
    if not is_known(value):
        return MISSING
    scaled, unit = _scaled(value, _JOULE_UNITS)
    return f"{significant(scaled)} {unit}"


def _scaled(value: float, units: tuple[str, ...]) -> tuple[float, str]:
    """A value in the largest unit that leaves something before the point."""
    place = 0
    while abs(value) >= 999.5 and place < len(units) - 1:
        value, place = value / 1000, place + 1
    return float(value), units[place]


def seconds_text(value: float | None) -> str:
    """A length of time: 12 ms, 0.85 s, 12.3 s, 2 min 05 s, 3 h 04 min, 2 d 03 h."""
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
    """A share as per cent: 0.3 %, 4.5 %, 81 %."""
    if not is_known(value):
        return MISSING
    percent = value * 100
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def count_text(value: float | None) -> str:
    """Something counted: 12, 12,345; a mean count keeps a digit."""
    if not is_known(value):
        return MISSING
    return f"{value:,.0f}" if value == round(value) or value >= 100 else f"{value:.1f}"


def plural(count: float, noun: str, several: str = "") -> str:
    """The form of a noun that goes with a count: 1 rank, 2 ranks, 3 processes."""
    return noun if count == 1 else several or f"{noun}s"


def cores_text(value: float | None) -> str:
    """Cores in use: 0.04, 1.62, 12.5, 128."""
    if not is_known(value):
        return MISSING
    return f"{value:.2f}" if value < 9.995 else significant(value)


def allowed_text(cores: float) -> str:
    """How many cores may be used, mostly a whole number: 2, 1.50."""
    return f"{cores:.0f}" if cores == round(cores) else cores_text(cores)


def rate_text(value: float | None) -> str:
    """So many a second, the unit told elsewhere: 0.52, 41.3, 12,345."""
    return significant(value) if is_known(value) else MISSING


def value_text(value: float | None, unit: str) -> str:
    """A value of a metric, by the unit that the table of metrics gives it."""
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
    plain = {"cores": cores_text, "share": share_text, "seconds": seconds_text}
    return plain.get(unit, count_text)(value)


TONE_COLOURS = {"good": "green", "bad": "red", "warning": "yellow", "neutral": "cyan"}
"""How a terminal shows the tone of an outcome."""


def printable(text: str) -> str:
    """Without what could steer the terminal: names and commands are the user's."""
    return "".join(character if character.isprintable() else "�" for character in text)


def is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
