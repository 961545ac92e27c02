"""Counters are converted to rates over their actual window."""

from __future__ import annotations

from stepscope.capture.schedule import Rates
from stepscope.records import Entity, Reading

TREE = Entity("tree")
S = 1_000_000_000


def reading(cpu: float | None, rss: float = 5.0) -> list[Reading]:
    return [Reading(TREE, {"cpu": cpu, "rss": rss})]


def test_first_reading_of_a_counter_has_no_rate() -> None:
    rates = Rates(("cpu", "rss"))
    ((window, row),) = rates.convert(S, reading(7.0))
    assert window is None and row.values == {"rss": 5.0}
    ((window, row),) = rates.convert(int(1.5 * S), reading(8.0))
    assert window == 0.5 and row.values == {"cpu": 2.0, "rss": 5.0}


def test_new_entities_count_from_zero() -> None:
    rates = Rates(("cpu", "rss"), from_zero_ns=S)
    ((window, row),) = rates.convert(2 * S, reading(3.0))
    assert (window, row.values["cpu"]) == (1.0, 3.0)
    rows = rates.convert(3 * S, [Reading(Entity("worker"), {"cpu": 4.0})])
    assert rows[0][0] == 1.0 and rows[0][1].values["cpu"] == 4.0


def test_reset_or_missing_counter_has_no_rate() -> None:
    rates = Rates(("cpu",))
    for t, cpu in ((1, 5.0), (2, 3.0), (3, None), (4, 9.0)):
        ((_, row),) = rates.convert(t * S, reading(cpu))
        assert row.values.get("cpu") is None
    ((_, row),) = rates.convert(5 * S, reading(10.0))
    assert row.values["cpu"] == 1.0
