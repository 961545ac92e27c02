"""The trials of a study that are still to run."""

from __future__ import annotations

from stepscope.studies.study import ScannedStudy
from stepscope.studies.trial_spec import TrialSpec


def pending_trials(scanned: ScannedStudy) -> tuple[list[TrialSpec], list[TrialSpec]]:
    """Return the specs of the remaining trials, which have no result yet, and of the reruns.

    A rerun has a result that may be replaced, for example because of interference. Trials that are
    running count as pending.
    """
    grid, results = scanned.study.grid, scanned.results
    pending = {(trial.spec.key, trial.repeat) for trial in grid.next(results)}
    pending |= results.claimed_by_others
    remaining: list[TrialSpec] = []
    reruns: list[TrialSpec] = []
    for spec, repeat in grid.order:
        if (spec.key, repeat) in pending:
            has_result = results.best_known(spec.key, repeat) is not None
            (reruns if has_result else remaining).append(spec)
    return remaining, reruns
