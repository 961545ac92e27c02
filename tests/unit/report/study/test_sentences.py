"""What the analysis of a study found, in words."""

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
    Remark,
    ScalingCurve,
)
from stepscope.records.trial import InterferenceReason
from stepscope.report.study.sentences import (
    block_reasons,
    curve_text,
    interaction_text,
    interference_text,
    remark_text,
    sensitivity_text,
    trend_text,
)
from unit.analysis.study.made import curves, factors_of, grid, observed, sensitivities

LEVELS = (1, 2, 4, 8, 16)
FACTORS = factors_of(model=("alexnet", "vit"), cpus=(1, 2), batch_size=(32, 64))


def curve(rate: Callable[[int], float], repeats: int = 3, **noise: object) -> ScalingCurve:
    factors = factors_of(workers=LEVELS)
    return curves(observed(grid(factors), rate, repeats, **noise), factors)[0]  # type: ignore[arg-type]


def table(*rates: float) -> Callable[[int], float]:
    return lambda workers: dict(zip(LEVELS, rates, strict=True))[workers]


@pytest.mark.parametrize(
    ("rates", "said"),
    [
        ((100, 200, 400, 400, 400), "more workers than 4 stop paying: 8 gains nothing (+0 to +0 %"),
        ((100, 200, 400, 404, 412), "more workers than 4 stop paying: 16 gains 3 % (+3 to +3 %)"),
        ((100, 200, 300, 310, 273), "; beyond 8 it falls, by 12 % at 16"),
        ((100, 141, 200, 283, 400), "still gaining 41 % from 8 to 16"),
        ((100, 101, 99, 100, 101), "workers do not matter here: all are within 2 %"),
        ((100, 90, 80, 70, 60), "more than 1 never pays: 16 is slower by 40 %"),
    ],
)
def test_curves(rates: tuple[float, ...], said: str) -> None:
    assert said in curve_text(curve(table(*rates)))


def test_curves_that_cannot_be_told() -> None:
    noisy = curve(table(100, 108, 104, 110, 109), 2, noise=0.3, random=np.random.default_rng(1))
    assert curve_text(noisy).startswith("it cannot be told yet whether more workers pay")
    once = curve(lambda workers: min(100 * workers, 400), 1)
    assert "where it lies is not known" in curve_text(once)
    two = factors_of(workers=(1, 2))
    (short,) = curves(observed(grid(two), lambda workers: 100.0 * workers, 3), two)
    assert curve_text(short) == "two levels show no knee: 2 gains 100 % (+100 to +100 %)"


def test_one_name_is_not_a_plural() -> None:
    factors = factors_of(batch_size=(8, 16, 32))
    trials = observed(grid(factors), lambda batch_size: min(batch_size, 16), 2)
    assert curve_text(curves(trials, factors)[0]).startswith("more batch_size than 16 stops paying")


def rate(model: str, cpus: int, batch_size: int) -> float:
    if model == "alexnet":
        return 1000 * 1.28 ** (cpus - 1)
    return 100 * 1.5 ** (batch_size / 32 - 1)


def test_what_matters() -> None:
    found = sensitivities(observed(grid(FACTORS), rate, 2), FACTORS)
    assert sensitivity_text(found[0]).startswith("for all trials model matters ")
    assert sensitivity_text(found[1]) == (
        "for alexnet cpus matter 1.28× (1.28–1.28),"
        " batch_size 1.00× (1.00–1.00, not told from no effect)"
    )
    assert sensitivity_text(found[2]).startswith("for vit batch_size matters 1.50×")
    (once,) = sensitivities(
        observed([{"cpus": 1}, {"cpus": 2}], lambda cpus: 100.0 * cpus), factors_of(cpus=(1, 2))
    )
    assert sensitivity_text(once) == (
        "for all trials cpus matter 2.00× (where it lies is not known, not told from no effect)"
    )
    (same,) = sensitivities(observed([grid(FACTORS)[0]], rate, 3), FACTORS)
    assert sensitivity_text(same) == "for all trials there is no factor whose effect could be told"


def test_interactions() -> None:
    size = Estimate(1.9 / 1.1, 1.5, 2.0)
    pair = Interaction("cpus", "workers", (), size, True, 1, 2, 0, 2, ((0, 1.9), (2, 1.1)))
    throughput, share = RESPONSES[THROUGHPUT], RESPONSES["data_wait_share"]
    assert interaction_text(pair, throughput) == (
        "from 1 to 2 cpus: 1.90× with workers 0, 1.10× with workers 2"
    )
    points = replace(pair, changes=((0, 0.3), (2, -0.1)))
    assert interaction_text(points, share) == (
        "from 1 to 2 cpus: +30 points with workers 0, −10 points with workers 2"
    )
    untold = replace(pair, changes=())
    assert interaction_text(untold, throughput) == (
        "from 1 to 2 cpus: 1.73× as much with workers 0 as with workers 2"
    )
    untold = replace(untold, size=Estimate(0.3, 0.2, 0.4))
    assert interaction_text(untold, share) == (
        "from 1 to 2 cpus: 30 points more with workers 0 than with workers 2"
    )


def test_remarks() -> None:
    assert remark_text(Remark("too_few_trials")).startswith("fewer than two trials trained")
    assert remark_text(Remark("unknown_level", ("cpus",), count=1)) == (
        "1 trials are left out: they have a level of cpus that the design does not name"
    )
    assert remark_text(Remark("confounded_levels", ("memory",), (1 << 30, 2 << 30, None))) == (
        "memory 1 GiB, 2 GiB and – cannot be compared with its other levels: more changed with it"
    )
    assert remark_text(Remark("pair_incomplete", ("cpus", "workers"))).startswith(
        "not all combinations of cpus and workers were observed"
    )


def test_blocks() -> None:
    rates = (2310, 2320, 1640, 2300, 2310)
    seen = [BlockSeen(number, rate, trials=8) for number, rate in enumerate(rates, 1)]
    noise = tuple((InterferenceReason("cpu", cores, 2),) for cores in (1.3, 0.9))
    seen += [BlockSeen(6, None, True, trials=8), BlockSeen(7, None, noise=noise, trials=4)]
    judged = judge_blocks(seen)
    assert block_reasons(judged[1]) == ()
    assert block_reasons(judged[3]) == (
        "its sentinel ran at 71 % of the usual rate (others: 2,310 samples/s)",
    )
    assert block_reasons(judged[6]) == ("its sentinel failed, which others did not",)
    assert block_reasons(judged[7]) == ("others used 1.3 of 2 cores, during 2 of its 4 trials",)


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        (InterferenceReason("cpu", 1.23, 2.0), "others used 1.2 of 2 cores"),
        (InterferenceReason("hypervisor", 0.5, 2.0), "the hypervisor gave 0.5 cores to others"),
        (InterferenceReason("gpu", 0.4), "other processes used its GPU 40% of the time"),
        (InterferenceReason("heat", 0.5), "heat held its GPU's clocks down 50% of the time"),
        (InterferenceReason("other", text="others used 2 cores"), "others used 2 cores"),
    ],
)
def test_interference(reason: InterferenceReason, text: str) -> None:
    assert interference_text(reason) == text


def test_a_trend() -> None:
    found = trend([BlockSeen(number, 100 * 0.98**number) for number in range(1, 12)])
    assert found is not None
    assert trend_text(found).startswith(
        "the sentinel became slower over the study, by 18 % (18 % to 18 %) from block 1 to 11"
    )
