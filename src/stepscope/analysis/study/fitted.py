"""A response of trials and the model fitted to it: what effects, rankings and curves share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from stepscope.analysis.study.model import Model
from stepscope.analysis.study.noise import Scatter, noise_of
from stepscope.analysis.study.records import (
    RESPONSES,
    THROUGHPUT,
    Factor,
    Level,
    Noise,
    Remark,
    Response,
)
from stepscope.analysis.study.table import (
    Cells,
    Floats,
    ObservationTable,
    cells_of,
    level_key,
)
from stepscope.analysis.trial.throughput import LEARNT_FROM
from stepscope.records.trial import ProcessNoise


@dataclass(frozen=True)
class Margin:
    """What trials with each level of a factor have on average, the others being equally mixed."""

    factor: Factor
    """With the levels of which that is told."""
    means: Floats
    """Logarithms for ratios."""
    covariance: Floats
    """In units of the variance of a trial."""
    trials: tuple[int, ...]
    not_estimable: tuple[Level, ...] = ()

    def error(self, one: int, other: int) -> float:
        """Of the difference of two, in units of the noise."""
        own = self.covariance[one, one] + self.covariance[other, other]
        return float(np.sqrt(max(0.0, own - 2 * self.covariance[one, other])))


@dataclass(frozen=True)
class Fitted:
    """A response of trials, and what a model says of it."""

    response: Response
    cells: Cells
    model: Model
    means: Floats
    """Of configurations; logarithms for ratios."""
    moments: Floats
    repeats: Scatter
    noise: Noise
    explained: float | None
    remarks: tuple[Remark, ...] = ()

    @property
    def trials(self) -> int:
        return int(self.cells.repeats.sum())

    def margin(self, column: int) -> Margin | None:
        """By the model with most terms that tells all its levels; None if none tells two.

        Where other factors changed together, the mean over their grid is not told. Then it is
        over what was observed of them.
        """
        model, rows = self.model, self.model.rows(column)
        factor, trials = self.cells.factors[column], self.cells.trials(column)
        best: Margin | None = None
        for fit, centre in (
            (model.full, model.centre()),
            (model.kept, model.centre()),
            (model.kept, model.centre(without=column)),
        ):
            told = np.flatnonzero(fit.estimable(rows + centre))
            if len(told) > max(1, len(best.means) if best else 0):
                chosen = (rows + centre)[told]
                best = Margin(
                    Factor(factor.name, tuple(factor.levels[at] for at in told)),
                    chosen @ fit.solved(self.moments),
                    fit.covariance(chosen),
                    tuple(int(trials[at]) for at in told),
                    tuple(level for at, level in enumerate(factor.levels) if at not in told),
                )
            if len(told) == len(rows):
                break
        return best


def fitted(
    table: ObservationTable,
    responses: Iterable[Response],
    known: ProcessNoise | None = None,
    usual: Noise | None = None,
) -> dict[str, Fitted]:
    """Those of which there are two trials, by their keys.

    Responses that the same trials have share a model: to solve it is most of the work. `known` is
    the noise of throughput as it was known before, `usual` that of a larger set of trials, for
    where there are too few repeats among these.
    """
    models: dict[bytes, Model] = {}
    fits = {}
    for response in responses:
        rows, values, remarks = table.rows_with(response)
        if len(rows) < 2:
            continue
        at = rows.tobytes()
        if at not in models:
            models[at] = Model(cells_of(table, rows))
        before = known if response.key == THROUGHPUT else None
        fit = _fit(response, models[at], values, before, usual)
        fits[response.key] = replace(fit, remarks=table.remarks + remarks + fit.cells.remarks)
    return fits


def _fit(
    response: Response,
    model: Model,
    values: Floats,
    known: ProcessNoise | None,
    usual: Noise | None,
) -> Fitted:
    cells = model.cells
    means = cells.mean(values)
    within = float(((values - means[cells.which]) ** 2).sum())
    repeats = Scatter(within, float(len(values) - len(means)))
    moments = model.moments(means)
    leftovers = []
    for fit in (model.full, model.kept, model.additive):
        rest = means - model.predicted(fit.solved(moments))
        squares = float((rest**2 * cells.repeats).sum())
        leftovers.append(Scatter(squares, float(len(means) - fit.rank)))
    unit = 1.0 if response.scale == "ratio" else float(np.abs(values).max())
    noise = noise_of(repeats, leftovers, known, len(values), unit)
    if usual and repeats.dof < LEARNT_FROM:
        noise = usual
    # Explained by the model with most terms that leaves something free: any other explains all.
    total = float(((values - values.mean()) ** 2).sum())
    free = next((each for each in leftovers if repeats.dof + each.dof > 0), None)
    explained = None
    if free and total > 0:
        explained = min(1.0, max(0.0, 1 - (repeats.squares + free.squares) / total))
    return Fitted(response, cells, model, means, moments, repeats, noise, explained)


class Throughputs:
    """The model of throughput, for all trials and for those with a level; each fitted once."""

    def __init__(
        self, table: ObservationTable, known: ProcessNoise | None, whole: Fitted | None
    ) -> None:
        self.all = whole
        self._table = table
        self._known = known
        self._fits: dict[tuple[str, tuple[bool, Level]], Fitted | None] = {}

    def of(self, factor: str, level: Level) -> Fitted | None:
        """Those with this level; None if there are fewer than two."""
        key = factor, level_key(level)
        if key not in self._fits:
            # What all repeats tell, for groups with few of their own.
            usual = self.all.noise if self.all and self.all.noise.source == "repeats" else None
            table = self._table.only(factor, level)
            fits = fitted(table, [RESPONSES[THROUGHPUT]], self._known, usual)
            self._fits[key] = fits.get(THROUGHPUT)
        return self._fits[key]

    @property
    def grouping(self) -> Factor | None:
        """What trials are grouped by: the model, else the machine, if they differ in it."""
        factors = {each.name: each for each in self.all.cells.factors} if self.all else {}
        return factors.get("model") or factors.get("machine")
