"""Trials that are done, remaining and rerun: the counts of `study show` and `study plan` agree."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.records import Outcome
from stepscope.records.trial import InterferenceReason
from stepscope.report.study.export import study_dict
from stepscope.report.study.plan import headline, plan_dict, plan_view
from stepscope.report.study.read import view_of
from stepscope.studies.folder import StudyFacts, StudyPaths, write_study_facts
from stepscope.studies.results import Result, Results
from stepscope.studies.scan import StudyScan
from stepscope.studies.study import ScannedStudy, Study
from synthetic_studies import design_of, result_of

INTERFERENCE = (InterferenceReason("cpu", 1.5, 2.0),)


@pytest.fixture
def study(tmp_path: Path) -> Study:
    """A study of 12 trials: six configurations with two repeats."""
    paths = StudyPaths(tmp_path)
    write_study_facts(paths, StudyFacts(name="workers", machine="2 × CPU"))
    return Study(design_of("workers", {"workers": (0, 1, 2, 3, 4, 8)}, repeats=2), paths, {})


def scanned(study: Study, results: list[Result]) -> ScannedStudy:
    known = Results(study.design.reruns)
    for result in results:
        known.add(result)
    return ScannedStudy(study, StudyScan([], [], set(), [], []), known)


def results_of(study: Study, count: int, interference: int = 0) -> list[Result]:
    """The first trials of the study, the last ones with interference in a block of their own."""
    rng = random.Random(1)
    results = []
    for number, (spec, repeat) in enumerate(study.grid.order[:count]):
        result = replace(result_of(spec.settings, repeat, 1, rng), seconds=90.0)
        if number >= count - interference:
            result = replace(result, block=2, interference=INTERFERENCE)
        results.append(result)
    return results


def counts(scan: ScannedStudy) -> tuple[int, int, int]:
    """Done, remaining and reruns, which must be the same everywhere."""
    shown, planned = study_dict(view_of(scan))["trials"], plan_dict(plan_view(scan))
    keys = ("done", "remaining", "reruns")
    assert [shown[key] for key in keys] == [planned[key] for key in keys]
    done, remaining, reruns = (shown[key] for key in keys)
    return done, remaining, reruns


def test_reruns_are_not_remaining_trials(study: Study) -> None:
    scan = scanned(study, results_of(study, 8, interference=2))
    assert counts(scan) == (8, 4, 2)
    view = view_of(scan)
    assert (
        view.headline
        == "8 of 12 trials done, 4 remaining (about 6 min), 2 reruns pending (about 3 min)"
    )
    assert view.state[0] == "not finished" and view.with_interference == 2
    assert study_dict(view)["remaining_seconds"] == pytest.approx(6 * 90)
    assert headline(plan_view(scan)).startswith(
        "workers: 8 of 12 trials done, 4 remaining, 2 reruns; about "
    )


def test_all_trials_with_interference_are_rerun(study: Study) -> None:
    scan = scanned(study, results_of(study, 8, interference=8))
    assert counts(scan) == (8, 4, 8)


def test_only_reruns_are_left(study: Study) -> None:
    scan = scanned(study, results_of(study, 12, interference=1))
    assert counts(scan) == (12, 0, 1)
    assert view_of(scan).headline == "12 of 12 trials done, 1 rerun pending (about 2 min)"
    assert view_of(scan).state[0] == "not finished"


def test_no_trial_done(study: Study) -> None:
    scan = scanned(study, [])
    assert counts(scan) == (0, 12, 0)
    assert view_of(scan).headline.startswith("0 of 12 trials done, 12 remaining (about ")
    assert headline(plan_view(scan)).startswith("workers: 12 trials to run; about ")


def test_all_trials_done(study: Study) -> None:
    scan = scanned(study, results_of(study, 12))
    assert counts(scan) == (12, 0, 0)
    assert view_of(scan).headline == "12 trials"
    assert headline(plan_view(scan)) == "workers: all 12 trials done"


def test_running_trials_are_remaining(study: Study) -> None:
    scan = scanned(study, results_of(study, 8))
    spec, repeat = study.grid.order[8]
    scan.results.claimed_by_others = {(spec.key, repeat)}
    assert counts(scan) == (8, 4, 0)


def test_trials_of_skipped_configurations_are_not_counted(study: Study) -> None:
    """Configurations with more workers are skipped after an out-of-memory outcome."""
    (first,) = results_of(study, 1)
    scan = scanned(study, [replace(first, outcome=Outcome.HOST_OOM, values={})])
    done, remaining, reruns = counts(scan)
    skipped = len(view_of(scan).skipped)
    assert (done, reruns) == (1, 0)
    assert skipped and done + remaining == 12 - 2 * skipped
