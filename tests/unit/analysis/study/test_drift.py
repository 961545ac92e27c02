"""Blocks whose sentinel is out of line, or that others disturbed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from stepscope.analysis.study.drift import BlockSeen, Disturbance, judge_blocks, trend
from stepscope.records.trial import InterferenceReason, ProcessNoise

QUIET = ProcessNoise(0.01, 10, "learnt")
NOISY = ProcessNoise(0.15, 10, "learnt")


def blocks(*rates: float | None) -> list[BlockSeen]:
    return [BlockSeen(number, rate, trials=8) for number, rate in enumerate(rates, 1)]


def flagged(seen: Sequence[BlockSeen], known: ProcessNoise | None = None) -> list[int]:
    return [number for number, each in judge_blocks(seen, known).items() if each.flagged]


def test_a_slow_block() -> None:
    judged = judge_blocks(blocks(2310, 2320, 1640, 2300, 2310))
    assert [number for number, each in judged.items() if each.flagged] == [3]
    assert judged[3].is_out_of_line and judged[3].usual_rate == 2310
    assert judged[3].relative == pytest.approx(0.71, abs=0.001)
    assert not judged[1].flagged


def test_a_fast_one_is_out_of_line_too() -> None:
    assert flagged(blocks(100, 101, 99, 100, 130)) == [5]


def test_two_sentinels_cannot_say_who_is_wrong() -> None:
    assert flagged(blocks(100, 50)) == []
    assert flagged(blocks(100, 50, None)) == []


@pytest.mark.parametrize(("known", "expected"), [(QUIET, [3]), (NOISY, []), (None, [])])
def test_of_few_sentinels_the_machine_is_asked(
    known: ProcessNoise | None, expected: list[int]
) -> None:
    assert flagged(blocks(100, 100, 80, 101), known) == expected


def test_small_deviations_are_no_drift() -> None:
    """However well the others agree."""
    assert flagged(blocks(100, 100, 100, 100, 100, 95.2)) == []


def test_sentinels_that_scatter_tell_how_much_is_usual() -> None:
    rates = [100, 88, 112, 95, 107, 91, 110, 80]
    assert flagged(blocks(*rates)) == []
    assert flagged(blocks(*rates, 45)) == [9]


@pytest.mark.parametrize("count", [3, 5, 10, 30])
@pytest.mark.parametrize("noise", [0.03, 0.08])
def test_of_twenty_quiet_studies_about_one_has_a_block_flagged(count: int, noise: float) -> None:
    random = np.random.default_rng(2)
    studies = 400
    wrong = sum(
        bool(flagged(blocks(*(100 * np.exp(noise * random.normal(size=count))))))
        for _ in range(studies)
    )
    assert wrong / studies < 0.07


def test_a_block_at_two_thirds_of_the_usual_rate_is_mostly_found() -> None:
    random = np.random.default_rng(3)
    found = 0
    for _ in range(200):
        rates = 100 * np.exp(0.05 * random.normal(size=8))
        rates[5] *= 0.66
        found += flagged(blocks(*rates)) == [6]
    assert found / 200 > 0.6


def test_disturbances_of_a_kind_are_one() -> None:
    noise = [
        (InterferenceReason("cpu", 1.3, 2),),
        (InterferenceReason("other", text="a fan failed"),),
        (InterferenceReason("cpu", 0.9, 2), InterferenceReason("heat", 0.2)),
        (),
    ]
    (judged,) = judge_blocks([BlockSeen(4, None, noise=noise, trials=4)]).values()
    assert judged.flagged
    assert judged.disturbances == (
        Disturbance(InterferenceReason("cpu", 1.3, 2), 2, 4),
        Disturbance(InterferenceReason("other", text="a fan failed"), 1, 4),
        Disturbance(InterferenceReason("heat", 0.2), 1, 4),
    )


def test_a_sentinel_that_fails() -> None:
    """Flags its block, unless it fails everywhere: then it is no sentinel."""
    failed = BlockSeen(9, None, reference_failed=True, trials=8)
    judged = judge_blocks([*blocks(100, 100, 100), failed])[9]
    assert judged.reference_failed and judged.flagged
    assert flagged([failed, *blocks(None, None, 100)]) == []


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_rates_that_are_none(rate: float) -> None:
    assert flagged(blocks(100, 100, rate, 101)) == []
    assert trend(blocks(100, 100, rate, 101)) is None


def test_nothing() -> None:
    assert judge_blocks([]) == {}
    assert trend([]) is None


class TestTrend:
    def test_a_machine_that_gets_slower(self) -> None:
        seen = blocks(*(100 * 0.98**at for at in range(11)))
        assert flagged(seen) == []
        found = trend(seen)
        assert found and (found.first, found.last) == (1, 11)
        assert found.change.value == pytest.approx(0.98**10)

    def test_or_faster(self) -> None:
        random = np.random.default_rng(0)
        rates = 100 * np.exp(0.02 * np.arange(12) + 0.01 * random.normal(size=12))
        found = trend(blocks(*rates))
        assert found and found.change.low > 1

    def test_chance_is_no_trend(self) -> None:
        random = np.random.default_rng(0)
        told = [trend(blocks(*(100 * np.exp(0.08 * random.normal(size=10))))) for _ in range(200)]
        assert np.mean([bool(each) for each in told]) <= 0.12

    def test_three_sentinels_are_no_line(self) -> None:
        assert trend(blocks(100, 90, 80)) is None
