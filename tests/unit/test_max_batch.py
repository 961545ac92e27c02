"""What benchmarks/max_batch/ decides without a GPU: what to train next, what is true."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from max_batch.cases import Case, all_cases, in_order  # noqa: E402
from max_batch.criteria import Findings, verdicts  # noqa: E402
from max_batch.scan import Point, found_edge, truth, wanted  # noqa: E402
from max_batch.state import State  # noqa: E402

CASE = Case("resnet50", 15, "tf32", "papers")


class World:
    """A GPU on which batches up to an edge pass, but for holes, and are smooth up to a smaller."""

    def __init__(self, edge: int, smooth: int, holes: tuple[int, ...] = ()) -> None:
        self.edge, self.smooth, self.holes = edge, smooth, holes

    def train(self, batch: int) -> Point:
        if batch > self.edge or batch in self.holes:
            return Point(batch, passed=False)
        is_smooth = batch <= self.smooth
        return Point(batch, True, retries=int(not is_smooth), rate=100.0 if is_smooth else 80.0)

    def scan(self, largest: int, fast: int, thorough: bool = True) -> dict[int, Point]:
        points: dict[int, Point] = {}
        while missing := wanted(largest, fast, points, thorough):
            assert missing[0] not in points
            points[missing[0]] = self.train(missing[0])
        return points


@given(
    edge=st.integers(2, 40_000),
    off=st.floats(0.9, 1.0),
    share=st.floats(0.5, 1.0),
    thorough=st.booleans(),
)
def test_scan_ends_and_finds_the_edge(edge: int, off: float, share: float, thorough: bool) -> None:
    largest = max(1, int(edge * off))
    smooth = max(1, int(largest * share))
    points = World(edge, smooth).scan(largest, smooth, thorough)
    found = truth(points)
    assert found is not None
    assert min(points) >= 1
    assert len(points) < 100
    assert found_edge(largest, points, thorough)
    assert edge * 0.99 - 1 <= found.largest <= edge
    assert not found.ragged
    if thorough:
        assert smooth <= found.fast <= smooth * 1.01 + 1


@given(edge=st.integers(50, 5_000), over=st.floats(1.001, 1.2))
def test_scan_goes_down_where_fit_was_too_high(edge: int, over: float) -> None:
    largest = int(edge * over) + 1
    found = truth(World(edge, edge).scan(largest, int(edge * 0.9)))
    assert found is not None
    assert edge * 0.975 - 1 <= found.largest <= edge


def test_a_hole_below_the_edge_is_ragged() -> None:
    points = World(200, 150, holes=(182, 184)).scan(180, 150)
    found = truth(points)
    assert found is not None
    assert (found.largest, found.ragged) == (200, True)


def test_slow_batches_without_retries_are_not_fast() -> None:
    points = {b: Point(b, True, 0, 100.0 if b <= 132 else 60.0) for b in (120, 132, 140, 180)}
    found = truth(points)
    assert found is not None
    assert (found.fast, found.largest, found.best_rate) == (132, 180, 100.0)


def test_no_truth_where_nothing_passed() -> None:
    assert truth({4: Point(4, False)}) is None


def test_order_has_all_work_once_and_by_hand_last() -> None:
    work = list(in_order(all_cases()))
    assert len(work) == len(set(work)) == sum(len(case.items) for case in all_cases())
    assert [item for _, item in work[-3:]] == ["manual"] * 3
    assert work[0] == (CASE, "fit")


def measured(state: State, largest: int, fast: int, world: World) -> None:
    answer = {"largest": {"size": largest}, "fast": {"size": fast}, "effort": {"ooms": 1}}
    state.put(CASE.name, "fit", {"seconds": 9.0, "answer": answer})
    for point in world.scan(largest, fast).values():
        state.put_point(CASE.name, point.batch, vars(point))
    went = {"passed": largest <= world.edge, "retries": 0, "where": "step 1"}
    lasted = {"passed": True, "retries": 0, "batch": fast}
    state.put(CASE.name, "three", {"batch": largest, "tries": [went] * 3})
    state.put(CASE.name, "long", {"batch": fast, "tries": [lasted]})
    state.put(CASE.name, "lightning_binsearch", {"batch": 170, "seconds": 10.0})


@pytest.mark.parametrize(
    ("largest", "fast", "failed"),
    [
        (200, 180, set()),
        (198, 175, set()),
        (196, 180, {"1 largest"}),
        (202, 180, {"1 largest"}),
        (200, 170, {"1 fast"}),
        (200, 190, {"1 fast"}),
    ],
)
def test_criteria(largest: int, fast: int, failed: set[str]) -> None:
    state = State()
    measured(state, largest, fast, World(200, 180))
    found = {v.criterion: v.outcome for v in verdicts(Findings(state), [CASE])}
    assert {name for name, outcome in found.items() if outcome == "FAIL"} == failed
    assert found["4 card of 24 GiB"] == "missing"


def test_another_answer_makes_what_hangs_on_it_undone() -> None:
    state = State()
    measured(state, 190, 180, World(200, 180))
    findings = Findings(state)
    assert findings.is_done(CASE, "three")
    assert findings.is_done(CASE, "scan")
    told = state.get(CASE.name, "fit") or {}
    told["answer"]["largest"]["size"] = 197
    assert not findings.is_done(CASE, "three")
    assert not findings.is_done(CASE, "scan")
    assert findings.is_done(CASE, "long")


def test_states_are_kept_and_merged(tmp_path: Path) -> None:
    one, other = State(tmp_path / "one.json"), State(tmp_path / "other.json")
    one.begins({"cpu": 16}, "first")
    one.put("a", "fit", {"failed": "no GPU"})
    one.put_point("a", 8, {"passed": True})
    other.put("a", "fit", {"seconds": 3.0})
    other.put_point("a", 9, {"passed": False})
    merged = State(tmp_path / "merged.json")
    merged.merge(State(tmp_path / f"{name}.json") for name in ("one", "other"))
    again = State(tmp_path / "merged.json")
    fit: dict[str, Any] | None = again.get("a", "fit")
    assert fit is not None and fit["seconds"] == 3.0
    assert set(again.points("a")) == {"8", "9"}
    assert (again.machine, again.commands) == ({"cpu": 16}, ["first"])
    assert one.get("a", "fit") is None
    assert one.failure("a", "fit") == "no GPU"
