"""All that a study teaches, from its observations."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.study.configurations import as_good, configurations, fronts
from stepscope.analysis.study.effects import effects_of, sensitivities
from stepscope.analysis.study.fitted import Throughputs, fitted
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


def analyse(
    observations: Sequence[Observation],
    factors: Sequence[Factor],
    known: ProcessNoise | None = None,
) -> StudyAnalysis:
    """Everything, as far as these observations tell it; whatever they are, it does not fail.

    `known` is how much the throughput of trials of the same differs on this machine, as it was
    known before the study.
    """
    table = table_of(observations, factors)
    fits = fitted(table, RESPONSES.values(), known)
    rates = fits.get(THROUGHPUT)
    trials = Throughputs(table, known, rates)
    few = () if len(table.observations) > 1 else (Remark("too_few_trials"),)
    found = configurations(observations, rates, known)
    return StudyAnalysis(
        # With all levels of the design, where trials have more than one of them.
        factors=tuple(
            factor
            for column, factor in enumerate(table.factors)
            if len(set(table.codes[:, column].tolist())) > 1
        ),
        configurations=found,
        effects=tuple(effects_of(fit) for fit in fits.values()),
        sensitivity=sensitivities(trials),
        curves=curves(trials),
        fronts=fronts(found),
        as_good=as_good(found, rates.noise if rates else None),
        remarks=table.remarks + few,
    )
