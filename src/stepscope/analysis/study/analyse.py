"""All that a study teaches, from its observations."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.analysis.study.configurations import as_good, configurations
from stepscope.analysis.study.effects import effects_of
from stepscope.analysis.study.fitted import Throughputs, fitted
from stepscope.analysis.study.pareto import fronts
from stepscope.analysis.study.records import (
    RESPONSES,
    THROUGHPUT,
    Factor,
    Observation,
    StudyAnalysis,
)
from stepscope.analysis.study.scaling import drawn
from stepscope.analysis.study.sensitivity import ranked
from stepscope.analysis.study.table import Table, table_of
from stepscope.analysis.study.words import Text, plain
from stepscope.analysis.throughput import Spread


def analyse(
    observations: Sequence[Observation],
    factors: Sequence[Factor],
    known: Spread | None = None,
    text: Text = plain,
) -> StudyAnalysis:
    """Everything, as far as these observations tell it; whatever they are, it does not fail.

    `known` is how much the throughput of trials of the same differs on this machine, as it was
    known before the study.
    """
    table = table_of(observations, factors)
    spreads = {THROUGHPUT: known} if known else {}
    fits = fitted(table, tuple(RESPONSES.values()), spreads)
    rates = fits.get(THROUGHPUT)
    trials = Throughputs(table, known, rates)
    found = configurations(observations, rates, known)
    return StudyAnalysis(
        factors=_varied(table),
        configurations=found,
        effects=tuple(effects_of(fit, text) for fit in fits.values()),
        sensitivity=ranked(trials, text=text),
        curves=drawn(trials, text=text),
        fronts=fronts(found),
        as_good=as_good(found, rates.noise if rates else None),
        remarks=_remarks(table),
    )


def _varied(table: Table) -> tuple[Factor, ...]:
    """With all levels of the design, where trials have more than one of them."""
    columns = range(len(table.factors))
    return tuple(
        table.factors[column] for column in columns if len(set(table.codes[:, column].tolist())) > 1
    )


def _remarks(table: Table) -> tuple[str, ...]:
    if len(table.observations) < 2:
        return (*table.remarks, "fewer than two trials trained: there is nothing to compare")
    return table.remarks
