"""Detection of outlier reference trials, interference and drift."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from stepscope.analysis.study.drift import BlockInterference, BlockSeen, judge_blocks, trend
from stepscope.records.trial import InterferenceReason, ProcessNoise

QUIET = ProcessNoise(0.01, 10, "learned")
NOISY = ProcessNoise(0.15, 10, "learned")


def blocks(*rates: float | None) -> list[BlockSeen]:
    return [BlockSeen(number, rate, trials=8) for number, rate in enumerate(rates, 1)]


def flagged(seen: Sequence[BlockSeen], prior: ProcessNoise | None = None) -> list[int]:
    return [number for number, each in judge_blocks(seen, prior).items() if each.flagged]


def test_slow_block_is_an_outlier() -> None:
    judged = judge_blocks(blocks(2310, 2320, 1640, 2300, 2310))
    assert [number for number, each in judged.items() if each.flagged] == [3]
    assert judged[3].is_outlier and judged[3].median_throughput == 2310
    assert judged[3].relative == pytest.approx(0.71, abs=0.001)
    assert not judged[1].flagged


def test_fast_block_is_an_outlier() -> None:
    assert flagged(blocks(100, 101, 99, 100, 130)) == [5]


def test_two_reference_trials_have_no_outlier() -> None:
    assert flagged(blocks(100, 50)) == []
    assert flagged(blocks(100, 50, None)) == []


@pytest.mark.parametrize(("prior", "expected"), [(QUIET, [3]), (NOISY, []), (None, [])])
def test_few_reference_trials_use_the_prior(
    prior: ProcessNoise | None, expected: list[int]
) -> None:
    assert flagged(blocks(100, 100, 80, 101), prior) == expected


def test_small_deviations_are_not_outliers() -> None:
    """Even if all other reference trials agree."""
    assert flagged(blocks(100, 100, 100, 100, 100, 95.2)) == []


def test_sigma_comes_from_the_reference_trials() -> None:
    rates = [100, 88, 112, 95, 107, 91, 110, 80]
    assert flagged(blocks(*rates)) == []
    assert flagged(blocks(*rates, 45)) == [9]


@pytest.mark.parametrize("count", [3, 5, 10, 30])
@pytest.mark.parametrize("noise", [0.03, 0.08])
def test_false_alarm_rate(count: int, noise: float) -> None:
    random = np.random.default_rng(2)
    studies = 400
    false_alarms = sum(
        bool(flagged(blocks(*(100 * np.exp(noise * random.normal(size=count))))))
        for _ in range(studies)
    )
    assert false_alarms / studies < 0.07


def test_block_at_two_thirds_of_the_median_is_usually_detected() -> None:
    random = np.random.default_rng(3)
    detected = 0
    for _ in range(200):
        rates = 100 * np.exp(0.05 * random.normal(size=8))
        rates[5] *= 0.66
        detected += flagged(blocks(*rates)) == [6]
    assert detected / 200 > 0.6


def test_interference_is_grouped_by_kind() -> None:
    interference = [
        (InterferenceReason("cpu", 1.3, 2),),
        (InterferenceReason("other", text="a fan failed"),),
        (InterferenceReason("cpu", 0.9, 2), InterferenceReason("heat", 0.2)),
        (),
    ]
    (judged,) = judge_blocks([BlockSeen(4, None, interference=interference, trials=4)]).values()
    assert judged.flagged
    assert judged.interference == (
        BlockInterference(InterferenceReason("cpu", 1.3, 2), 2, 4),
        BlockInterference(InterferenceReason("other", text="a fan failed"), 1, 4),
        BlockInterference(InterferenceReason("heat", 0.2), 1, 4),
    )


def test_failed_reference_trial_flags_its_block() -> None:
    """Unless it fails in all blocks."""
    failed = BlockSeen(9, None, reference_failed=True, trials=8)
    judged = judge_blocks([*blocks(100, 100, 100), failed])[9]
    assert judged.reference_failed and judged.flagged
    assert flagged([failed, *blocks(None, None, 100)]) == []


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_invalid_throughput_is_ignored(rate: float) -> None:
    assert flagged(blocks(100, 100, rate, 101)) == []
    assert trend(blocks(100, 100, rate, 101)) is None


def test_no_blocks() -> None:
    assert judge_blocks([]) == {}
    assert trend([]) is None


class TestTrend:
    def test_slower(self) -> None:
        seen = blocks(*(100 * 0.98**at for at in range(11)))
        assert flagged(seen) == []
        result = trend(seen)
        assert result and (result.first, result.last) == (1, 11)
        assert result.change.value == pytest.approx(0.98**10)

    def test_faster(self) -> None:
        random = np.random.default_rng(0)
        rates = 100 * np.exp(0.02 * np.arange(12) + 0.01 * random.normal(size=12))
        result = trend(blocks(*rates))
        assert result and result.change.low > 1

    def test_noise_is_rarely_a_trend(self) -> None:
        random = np.random.default_rng(0)
        trends = [trend(blocks(*(100 * np.exp(0.08 * random.normal(size=10))))) for _ in range(200)]
        assert np.mean([bool(each) for each in trends]) <= 0.12

    def test_three_reference_trials_are_too_few(self) -> None:
        assert trend(blocks(100, 90, 80)) is None
