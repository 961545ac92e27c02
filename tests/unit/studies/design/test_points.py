"""The combinations of a design: all, some, none; and what every block begins with."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepscope.analysis.study.records import Factor, Level
from stepscope.errors import BadDesign
from stepscope.studies.design.points import MOST_COMBINATIONS, default_reference, points_of
from stepscope.studies.design.records import Design, DesignPoints
from stepscope.studies.design.rules import make_rule

SETTINGS = ("batch_size", "workers", "prefetch", "accumulate", "ranks", "samples", "seed", "steps")


def design_of(
    factors: Mapping[str, Sequence[Level]],
    *rules: str,
    fixed: Mapping[str, Level] | None = None,
    **more: Any,
) -> Design:
    return Design(
        "study",
        {"model": "cnn", **(fixed or {})},
        tuple(Factor(name, tuple(levels)) for name, levels in factors.items()),
        rules=tuple(make_rule(text, line, "") for line, text in enumerate(rules, 10)),
        **more,
    )


def grid_of(counts: Sequence[int]) -> dict[str, list[Level]]:
    """Factors of so many levels, none of them a default, so that every combination is another."""
    return {
        name: list(range(100, 100 + count))
        for name, count in zip(SETTINGS[: len(counts)], counts, strict=True)
    }


def rows(design: Design, points: DesignPoints) -> list[tuple[Level, ...]]:
    return [tuple(spec.get(f.name) for f in design.factors) for spec in points.chosen]


def test_everything_in_the_order_of_the_design() -> None:
    design = design_of({"batch_size": [64, 16], "workers": [1, 2], "cpus": [1.0, 2.0]})
    points = points_of(design)
    assert rows(design, points) == list(itertools.product((64, 16), (1, 2), (1.0, 2.0)))
    assert points.combinations == 8 and not points.skipped and not points.remarks
    assert all(spec.get("model") == "cnn" for spec in points.chosen)


def test_rules_skip_and_say_why() -> None:
    design = design_of({"workers": [1, 4], "cpus": [1.0, 2.0]}, "workers > 2 * cpus", "ranks > 9")
    points = points_of(design)
    assert rows(design, points) == [(1, 1.0), (1, 2.0), (4, 2.0)]
    assert [(dict(left.levels), left.why) for left in points.skipped] == [
        ({"workers": 4, "cpus": 1.0}, "workers > 2 * cpus")
    ]
    assert points.remarks == ("`ranks > 9` in line 11 skips nothing",)


def test_what_makes_no_workload_is_skipped_with_the_reason() -> None:
    points = points_of(design_of({"steps": [10, None], "seconds": [3.0, None]}))
    assert len(points.chosen) == 3
    assert [left.why for left in points.skipped] == [
        "steps and seconds were both given. Give one of them"
    ]


def test_the_same_trial_is_tried_once() -> None:
    design = design_of({"hang": [None, 300.0], "gpus": [1, "0"], "workers": [1, 2]})
    points = points_of(design)
    assert len(points.chosen) == 2 and len({spec.key for spec in points.chosen}) == 2
    assert points.remarks == ("6 combinations are the same trials as others, and not tried again",)
    assert points.combinations == len(points.chosen) + len(points.skipped)


def test_nothing_is_left_by_rules() -> None:
    design = design_of(
        {"workers": [1, 2, 4], "cpus": [1.0, 2.0]}, "workers > 1", "workers < 2", "ranks > 1"
    )
    with pytest.raises(BadDesign) as error:
        points_of(dataclasses.replace(design, file=Path("cnn.yaml")))
    assert str(error.value).splitlines() == [
        "cnn.yaml: of 6 combinations none is left to try",
        "cnn.yaml:10: `workers > 1` skips 4 of them",
        "cnn.yaml:11: `workers < 2` skips 2 of them",
    ]


def test_nothing_makes_a_workload() -> None:
    both = design_of({"steps": [10, 20]}, fixed={"seconds": 3.0})
    with pytest.raises(BadDesign, match=r"none of the 2 .* of each: steps and seconds were both"):
        points_of(both)
    mixed = design_of({"steps": [10, 20]}, "steps > 10", fixed={"seconds": 3.0})
    with pytest.raises(
        BadDesign, match=r"(?s)line 10: `steps > 10` skips 1 .*1: steps and seconds"
    ):
        points_of(mixed)


def test_a_random_part_grows_without_changing() -> None:
    design = design_of(grid_of([5, 5, 4]), seed=3)
    few, more = (
        rows(design, points_of(dataclasses.replace(design, sample=number))) for number in (20, 30)
    )
    assert len(few) == 20 and len(more) == 30 and set(few) < set(more)
    assert more == sorted(more), "the order of the design"
    other = dataclasses.replace(design, seed=4, sample=20)
    assert set(rows(design, points_of(other))) != set(few)
    everything = points_of(dataclasses.replace(design, sample=100))
    assert len(everything.chosen) == 100 and "all 100 combinations" in everything.remarks[0]


def test_of_very_many_some_are_drawn() -> None:
    design = design_of(grid_of([60, 60, 60, 60]), "workers < 130", sample=40)
    points = points_of(design)
    assert len(points.chosen) == 40 == len({spec.key for spec in points.chosen})
    assert rows(design, points) == sorted(rows(design, points)) == rows(design, points_of(design))
    assert points.combinations == 60**4 > MOST_COMBINATIONS
    assert points.not_chosen + len(points.skipped) + 40 == points.combinations
    with pytest.raises(BadDesign, match="12,960,000 combinations are too many to look at"):
        points_of(dataclasses.replace(design, sample=None))
    nothing = design_of(grid_of([60, 60, 60, 60]), "workers > 1", sample=2)
    with pytest.raises(BadDesign, match=r"were drawn, and none can be tried; .*: workers > 1"):
        points_of(nothing)


@pytest.mark.parametrize("sample", [None, 50])
def test_ten_thousand_combinations_take_no_time(sample: int | None) -> None:
    design = design_of(grid_of([10, 10, 10, 10]), "workers > 20 * prefetch", sample=sample)

    def seconds() -> float:
        began = time.process_time()
        points_of(design)
        return time.process_time() - began

    assert any(seconds() < 3 for _ in range(3)), "0.25 to 0.5 s on an idle core"


def sentinel(design: Design) -> dict[str, Level]:
    spec = default_reference(design, points_of(design))
    return {factor.name: spec.get(factor.name) for factor in design.factors}


def test_the_sentinel_is_in_the_middle() -> None:
    factors: dict[str, list[Level]] = {
        "batch_size": [256, 64, 16, 128],
        "workers": [1, 2, 3],
        "precision": ["fp32", "bf16", "fp16"],
        "memory": [1 << 30, None, 2 << 30, 4 << 30],
    }
    middle = {"batch_size": 64, "workers": 2, "precision": "bf16", "memory": 4 << 30}
    assert sentinel(design_of(factors)) == middle
    said = design_of(factors, reference={"batch_size": 16, "seconds": 1.0})
    assert sentinel(said) == {**middle, "batch_size": 16}
    assert default_reference(said, points_of(said)).get("seconds") == 1.0


def test_where_the_middle_is_not_allowed_the_sentinel_is_near_it() -> None:
    factors: dict[str, list[Level]] = {"batch_size": [16, 32, 64], "workers": [1, 2, 3]}
    rule = "batch_size == 32 and workers == 2"
    assert sentinel(design_of(factors, rule)) == {"batch_size": 16, "workers": 2}
    said = design_of(factors, rule, reference={"batch_size": 32})
    assert sentinel(said) == {"batch_size": 32, "workers": 1}
    for wrong, why in (
        ({"batch_size": 32, "workers": 2}, "skipped by"),
        ({"steps": 3}, "both given"),
    ):
        design = design_of(factors, rule, fixed={"seconds": 3.0}, reference=wrong)
        with pytest.raises(BadDesign, match=why):
            sentinel(design)
