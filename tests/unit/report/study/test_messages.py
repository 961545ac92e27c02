"""Sentences about the results of the analysis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from stepscope.analysis.study.drift import BlockSeen, judge_blocks, trend
from stepscope.analysis.study.records import (
    RESPONSES,
    THROUGHPUT,
    Estimate,
    Interaction,
    NoKnee,
    Remark,
    ScalingCurve,
)
from stepscope.records.trial import InterferenceReason
from stepscope.report.study import tables
from stepscope.report.study.messages import (
    block_reasons,
    curve_text,
    interaction_text,
    interference_text,
    remark_text,
    sensitivity_text,
    trend_text,
)
from unit.analysis.study.builders import curves, factors_of, grid, observed, sensitivities

LEVELS = (1, 2, 4, 8, 16)
FACTORS = factors_of(model=("alexnet", "vit"), cpus=(1, 2), batch_size=(32, 64))


def curve(rate: Callable[[int], float], repeats: int = 3, **noise: object) -> ScalingCurve:
    factors = factors_of(workers=LEVELS)
    return curves(observed(grid(factors), rate, repeats, **noise), factors)[0]  # type: ignore[arg-type]


def table(*rates: float) -> Callable[[int], float]:
    return lambda workers: dict(zip(LEVELS, rates, strict=True))[workers]


@pytest.mark.parametrize(
    ("rates", "text"),
    [
        ((100, 200, 400, 400, 400), "knee at 4: 8 is 0% faster (+0 to +0%, not significant)"),
        ((100, 200, 400, 404, 412), "knee at 4: 16 is 3% faster (+3 to +3%)"),
        (
            (100, 200, 300, 310, 273),
            "knee at 4: 8 is 3% faster (+3 to +3%); 16 is 12% slower than 8 (−12 to −12%)",
        ),
        (
            (100, 141, 200, 283, 400),
            "no knee: 16 is still 41% faster than 8 (+41 to +41%)",
        ),
        ((100, 101, 99, 100, 101), "no knee: all levels differ by at most 2%"),
        ((100, 40, 102, 103, 102), "no gain of more than 5% beyond 1: 8 is 3% faster (+3 to +3%)"),
        ((100, 103, 90, 80, 60), "more than 2 is slower: 16 is 42% slower (−42 to −42%)"),
        ((100, 90, 80, 70, 60), "more than 1 is slower: 16 is 40% slower (−40 to −40%)"),
    ],
)
def test_curves(rates: tuple[float, ...], text: str) -> None:
    assert curve_text(curve(table(*rates))) == text


def test_curve_that_is_not_significant() -> None:
    within_noise = NoKnee("not_significant", 16, 1, Estimate(1.03, 0.98, 1.08))
    text = curve_text(ScalingCurve("workers", {}, (), None, within_noise))
    assert text == "not significant: 1 is 3% faster than 16 (−2 to +8%)"


def test_curve_with_a_gain_that_is_not_significant() -> None:
    unclear = NoKnee("unclear", 1, 16, Estimate(1.07, 0.99, 1.16))
    text = curve_text(ScalingCurve("workers", {}, (), None, unclear))
    assert text == "no significant gain beyond 1: 16 is 7% faster (−1 to +16%, not significant)"


def test_curves_without_repeats_and_with_two_levels() -> None:
    once = curve(lambda workers: min(100 * workers, 400), 1)
    assert curve_text(once) == "knee at 4: 8 is 0% faster (significance unknown)"
    two = factors_of(workers=(1, 2))
    (short,) = curves(observed(grid(two), lambda workers: 100.0 * workers, 3), two)
    assert curve_text(short) == ("no knee with two levels: 2 is 100% faster than 1 (+100 to +100%)")


@pytest.mark.parametrize("seed", range(20))
def test_all_statements_on_a_factor_agree(seed: int) -> None:
    """The ranking, its sentence and the curve agree on whether the factor is significant."""
    random = np.random.default_rng(seed)
    factors = factors_of(workers=LEVELS)
    trials = observed(grid(factors), table(100, 103, 101, 97, 93), 3, noise=0.04, random=random)
    (ranking,) = sensitivities(trials, factors)
    (effect,) = ranking.effects
    (scaling,) = curves(trials, factors)
    *_, significance = tables.ranking(ranking).rows[0]
    is_significant = effect.is_significant
    assert significance == ("significant" if is_significant else "not significant")
    assert ("not significant" in sensitivity_text(ranking)) == (not is_significant)
    assert curve_text(scaling).startswith("not significant: ") == (not is_significant)
    if scaling.no_knee and scaling.no_knee.kind == "slower":
        assert scaling.no_knee.level == effect.highest_level
        assert "not significant" not in curve_text(scaling)


def rate(model: str, cpus: int, batch_size: int) -> float:
    if model == "alexnet":
        return 1000 * 1.28 ** (cpus - 1)
    return 100 * 1.5 ** (batch_size / 32 - 1)


def test_rankings() -> None:
    all_trials, alexnet, vit = sensitivities(observed(grid(FACTORS), rate, 2), FACTORS)
    assert sensitivity_text(all_trials).startswith("All trials: model ")
    assert sensitivity_text(alexnet) == (
        "alexnet: cpus 1.28× (1.28–1.28) from worst (1) to best (2),"
        " batch_size 1.00× (1.00–1.00, not significant)"
    )
    assert sensitivity_text(vit).startswith("vit: batch_size 1.50×")
    (once,) = sensitivities(
        observed([{"cpus": 1}, {"cpus": 2}], lambda cpus: 100.0 * cpus), factors_of(cpus=(1, 2))
    )
    assert sensitivity_text(once) == ("All trials: cpus 2.00× (significance unknown)")
    (same,) = sensitivities(observed([grid(FACTORS)[0]], rate, 3), FACTORS)
    assert sensitivity_text(same) == "All trials: no main effect is estimable"


def test_interactions() -> None:
    size = Estimate(1.9 / 1.1, 1.5, 2.0)
    pair = Interaction("cpus", "workers", (), size, True, 1, 2, 0, 2, ((0, 1.9), (2, 1.1)))
    throughput, share = RESPONSES[THROUGHPUT], RESPONSES["data_wait_share"]
    assert interaction_text(pair, throughput) == (
        "cpus from 1 to 2: 1.90× with workers 0, 1.10× with workers 2"
    )
    points = replace(pair, simple_effects=((0, 0.3), (2, -0.01)))
    assert interaction_text(points, share) == (
        "cpus from 1 to 2: +30 points with workers 0, −1 point with workers 2"
    )
    size_only = replace(pair, simple_effects=())
    assert interaction_text(size_only, throughput) == (
        "cpus from 1 to 2: the effect with workers 0 is 1.73× that with workers 2"
    )
    size_only = replace(size_only, size=Estimate(0.3, 0.2, 0.4))
    assert interaction_text(size_only, share) == (
        "cpus from 1 to 2: the effect with workers 0 is 30 points above that with workers 2"
    )


def test_remarks() -> None:
    assert remark_text(Remark("too_few_trials")).startswith("fewer than two trials succeeded")
    assert remark_text(Remark("unknown_level", ("cpus",), count=1)) == (
        "1 trial excluded: it uses a level of cpus that is not in the design"
    )
    assert remark_text(Remark("unknown_level", ("workers",), count=12)) == (
        "12 trials excluded: they use a level of workers that is not in the design"
    )
    assert remark_text(Remark("too_many_levels", ("seed",), count=1000)) == (
        "seed is not analyzed: 1,000 levels (maximum 100)"
    )
    assert remark_text(Remark("confounded_levels", ("memory",), (1 << 30, 2 << 30, None))) == (
        "memory 1 GiB, 2 GiB and – cannot be compared with the other levels: confounded with other"
        " factors"
    )
    assert remark_text(Remark("interaction_incomplete", ("cpus", "workers"))).startswith(
        "not all combinations of cpus and workers were observed"
    )


def test_blocks() -> None:
    rates = (2310, 2320, 1640, 2300, 2310)
    seen = [BlockSeen(number, rate, trials=8) for number, rate in enumerate(rates, 1)]
    interference = tuple((InterferenceReason("cpu", cores, 2),) for cores in (1.3, 0.9))
    seen += [
        BlockSeen(6, None, True, trials=8),
        BlockSeen(7, None, interference=interference, trials=4),
    ]
    judged = judge_blocks(seen)
    assert block_reasons(judged[1]) == ()
    assert block_reasons(judged[3]) == (
        "the reference trial ran at 71% of its median throughput (2,310 samples/s)",
    )
    assert block_reasons(judged[6]) == (
        "the reference trial failed, but succeeded in other blocks",
    )
    assert block_reasons(judged[7]) == ("other processes used 1.3 of 2 cores in 2 of 4 trials",)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (InterferenceReason("cpu", 1.23, 2.0), "other processes used 1.2 of 2 cores"),
        (
            InterferenceReason("hypervisor", 0.5, 2.0),
            "the hypervisor gave 0.5 cores to other virtual machines",
        ),
        (InterferenceReason("gpu", 0.4), "other processes used the GPU 40% of the time"),
        (InterferenceReason("heat", 0.5), "the GPU was thermally throttled 50% of the time"),
        (InterferenceReason("other", text="others used 2 cores"), "others used 2 cores"),
    ],
)
def test_interference(reason: InterferenceReason, text: str) -> None:
    assert interference_text(reason) == text


def test_trend() -> None:
    drift = trend([BlockSeen(number, 100 * 0.98**number) for number in range(1, 12)])
    assert drift is not None
    assert trend_text(drift).startswith(
        "drift: the reference trial became 18% slower (18% to 18%) from block 1 to block 11"
    )
