"""The parts of benchmarks/max_batch/ that need no GPU: scan, criteria and state."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from max_batch.cases import BASELINES, Case, all_cases, in_order  # noqa: E402
from max_batch.criteria import Findings, verdicts  # noqa: E402
from max_batch.scan import Point, found_edge, next_batches, truth  # noqa: E402
from max_batch.state import State  # noqa: E402

CASE = Case("resnet50", 15, "tf32", "papers")


class World:
    """A simulated GPU: batches up to `edge` pass, except `failing`; larger ones need retries."""

    def __init__(self, edge: int, retry_free: int, failing: tuple[int, ...] = ()) -> None:
        self.edge, self.retry_free, self.failing = edge, retry_free, failing

    def train(self, batch: int) -> Point:
        if batch > self.edge or batch in self.failing:
            return Point(batch, passed=False)
        is_free = batch <= self.retry_free
        return Point(batch, True, retries=int(not is_free), rate=100.0 if is_free else 80.0)

    def scan(self, max_batch: int, recommended: int, thorough: bool = True) -> dict[int, Point]:
        points: dict[int, Point] = {}
        while missing := next_batches(max_batch, recommended, points, thorough):
            assert missing[0] not in points
            points[missing[0]] = self.train(missing[0])
        return points


@given(
    edge=st.integers(2, 40_000),
    ratio=st.floats(0.9, 1.0),
    share=st.floats(0.5, 1.0),
    thorough=st.booleans(),
)
def test_scan_ends_and_finds_the_edge(
    edge: int, ratio: float, share: float, thorough: bool
) -> None:
    max_batch = max(1, int(edge * ratio))
    retry_free = max(1, int(max_batch * share))
    points = World(edge, retry_free).scan(max_batch, retry_free, thorough)
    found = truth(points)
    assert found is not None
    assert min(points) >= 1
    assert len(points) < 100
    assert found_edge(max_batch, points, thorough)
    assert edge * 0.99 - 1 <= found.max_batch <= edge
    assert not found.ragged
    if thorough:
        assert retry_free <= found.recommended <= retry_free * 1.01 + 1


@given(edge=st.integers(50, 5_000), over=st.floats(1.001, 1.2))
def test_scan_goes_down_if_fit_is_too_high(edge: int, over: float) -> None:
    max_batch = int(edge * over) + 1
    found = truth(World(edge, edge).scan(max_batch, int(edge * 0.9)))
    assert found is not None
    assert edge * 0.975 - 1 <= found.max_batch <= edge


def test_a_failure_below_the_edge_is_ragged() -> None:
    points = World(200, 150, failing=(182, 184)).scan(180, 150)
    found = truth(points)
    assert found is not None
    assert (found.max_batch, found.ragged) == (200, True)


def test_slow_batches_without_retries_are_not_recommended() -> None:
    points = {b: Point(b, True, 0, 100.0 if b <= 132 else 60.0) for b in (120, 132, 140, 180)}
    found = truth(points)
    assert found is not None
    assert (found.recommended, found.max_batch, found.best_rate) == (132, 180, 100.0)


def test_no_truth_if_nothing_passed() -> None:
    assert truth({4: Point(4, False)}) is None


def test_order_has_all_items_once_and_manual_last() -> None:
    items = list(in_order(all_cases()))
    assert len(items) == len(set(items)) == sum(len(case.items) for case in all_cases())
    assert [item for _, item in items[-3:]] == ["manual"] * 3
    assert items[0] == (CASE, "fit")


def measured(state: State, max_batch: int, recommended: int, world: World) -> None:
    answer = {
        "max_batch": {"size": max_batch},
        "recommended_batch": {"size": recommended},
        "cost": {"ooms": 1},
    }
    state.put(CASE.name, "fit", {"seconds": 9.0, "answer": answer})
    for point in world.scan(max_batch, recommended).values():
        state.put_point(CASE.name, point.batch, vars(point))
    run = {"passed": max_batch <= world.edge, "retries": 0, "where": "step 1"}
    long = {"passed": True, "retries": 0, "batch": recommended}
    state.put(CASE.name, "repeats", {"batch": max_batch, "runs": [run] * 3})
    state.put(CASE.name, "long", {"batch": recommended, "runs": [long]})
    state.put(CASE.name, "lightning_binsearch", {"batch": 170, "seconds": 10.0})


@pytest.mark.parametrize(
    ("max_batch", "recommended", "failed"),
    [
        (200, 180, set()),
        (198, 175, set()),
        (196, 180, {"1 max batch"}),
        (202, 180, {"1 max batch"}),
        (200, 170, {"1 recommended"}),
        (200, 190, {"1 recommended"}),
    ],
)
def test_criteria(max_batch: int, recommended: int, failed: set[str]) -> None:
    state = State()
    measured(state, max_batch, recommended, World(200, 180))
    found = {v.criterion: v.outcome for v in verdicts(Findings(state), [CASE])}
    assert {name for name, outcome in found.items() if outcome == "FAIL"} == failed
    assert found["4 prediction 24 GiB"] == "missing"


def test_another_answer_invalidates_dependent_items() -> None:
    state = State()
    measured(state, 190, 180, World(200, 180))
    findings = Findings(state)
    assert findings.is_done(CASE, "repeats")
    assert findings.is_done(CASE, "scan")
    record = state.get(CASE.name, "fit") or {}
    record["answer"]["max_batch"]["size"] = 197
    assert not findings.is_done(CASE, "repeats")
    assert not findings.is_done(CASE, "scan")
    assert findings.is_done(CASE, "long")


def test_states_are_stored_and_merged(tmp_path: Path) -> None:
    one, other = State(tmp_path / "one.json"), State(tmp_path / "other.json")
    one.start_run({"cpu": 16}, "first")
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


def test_every_item_has_a_method_or_is_a_baseline() -> None:
    from max_batch.__main__ import Bench

    items = {item for case in all_cases() for item in case.items} - {"scan", "throughput"}
    without_method = {item for item in items if not hasattr(Bench, f"_{item}")}
    assert without_method <= set(BASELINES)
