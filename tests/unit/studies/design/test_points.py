"""The combinations of a design, and its reference trial."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from stepscope.analysis.study.records import Factor, Level
from stepscope.errors import DesignError
from stepscope.studies.design.points import MAX_COMBINATIONS, default_reference, points_of
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
    """Return factors with these numbers of levels; no level is a default, so all trials differ."""
    return {
        name: list(range(100, 100 + count))
        for name, count in zip(SETTINGS[: len(counts)], counts, strict=True)
    }


def rows(design: Design, points: DesignPoints) -> list[tuple[Level, ...]]:
    return [tuple(spec.get(f.name) for f in design.factors) for spec in points.chosen]


def test_all_combinations_in_the_order_of_the_design() -> None:
    design = design_of({"batch_size": [64, 16], "workers": [1, 2], "cpus": [1.0, 2.0]})
    points = points_of(design)
    assert rows(design, points) == list(itertools.product((64, 16), (1, 2), (1.0, 2.0)))
    assert points.combinations == 8 and not points.skipped and not points.remarks
    assert all(spec.get("model") == "cnn" for spec in points.chosen)


def test_rules_skip_with_a_reason() -> None:
    design = design_of({"workers": [1, 4], "cpus": [1.0, 2.0]}, "workers > 2 * cpus", "ranks > 9")
    points = points_of(design)
    assert rows(design, points) == [(1, 1.0), (1, 2.0), (4, 2.0)]
    assert [(dict(each.levels), each.why) for each in points.skipped] == [
        ({"workers": 4, "cpus": 1.0}, "workers > 2 * cpus")
    ]
    assert points.remarks == ("the rule `ranks > 9` on line 11 skips nothing",)


def test_invalid_workloads_are_skipped_with_a_reason() -> None:
    points = points_of(design_of({"steps": [10, None], "seconds": [3.0, None]}))
    assert len(points.chosen) == 3
    (skipped,) = points.skipped
    assert dict(skipped.levels) == {"steps": 10, "seconds": 3.0}
    assert re.search(r"\bsteps\b.*\bseconds\b", skipped.why) and "--" not in skipped.why


def test_the_same_trial_runs_once() -> None:
    design = design_of({"stall_timeout": [None, 300.0], "gpus": [1, "0"], "workers": [1, 2]})
    points = points_of(design)
    assert len(points.chosen) == 2 and len({spec.key for spec in points.chosen}) == 2
    assert points.remarks == ("6 combinations are the same trials as others and are not run again",)
    assert points.combinations == len(points.chosen) + len(points.skipped)


def test_rules_that_skip_everything() -> None:
    design = design_of(
        {"workers": [1, 2, 4], "cpus": [1.0, 2.0]}, "workers > 1", "workers < 2", "ranks > 1"
    )
    with pytest.raises(DesignError) as error:
        points_of(dataclasses.replace(design, file=Path("cnn.yaml")))
    assert str(error.value).splitlines() == [
        "cnn.yaml: None of the 6 combinations is left to run",
        "cnn.yaml:10: `workers > 1` skips 4 of them",
        "cnn.yaml:11: `workers < 2` skips 2 of them",
    ]


def test_no_valid_workload() -> None:
    both = design_of({"steps": [10, 20]}, fixed={"seconds": 3.0})
    with pytest.raises(DesignError, match=r"None of the 2 .* for all of them: .*steps.*seconds"):
        points_of(both)
    mixed = design_of({"steps": [10, 20]}, "steps > 10", fixed={"seconds": 3.0})
    with pytest.raises(
        DesignError,
        match=r"(?s)line 10: `steps > 10` skips 1 .*1 of them cannot be run: .*steps.*seconds",
    ):
        points_of(mixed)


def test_a_larger_sample_extends_a_smaller_one() -> None:
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


def test_a_sample_of_too_many_combinations_to_check() -> None:
    design = design_of(grid_of([60, 60, 60, 60]), "workers < 130", sample=40)
    points = points_of(design)
    assert len(points.chosen) == 40 == len({spec.key for spec in points.chosen})
    assert rows(design, points) == sorted(rows(design, points)) == rows(design, points_of(design))
    assert points.combinations == 60**4 > MAX_COMBINATIONS
    assert points.not_chosen + len(points.skipped) + 40 == points.combinations
    with pytest.raises(DesignError, match="12,960,000 combinations exceed the maximum of 100,000"):
        points_of(dataclasses.replace(design, sample=None))
    nothing = design_of(grid_of([60, 60, 60, 60]), "workers > 1", sample=2)
    with pytest.raises(
        DesignError, match=r"drawn at random, and none of them can be run.*: workers > 1"
    ):
        points_of(nothing)


@pytest.mark.parametrize("sample", [None, 50])
def test_ten_thousand_combinations_are_fast(sample: int | None) -> None:
    design = design_of(grid_of([10, 10, 10, 10]), "workers > 20 * prefetch", sample=sample)

    def seconds() -> float:
        started = time.process_time()
        points_of(design)
        return time.process_time() - started

    assert any(seconds() < 3 for _ in range(3)), "0.25 to 0.5 s on an idle core"


def reference(design: Design) -> dict[str, Level]:
    spec = default_reference(design, points_of(design))
    return {factor.name: spec.get(factor.name) for factor in design.factors}


def test_the_reference_trial_has_the_middle_levels() -> None:
    factors: dict[str, list[Level]] = {
        "batch_size": [256, 64, 16, 128],
        "workers": [1, 2, 3],
        "precision": ["fp32", "bf16", "fp16"],
        "memory": [1 << 30, None, 2 << 30, 4 << 30],
    }
    middle = {"batch_size": 64, "workers": 2, "precision": "bf16", "memory": 4 << 30}
    assert reference(design_of(factors)) == middle
    named = design_of(factors, reference={"batch_size": 16, "seconds": 1.0})
    assert reference(named) == {**middle, "batch_size": 16}
    assert default_reference(named, points_of(named)).get("seconds") == 1.0


def test_the_reference_trial_is_near_the_middle_if_a_rule_skips_it() -> None:
    factors: dict[str, list[Level]] = {"batch_size": [16, 32, 64], "workers": [1, 2, 3]}
    rule = "batch_size == 32 and workers == 2"
    assert reference(design_of(factors, rule)) == {"batch_size": 16, "workers": 2}
    named = design_of(factors, rule, reference={"batch_size": 32})
    assert reference(named) == {"batch_size": 32, "workers": 1}
    for invalid, expected in (
        (
            {"batch_size": 32, "workers": 2},
            r"The reference trial \(batch_size 32, workers 2\) cannot be run: the rule .* skips it",
        ),
        ({"steps": 3}, r"The reference trial \(steps 3\) cannot be run: .*steps.*seconds"),
    ):
        design = design_of(factors, rule, fixed={"seconds": 3.0}, reference=invalid)
        with pytest.raises(DesignError, match=expected):
            reference(design)
