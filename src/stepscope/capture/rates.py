"""Turns cumulative counters into rates over their true window."""

from __future__ import annotations

from stepscope.metrics import is_counter
from stepscope.records import Reading

_FORGET_ABOVE = 100
"""Entities that are gone and still remembered: processes come and go."""

Values = dict[str, float | None]


class Rates:
    """Remembers what one sensor last read of each entity."""

    def __init__(self, metrics: tuple[str, ...], from_zero_ns: int | None = None) -> None:
        """With `from_zero_ns`, an entity not seen before had counted nothing until the last reading
        (or until that time): true of processes that are born under watch."""
        self._counters = tuple(key for key in metrics if is_counter(key))
        self._last: dict[str | int, tuple[int, Values]] = {}
        self._read_before_ns = from_zero_ns
        self._from_zero = from_zero_ns is not None

    def convert(self, t_ns: int, readings: list[Reading]) -> list[tuple[float | None, Reading]]:
        """Each reading with the seconds its rates are over (None for the first)."""
        rows = [self._convert_one(t_ns, reading) for reading in readings]
        self._read_before_ns = t_ns
        if len(self._last) > 2 * len(readings) + _FORGET_ABOVE:
            self._last = {key: last for key, last in self._last.items() if last[0] == t_ns}
        return rows

    def _convert_one(self, t_ns: int, reading: Reading) -> tuple[float | None, Reading]:
        entity = reading.entity
        key = entity.name if entity.pid is None else entity.pid  # a process may change its role
        before = self._last.get(key)
        self._last[key] = (t_ns, reading.values)
        if before is None and self._from_zero and self._read_before_ns is not None:
            before = (self._read_before_ns, dict.fromkeys(self._counters, 0.0))
        if before is None or t_ns <= before[0]:
            values = {k: v for k, v in reading.values.items() if k not in self._counters}
            return None, Reading(reading.entity, values)
        window = (t_ns - before[0]) / 1e9
        values = dict(reading.values)
        for key in self._counters:
            if key in values:
                values[key] = _rate(before[1].get(key), values[key], window)
        return window, Reading(reading.entity, values)


def _rate(before: float | None, now: float | None, window: float) -> float | None:
    """None where a value is missing, or where the counter went back (it was reset)."""
    if before is None or now is None or now < before:
        return None
    return (now - before) / window
