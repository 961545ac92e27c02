"""Times and shares as people write them: `1h30m`, `90s`, `1/2`, `10%`."""

from __future__ import annotations

import re
from fractions import Fraction

_UNITS = {
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
}
_PART = re.compile(r"\s*(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})\s*([a-z]*)\s*", re.IGNORECASE)
_SHARE = re.compile(r"(\d{1,9}(?:\.\d{0,12})?|\.\d{1,12})(?:\s*/\s*(\d{1,9})|\s*(%))?")
DURATION_FORMS = "Give 90s, 30 min, 2h, 1.5h, 1h30m, or seconds"
SHARE_FORMS = "Give 1/2, 0.5 or 50%"


def parse_duration(text: str) -> float:
    """Seconds; ValueError where it is no time, or none at all."""
    parts, end = [], 0
    while end < len(text):
        found = _PART.match(text, end)
        if found is None or found.end() == end:
            raise ValueError(f"{text!r} is no time")
        parts.append((float(found[1]), found[2].lower()))
        end = found.end()
    if not parts or (len(parts) > 1 and any(not unit for _, unit in parts)):
        raise ValueError(f"{text!r} is no time")
    try:
        seconds = sum(number * _UNITS[unit] for number, unit in parts)
    except KeyError as unit:
        raise ValueError(f"{text!r} is no time: there is no unit {unit}") from None
    if not seconds > 0:
        raise ValueError(f"{text!r} is no time at all")
    return seconds


def parse_share(text: str) -> Fraction:
    """A part of a whole, 0 to 1; ValueError where it is none."""
    found = _SHARE.fullmatch(text.strip())
    if found is None or (found[2] is not None and int(found[2]) == 0):
        raise ValueError(f"{text!r} is no part of a whole")
    share = Fraction(found[1]) / (int(found[2]) if found[2] else 100 if found[3] else 1)
    if share > 1:
        raise ValueError(f"{text!r} is more than all")
    return share
