"""The combinations of a design: all, some, none; and what every block begins with."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analysis.study.records import Factor, Level
from stepscope.errors import BadDesign
from stepscope.studies.constraints import make_rule
from stepscope.studies.design import Choice, Design, Points
from stepscope.studies.points import MOST_COMBINATIONS, default_sentinel, points_of

KNOBS = ("batch_size", "workers", "prefetch", "accumulate", "ranks", "samples", "seed", "steps")


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
        for name, count in zip(KNOBS[: len(counts)], counts, strict=True)
    }


def rows(design: Design, points: Points) -> list[tuple[Level, ...]]:
    return [tuple(spec.get(f.name) for f in design.factors) for spec in points.chosen]


def spreads(design: Design, chosen: Sequence[tuple[Level, ...]]) -> list[int]:
    """For each factor, by how much its levels differ in how often they come."""
    found = []
    for column, factor in zip(zip(*chosen, strict=True), design.factors, strict=True):
        counts = Counter(column)
        found.append(max(counts.values()) - min(counts[level] for level in factor.levels))
    return found


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
        rows(design, points_of(dataclasses.replace(design, choice=Choice(random=number))))
        for number in (20, 30)
    )
    assert len(few) == 20 and len(more) == 30 and set(few) < set(more)
    assert more == sorted(more), "the order of the design"
    other = dataclasses.replace(design, seed=4, choice=Choice(random=20))
    assert set(rows(design, points_of(other))) != set(few)
    everything = points_of(dataclasses.replace(design, choice=Choice(random=100)))
    assert len(everything.chosen) == 100 and "all 100 combinations" in everything.remarks[0]


def test_of_very_many_some_are_drawn() -> None:
    design = design_of(grid_of([60, 60, 60, 60]), "workers < 130", choice=Choice(random=40))
    points = points_of(design)
    assert len(points.chosen) == 40 == len({spec.key for spec in points.chosen})
    assert rows(design, points) == sorted(rows(design, points)) == rows(design, points_of(design))
    assert points.combinations == 60**4 > MOST_COMBINATIONS
    assert points.not_chosen + len(points.skipped) + 40 == points.combinations
    with pytest.raises(BadDesign, match="12,960,000 combinations are too many to look at"):
        points_of(dataclasses.replace(design, choice=Choice()))
    nothing = design_of(grid_of([60, 60, 60, 60]), "workers > 1", choice=Choice(random=2))
    with pytest.raises(BadDesign, match=r"were drawn, and none can be tried; .*: workers > 1"):
        points_of(nothing)


@pytest.mark.parametrize(
    ("counts", "share", "said"),
    [
        ([2] * 3, "1/2", "batch_size cannot be told from workers×prefetch"),
        ([2] * 4, "1/2", "main effects are clear of pairs; batch_size×workers cannot be told from "
         "prefetch×accumulate; batch_size×prefetch cannot"),
        ([2] * 5, "1/2", "main effects and pairs are clear of each other"),
        ([2] * 6, "1/4", "main effects are clear of pairs"),
        ([2] * 7, "1/8", "main effects are clear of pairs"),
        ([2] * 8, "1/16", "main effects are clear of pairs"),
        ([2] * 8, "1/4", "main effects and pairs are clear of each other"),
        ([3] * 4, "1/9", "batch_size cannot be told from"),
        ([3] * 5, "1/3", "main effects and pairs are clear of each other"),
        ([5] * 3, "1/5", "batch_size cannot be told from workers×prefetch"),
        ([2] * 2, "1/2", "batch_size cannot be told from workers"),
    ],
)  # fmt: skip
def test_regular_fractions_have_the_resolution_of_the_textbooks(
    counts: list[int], share: str, said: str
) -> None:
    for seed in range(3):
        choice = Choice(fraction=Fraction(share))
        design = design_of(grid_of(counts), choice=choice, seed=seed)
        points = points_of(design)
        assert len(points.chosen) == prod(counts) * Fraction(share)
        assert said in points.remarks[0]
        assert spreads(design, rows(design, points)) == [0] * len(counts)
        if "told from workers;" not in points.remarks[0] and len(counts) > 2:
            pairs = itertools.combinations(zip(*rows(design, points), strict=True), 2)
            frequent = [set(Counter(zip(*pair, strict=True)).values()) for pair in pairs]
            assert all(len(numbers) == 1 for numbers in frequent), "all pairs equally often"


_COUNTS = st.lists(st.integers(2, 5), min_size=2, max_size=4)
_SHARES = st.builds(Fraction, st.just(1), st.integers(2, 8)) | st.sampled_from(
    [Fraction(2, 3), Fraction(3, 10)]
)


@settings(max_examples=60, deadline=None)
@given(counts=_COUNTS, share=_SHARES, seed=st.integers(0, 5))
def test_every_fraction_is_balanced(counts: list[int], share: Fraction, seed: int) -> None:
    design = design_of(grid_of(counts), choice=Choice(fraction=share), seed=seed)
    points = points_of(design)
    chosen = rows(design, points)
    assert len(chosen) == len(set(chosen)) == max(1, round(prod(counts) * share))
    assert chosen == sorted(chosen) == rows(design, points_of(design))
    assert points.not_chosen == prod(counts) - len(chosen)
    assert max(spreads(design, chosen)) <= 1
    if len(chosen) >= max(counts):
        for column, count in zip(zip(*chosen, strict=True), counts, strict=True):
            assert len(set(column)) == count, "every level is there"


@settings(max_examples=30, deadline=None)
@given(counts=_COUNTS, bound=st.integers(201, 206), seed=st.integers(0, 3))
def test_a_fraction_of_what_rules_leave_has_every_level(
    counts: list[int], bound: int, seed: int
) -> None:
    rule = f"batch_size + workers > {bound}"
    design = design_of(grid_of(counts), rule, choice=Choice(fraction=Fraction(1, 2)), seed=seed)
    allowed = rows(design, points_of(dataclasses.replace(design, choice=Choice())))
    points = points_of(design)
    chosen = rows(design, points)
    assert len(chosen) == max(1, round(len(allowed) / 2)) and {*chosen} <= {*allowed}
    levels = [len(set(column)) for column in zip(*allowed, strict=True)]
    if len(chosen) >= 2 * max(levels):
        assert [len(set(column)) for column in zip(*chosen, strict=True)] == levels


def test_a_mixed_half_has_pairs_about_equally_often() -> None:
    design = design_of(grid_of([2, 3, 4]), choice=Choice(fraction=Fraction(1, 2)))
    chosen = rows(design, points_of(design))
    pairs = Counter((row[0], row[1]) for row in chosen), Counter((row[1], row[2]) for row in chosen)
    assert set(pairs[0].values()) == {2} and set(pairs[1].values()) == {1}


def test_too_small_a_fraction_says_so() -> None:
    design = design_of(grid_of([2, 3, 4]), choice=Choice(fraction=Fraction(1, 12)))
    assert points_of(design).remarks == (
        "1/12 of 24: too few for every level of workers, prefetch",
    )
    design = design_of(grid_of([3, 4, 4]), choice=Choice(fraction=Fraction(1, 9)))
    assert points_of(design).remarks == ("1/9 of 48: too few to tell all main effects apart",)


@pytest.mark.parametrize(
    ("counts", "share", "rules"),
    [
        ([4, 4], "1/2", ()),
        ([3, 4], "1/2", ()),
        ([2, 3, 3], "1/3", ()),
        ([3, 4], "2/3", ("batch_size + workers > 203",)),
        ([4, 4, 4], "1/3", ("batch_size + workers > 203",)),
        ([2, 3, 2, 2], "1/2", ("workers > 101 and prefetch > 100", "batch_size > accumulate")),
    ],
)
def test_main_effects_can_be_told_apart_where_there_are_enough_points(
    counts: list[int], share: str, rules: tuple[str, ...]
) -> None:
    design = design_of(grid_of(counts), *rules, choice=Choice(fraction=Fraction(share)))
    points = points_of(design)
    columns = [
        [row[number] == level for row in rows(design, points)]
        for number, factor in enumerate(design.factors)
        for level in factor.levels[1:]
    ]
    matrix = np.array([[True] * len(points.chosen), *columns], dtype=float)
    assert np.linalg.matrix_rank(matrix) == 1 + sum(count - 1 for count in counts)
    assert "main effects can be told apart" in points.remarks[-1]


@pytest.mark.parametrize("choice", [Choice(), Choice(random=50), Choice(fraction=Fraction(1, 3))])
def test_ten_thousand_combinations_take_no_time(choice: Choice) -> None:
    design = design_of(grid_of([10, 10, 10, 10]), "workers > 20 * prefetch", choice=choice)
    began = time.process_time()
    points = points_of(design)
    assert time.process_time() - began < 3, "0.25 to 0.5 s on an idle core"
    if choice.fraction:
        assert len(points.chosen) == 3333 and max(spreads(design, rows(design, points))) <= 1


def sentinel(design: Design) -> dict[str, Level]:
    spec = default_sentinel(design, points_of(design))
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
    said = design_of(factors, sentinel={"batch_size": 16, "seconds": 1.0})
    assert sentinel(said) == {**middle, "batch_size": 16}
    assert default_sentinel(said, points_of(said)).get("seconds") == 1.0


def test_where_the_middle_is_not_allowed_the_sentinel_is_near_it() -> None:
    factors: dict[str, list[Level]] = {"batch_size": [16, 32, 64], "workers": [1, 2, 3]}
    rule = "batch_size == 32 and workers == 2"
    assert sentinel(design_of(factors, rule)) == {"batch_size": 16, "workers": 2}
    said = design_of(factors, rule, sentinel={"batch_size": 32})
    assert sentinel(said) == {"batch_size": 32, "workers": 1}
    for wrong, why in (
        ({"batch_size": 32, "workers": 2}, "skipped by"),
        ({"steps": 3}, "both given"),
    ):
        design = design_of(factors, rule, fixed={"seconds": 3.0}, sentinel=wrong)
        with pytest.raises(BadDesign, match=why):
            sentinel(design)
