"""The analysis of a study from its observations."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.study.configurations import configurations, equivalent, fronts
from stepscope.analysis.study.effects import effects_of, sensitivities
from stepscope.analysis.study.fitted import ThroughputFits, fitted
from stepscope.analysis.study.records import (
    RESPONSES,
    THROUGHPUT,
    Factor,
    Observation,
    Remark,
    StudyAnalysis,
)
from stepscope.analysis.study.scaling import curves
from stepscope.analysis.study.table import table_of
from stepscope.records.trial import ProcessNoise


def analyze(
    observations: Sequence[Observation],
    factors: Sequence[Factor],
    prior: ProcessNoise | None = None,
) -> StudyAnalysis:
    """Analyze observations; what they do not support is left out, and no input is an error.

    `prior` is the noise of throughput on this machine, as it was known before the study.
    """
    table = table_of(observations, factors)
    fits = fitted(table, RESPONSES.values(), prior)
    fit = fits.get(THROUGHPUT)
    throughput_fits = ThroughputFits(table, prior, fit)
    too_few = () if len(table.observations) > 1 else (Remark("too_few_trials"),)
    means = configurations(observations, fit, prior)
    return StudyAnalysis(
        # With all levels of the design, including those without a successful trial.
        factors=tuple(
            factor
            for column, factor in enumerate(table.factors)
            if len(set(table.codes[:, column].tolist())) > 1
        ),
        configurations=means,
        effects=tuple(effects_of(each) for each in fits.values()),
        sensitivity=sensitivities(throughput_fits),
        curves=curves(throughput_fits),
        fronts=fronts(means),
        equivalent=equivalent(means, fit.noise if fit else None),
        remarks=table.remarks + too_few,
    )
