"""Numbers and levels in the sentences of an analysis, which knows nothing of units."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from stepscope.analysis.study.records import Estimate, Level, Response

Text = Callable[[str, Level], str]
"""How a level of a factor is written."""


def plain(name: str, level: Level) -> str:
    """A level as it is: what the callers of an analysis do better, knowing units."""
    if level is None:
        return "–"
    if isinstance(level, bool):
        return "yes" if level else "no"
    return f"{level:g}" if isinstance(level, float) else str(level)


def times(ratio: float) -> str:
    """`1.28×`."""
    return f"{_ratio(ratio)}×"


def times_between(size: Estimate) -> str:
    """`1.21–1.36`; "where it lies is not known" without an interval."""
    if not math.isfinite(size.high):
        return "where it lies is not known"
    return f"{_ratio(size.low)}–{_ratio(size.high)}"


def effect(value: float, response: Response) -> str:
    """One level against another: `1.28×`, `+12 points`."""
    if response.scale == "ratio":
        return times(value)
    if response.unit == "share":
        return f"{value * 100:+.0f} points".replace("-", "−")
    return f"{value:+.3g} {response.unit}".rstrip().replace("-", "−")


def percent(share: float) -> str:
    """`12 %`."""
    return f"{share * 100:.0f} %"


def gained(ratio: float) -> str:
    """`gains 2 %`, `loses 3 %`."""
    change = _percents(ratio)
    if change == 0:
        return "gains nothing"
    return f"loses {-change} %" if change < 0 else f"gains {change} %"


def gained_between(gain: Estimate) -> str:
    """`−3 to +7 %`."""
    if not math.isfinite(gain.high):
        return "where it lies is not known"
    return f"{_signed(gain.low)} to {_signed(gain.high)} %"


def is_many(factor: str) -> bool:
    """Whether its name is a plural: workers matter, a batch_size matters not."""
    return factor.endswith("s")


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _signed(ratio: float) -> str:
    change = _percents(ratio)
    return f"−{-change}" if change < 0 else f"+{change}"


def _percents(ratio: float) -> float:
    return round((ratio - 1) * 100) if math.isfinite(ratio) else ratio
