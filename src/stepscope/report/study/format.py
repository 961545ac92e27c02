"""Formatting of the numbers and names of a study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from stepscope.analysis.study.records import Estimate, Response
from stepscope.analysis.trial.throughput import CONFIDENCE
from stepscope.report.kit.format import (
    MISSING,
    bytes_text,
    count_text,
    is_known,
    joules_text,
    rate_text,
    share_text,
    significant,
)

INTERVAL = f"{share_text(CONFIDENCE)} interval"
"""Heading of columns with confidence intervals."""
_Any = TypeVar("_Any")
_MIN_JOULES = 0.0995
"""Smaller energies are shown in millijoules."""


def measured_text(value: float | None, response: Response) -> str:
    """Format a value of a response: `1,234 /s`, `81%`, `2.31 GiB`, `12.3 mJ`."""
    if response.unit == "bytes":
        return bytes_text(value)
    if response.unit == "share":
        return share_text(value)
    if response.unit == "J":
        return energy_text(value)
    return f"{rate_text(value)} /s" if is_known(value) else MISSING


def tick_text(value: float, response: Response) -> str:
    """Format a tick of an axis: `5 GiB`, not `5.00 GiB`."""
    number, blank, unit = measured_text(value, response).partition(" ")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    return number if response.unit == "1/s" else f"{number}{blank}{unit}"


def energy_text(value: float | None) -> str:
    if is_known(value) and 0 < abs(value) < _MIN_JOULES:
        return f"{significant(value * 1000)} mJ"
    return joules_text(value)


def interval_text(low: float | None, high: float | None, response: Response) -> str:
    """Format an interval with its unit: `1,210–1,260 /s`; empty if it is unknown."""
    if not is_known(low) or not is_known(high):
        return ""
    first, last = measured_text(low, response), measured_text(high, response)
    number, _, unit = first.rpartition(" ")
    is_shared = number and last.endswith(f" {unit}")
    return f"{number if is_shared else first}–{last}"


def rate_interval(low: float | None, high: float | None) -> str:
    """Format an interval of samples per second without its unit: `1,210–1,260`."""
    if not is_known(low) or not is_known(high):
        return ""
    return f"{rate_text(low)}–{rate_text(high)}"


def ratio_text(value: float) -> str:
    """Format a ratio: `1.28`, `12.4`."""
    return f"{value:.2f}" if abs(value) < 9.995 else significant(value)


def size_text(size: Estimate, response: Response) -> str:
    """Format the size of an effect: `1.28×`, `12 points`."""
    if not is_known(size.value):
        return MISSING
    if response.scale == "ratio":
        return f"{ratio_text(size.value)}×"
    return f"{_points(size.value)} points" if response.unit == "share" else significant(size.value)


def size_interval(size: Estimate, response: Response) -> str:
    """Format the interval of an effect: `1.21–1.36`; empty if it is unknown."""
    if not is_known(size.low) or not is_known(size.high):
        return ""
    text = ratio_text if response.scale == "ratio" else _points
    dash = " to " if size.low < 0 else "–"
    return f"{text(size.low)}{dash}{text(size.high)}".replace("-", "−")


def _points(share: float) -> str:
    percent = share * 100
    return f"{percent:.1f}" if 0 < abs(percent) < 9.95 else f"{percent:.0f}"


def about_text(seconds: float | None) -> str:
    """Format an estimated duration: `40 s`, `4 min`, `2.5 h`."""
    if not is_known(seconds):
        return ""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    hours = seconds / 3600
    return f"{hours:.1f} h" if hours < 9.95 else f"{hours:.0f} h"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: `1 trial`, `12 trials`."""
    return f"{count_text(number)} {noun}{'' if number == 1 else 's'}"


def thinned(values: Sequence[_Any], most: int) -> list[_Any]:
    """Return at most `most` values, evenly spaced, including the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(place * (len(values) - 1) / (most - 1))] for place in range(most)]
