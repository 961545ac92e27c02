"""Models fitted to responses, shared by effects, rankings and scaling curves."""

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
from stepscope.analysis.trial.throughput import MIN_NOISE_DOF
from stepscope.records.trial import ProcessNoise


@dataclass(frozen=True)
class Margin:
    """Marginal means of the levels of a factor."""

    factor: Factor  # with its estimable levels
    means: Floats  # logarithms for ratios
    covariance: Floats  # in units of the variance of a trial
    trials: tuple[int, ...]
    not_estimable: tuple[Level, ...] = ()

    def error(self, one: int, other: int) -> float:
        """Return the standard error of the difference of two means, in units of the noise."""
        own = self.covariance[one, one] + self.covariance[other, other]
        return float(np.sqrt(max(0.0, own - 2 * self.covariance[one, other])))


@dataclass(frozen=True)
class Fitted:
    """A model fitted to one response."""

    response: Response
    cells: Cells
    model: Model
    means: Floats  # of configurations; logarithms for ratios
    moments: Floats
    repeats: Scatter
    noise: Noise
    explained_variance_share: float | None
    remarks: tuple[Remark, ...] = ()

    @property
    def trials(self) -> int:
        return int(self.cells.repeats.sum())

    def margin(self, column: int) -> Margin | None:
        """Return the marginal means of a factor, or None if fewer than two are estimable.

        They come from the model with the most terms in which most levels are estimable. Where
        other factors are confounded, the mean over their grid is not estimable: it is then the
        mean over their observed combinations.
        """
        model, rows = self.model, self.model.rows(column)
        factor, trials = self.cells.factors[column], self.cells.trials(column)
        best: Margin | None = None
        for fit, center in (
            (model.full, model.center()),
            (model.reduced, model.center()),
            (model.reduced, model.center(without=column)),
        ):
            estimable = np.flatnonzero(fit.estimable(rows + center))
            if len(estimable) > max(1, len(best.means) if best else 0):
                contrasts = (rows + center)[estimable]
                best = Margin(
                    Factor(factor.name, tuple(factor.levels[at] for at in estimable)),
                    contrasts @ fit.coefficients(self.moments),
                    fit.covariance(contrasts),
                    tuple(int(trials[at]) for at in estimable),
                    tuple(level for at, level in enumerate(factor.levels) if at not in estimable),
                )
            if len(estimable) == len(rows):
                break
        return best


def fitted(
    table: ObservationTable,
    responses: Iterable[Response],
    prior: ProcessNoise | None = None,
    pooled: Noise | None = None,
) -> dict[str, Fitted]:
    """Return the fit of every response that at least two trials have, by its key.

    Responses of the same trials share a model, because solving it is most of the work. `prior` is
    the noise of throughput as it was known before the study; `pooled` is the noise of a larger set
    of trials, which is used if these have too few repeats.
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
        own_prior = prior if response.key == THROUGHPUT else None
        fit = _fit(response, models[at], values, own_prior, pooled)
        fits[response.key] = replace(fit, remarks=table.remarks + remarks + fit.cells.remarks)
    return fits


def _fit(
    response: Response,
    model: Model,
    values: Floats,
    prior: ProcessNoise | None,
    pooled: Noise | None,
) -> Fitted:
    cells = model.cells
    means = cells.mean(values)
    within = float(((values - means[cells.cell_of_trial]) ** 2).sum())
    repeats = Scatter(within, float(len(values) - len(means)))
    moments = model.moments(means)
    residuals = []
    for fit in (model.full, model.reduced, model.additive):
        deviations = means - model.predicted(fit.coefficients(moments))
        squares = float((deviations**2 * cells.repeats).sum())
        residuals.append(Scatter(squares, float(len(means) - fit.rank)))
    unit = 1.0 if response.scale == "ratio" else float(np.abs(values).max())
    noise = noise_of(repeats, residuals, prior, len(values), unit)
    if pooled and repeats.dof < MIN_NOISE_DOF:
        noise = pooled
    # R² of the model with the most terms that is not saturated: a saturated one explains all.
    total = float(((values - values.mean()) ** 2).sum())
    unsaturated = next((each for each in residuals if repeats.dof + each.dof > 0), None)
    r_squared = None
    if unsaturated and total > 0:
        r_squared = min(1.0, max(0.0, 1 - (repeats.squares + unsaturated.squares) / total))
    return Fitted(response, cells, model, means, moments, repeats, noise, r_squared)


class ThroughputFits:
    """Fits of throughput: for all trials, and for the trials with a given level (cached)."""

    def __init__(
        self, table: ObservationTable, prior: ProcessNoise | None, fit: Fitted | None
    ) -> None:
        self.all = fit
        self._table = table
        self._prior = prior
        self._fits: dict[tuple[str, tuple[bool, Level]], Fitted | None] = {}

    def of(self, factor: str, level: Level) -> Fitted | None:
        """Return the fit of the trials with this level, or None if there are fewer than two."""
        key = factor, level_key(level)
        if key not in self._fits:
            # Groups with few repeats use the noise of the whole study.
            pooled = self.all.noise if self.all and self.all.noise.source == "repeats" else None
            table = self._table.subset(factor, level)
            fits = fitted(table, [RESPONSES[THROUGHPUT]], self._prior, pooled)
            self._fits[key] = fits.get(THROUGHPUT)
        return self._fits[key]

    @property
    def grouping(self) -> Factor | None:
        """The factor to group trials by: the model, or else the machine, if it varies."""
        factors = {each.name: each for each in self.all.cells.factors} if self.all else {}
        return factors.get("model") or factors.get("machine")
