"""Throughput over CPUs, workers, ranks …, and where more of them stop paying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from stepscope.analysis.study.effects import level_means
from stepscope.analysis.study.fitted import Fitted, Margin, Throughputs, throughputs
from stepscope.analysis.study.interactions import interactions
from stepscope.analysis.study.noise import estimate, raised
from stepscope.analysis.study.records import (
    Curve,
    Estimate,
    Factor,
    Interaction,
    Knee,
    Level,
    Noise,
    Observation,
)
from stepscope.analysis.study.sensitivity import BY
from stepscope.analysis.study.words import (
    Text,
    gained,
    gained_between,
    is_many,
    percent,
    plain,
)
from stepscope.analysis.throughput import Spread

WORTH = 0.05
"""A gain that pays. Less is what trials of the same differ by on a quiet machine, and no reason to
take up more of it."""
SURELY_LITTLE = 0.10
"""What the gain beyond a knee must surely be below, for the knee to be sure."""


def curves(
    observations: Sequence[Observation],
    factors: Sequence[Factor],
    known: Spread | None = None,
    by: Sequence[str] = BY,
    text: Text = plain,
) -> tuple[Curve, ...]:
    """Of every factor with an order: over all trials, for each model (or machine), and for each
    level of the factor that it depends on most."""
    return drawn(throughputs(observations, factors, known), by, text)


def drawn(trials: Throughputs, by: Sequence[str] = BY, text: Text = plain) -> tuple[Curve, ...]:
    if trials.all is None:
        return ()
    grouping = trials.varied(by)
    dependent = [each for each in interactions(trials.all, text) if each.is_told]
    told = []
    for factor in trials.all.cells.factors:
        if not factor.is_numeric:
            continue
        told.append(_curve(trials.all, factor.name, {}, text))
        for other in (grouping, _depends_on(factor, dependent, grouping, trials.all)):
            for level in other.levels if other and other.name != factor.name else ():
                fit = trials.of(other.name, level) if other else None
                if fit and other:
                    told.append(_curve(fit, factor.name, {other.name: level}, text))
    return tuple(each for each in told if each is not None)


def _depends_on(
    factor: Factor, dependent: Sequence[Interaction], grouping: Factor | None, fit: Fitted
) -> Factor | None:
    """The factor that changes its effect most, beside the one that trials are grouped by."""
    names = {each.name: each for each in fit.cells.factors if each != grouping}
    for pair in dependent:
        if factor.name in (pair.first, pair.second):
            other = pair.second if factor.name == pair.first else pair.first
            if other in names:
                return names[other]
    return None


def _curve(fit: Fitted, name: str, group: Mapping[str, Level], text: Text) -> Curve | None:
    columns = [column for column, each in enumerate(fit.cells.factors) if each.name == name]
    margin = fit.margin(columns[0]) if columns else None
    if margin is None:
        return None
    margin = _ascending(margin)
    points = level_means(margin, fit.noise, fit.response.scale)
    judge = _Judge(margin, fit.noise, text)
    if len(points) < 3:
        return Curve(name, group, points, None, judge.of_two())
    found = judge.knee()
    if isinstance(found, Knee):
        return Curve(name, group, points, found)
    return Curve(name, group, points, None, found)


def _ascending(margin: Margin) -> Margin:
    order = sorted(range(len(margin.means)), key=lambda at: margin.factor.levels[at])  # type: ignore[arg-type,return-value]
    return replace(
        margin,
        factor=Factor(margin.factor.name, tuple(margin.factor.levels[at] for at in order)),
        means=margin.means[order],
        covariance=margin.covariance[np.ix_(order, order)],
        trials=tuple(margin.trials[at] for at in order),
    )


class _Judge:
    """Finds the knee of one curve, and says so."""

    def __init__(self, margin: Margin, noise: Noise, text: Text) -> None:
        self._margin, self._noise, self._text = margin, noise, text
        self._name, self._last = margin.factor.name, len(margin.means) - 1

    def knee(self) -> Knee | str:
        """Or why there is none."""
        at = next(at for at in range(self._last + 1) if self._is_enough(at))
        if at == self._last:
            return f"still {self._gaining(at - 1, at)}"
        if at == 0:
            return self._why_not_at_the_first()
        gain = self._best_beyond(at)
        return Knee(
            float(self._margin.factor.levels[at]),  # type: ignore[arg-type]
            gain,
            self._is_sure(at, gain),
            f"{self._stops(at)}: {self._level(self._best(at))} {gained(gain.value)}"
            f" ({gained_between(gain)}){self._falls()}",
        )

    def of_two(self) -> str:
        """What two levels say, which is no shape yet."""
        gain = self._over(1, 0)
        return (
            f"two levels show no knee: {self._level(1)} {gained(gain.value)}"
            f" ({gained_between(gain)})"
        )

    def _is_enough(self, at: int) -> bool:
        """Whether no higher level surely gains what pays.

        A gain that chance explains is none: of some levels on a plateau one is always highest.
        """
        return not any(self._pays(at, beyond) for beyond in range(at + 1, self._last + 1))

    def _pays(self, at: int, beyond: int) -> bool:
        gain = self._over(beyond, at, looked=self._last - at)
        return gain.value > 1 + WORTH and (gain.low > 1 or self._noise.source == "none")

    def _is_sure(self, at: int, gain: Estimate) -> bool:
        before = self._over(at, at - 1, looked=self._last)  # it was picked among them
        return before.value > 1 + WORTH and before.low > 1 and gain.high < 1 + SURELY_LITTLE

    def _why_not_at_the_first(self) -> str:
        means = self._margin.means
        spread = raised(float(means.max() - means.min())) - 1
        best = self._best_beyond(0)
        if best.value > 1 + WORTH:
            return (
                f"it cannot be told yet whether {self._more_pays()}:"
                f" {self._level(self._best(0))} {gained(best.value)} ({gained_between(best)})"
            )
        if spread <= WORTH:
            verb = "do" if is_many(self._name) else "does"
            return f"{self._name} {verb} not matter here: all are within {percent(spread)}"
        worst = int(np.argmin(means))
        loss = 1 - raised(float(means[worst] - means[0]))
        return (
            f"more than {self._level(0)} never pays: {self._level(worst)} is slower by"
            f" {percent(loss)}"
        )

    def _gaining(self, at: int, beyond: int) -> str:
        change = raised(float(self._margin.means[beyond] - self._margin.means[at])) - 1
        return f"gaining {percent(change)} from {self._level(at)} to {self._level(beyond)}"

    def _falls(self) -> str:
        """What is said of a peak: too much of something can be worse than enough."""
        means = self._margin.means
        peak = int(np.argmax(means))
        worst = peak + int(np.argmin(means[peak:]))
        fall = 1 - raised(float(means[worst] - means[peak]))
        told = self._over(peak, worst, looked=max(1, self._last - peak))
        if fall <= WORTH or (told.low <= 1 and self._noise.source != "none"):
            return ""
        return f"; beyond {self._level(peak)} it falls, by {percent(fall)} at {self._level(worst)}"

    def _best(self, at: int) -> int:
        return at + 1 + int(np.argmax(self._margin.means[at + 1 :]))

    def _best_beyond(self, at: int) -> Estimate:
        return self._over(self._best(at), at, looked=self._last - at)

    def _over(self, one: int, other: int, looked: int = 1) -> Estimate:
        value = float(self._margin.means[one] - self._margin.means[other])
        return estimate(value, self._margin.error(one, other), self._noise, "ratio", looked)

    def _stops(self, at: int) -> str:
        verb = "stop" if is_many(self._name) else "stops"
        return f"more {self._name} than {self._level(at)} {verb} paying"

    def _more_pays(self) -> str:
        return f"more {self._name} {'pay' if is_many(self._name) else 'pays'}"

    def _level(self, at: int) -> str:
        return self._text(self._name, self._margin.factor.levels[at])
