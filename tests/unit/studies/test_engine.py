"""The decisions of the engine, with a launcher that only writes the results of trials."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import StepscopeError, TrialError, WorkloadError
from stepscope.records import Outcome
from stepscope.records.codec import to_json
from stepscope.studies.design.records import Budget, Design
from stepscope.studies.engine import Engine, SilentListener
from stepscope.studies.folder import StudyPaths
from stepscope.studies.launchers.contract import FinishedTrial, Job, Show
from stepscope.studies.planner import GridPlanner
from stepscope.studies.results import Results
from stepscope.studies.trial_spec import TrialSpec, make_spec

Outcomes = Callable[[Job], tuple[Outcome, str] | StepscopeError]
ALL_OK: Outcomes = lambda job: (Outcome.OK, "")  # noqa: E731
SECONDS = 2.0


class FakeLauncher:
    """A launcher of trials that seem to take two seconds, with the outcomes of a test."""

    machines: Mapping[str, int] = {"": 1}

    def __init__(self, outcomes: Outcomes) -> None:
        self._outcomes = outcomes
        self._jobs: list[Job] = []
        self.ran: list[tuple[str, int]] = []
        """Role and batch size."""

    def __enter__(self) -> FakeLauncher:
        return self

    def __exit__(self, *error: object) -> None: ...

    def start(self, job: Job) -> None:
        self._jobs.append(job)

    def wait(self, show: Show) -> list[FinishedTrial]:
        job = self._jobs.pop()
        assert job.facts.study is not None
        self.ran.append((job.facts.study.role, job.workload.batch_size))
        outcome = self._outcomes(job)
        if isinstance(outcome, StepscopeError):
            return [FinishedTrial(job, outcome)]
        _write(job, *outcome)
        return [FinishedTrial(job)]


def _write(job: Job, outcome: Outcome, reason: str) -> None:
    job.folder.mkdir(parents=True)
    (job.folder / "events").mkdir()
    facts = {
        "format": 1,
        "clock": {"monotonic_ns": 0, "wall_ns": time.time_ns()},
        "monitor": {},
        "exit_status": {
            "outcome": outcome.value,
            "reason": reason,
            "evidence": {"message": reason},
            "monotonic_ns": 1,
        },
        "environment": {"cpu": {"logical": 2, "allowed": 2}},
        "workload": to_json(job.workload),
        "limits": {},
        "trial": {**to_json(job.facts), "started_ns": 0, "cleaned_ns": int(SECONDS * 1e9)},
    }
    (job.folder / "run.json").write_text(json.dumps(facts))


class Listener(SilentListener):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def notify(self, text: str) -> None:
        self.messages.append(text)


class EngineRun:
    """An engine with its launcher, listener and results."""

    def __init__(
        self,
        folder: Path,
        outcomes: Outcomes,
        points: int = 4,
        results: Results | None = None,
        **design: Any,
    ) -> None:
        specs = [make_spec({"model": "cnn", "batch_size": n}) for n in range(1, points + 1)]
        reference = design.pop("reference", None)
        plan = Design("fake", {"model": "cnn"}, (), **{"block": 2, **design})
        self.paths = StudyPaths(folder)
        folder.mkdir(exist_ok=True)
        self.launcher, self.listener = FakeLauncher(outcomes), Listener()
        self.results = results or Results(plan.reruns)
        self.engine = Engine(
            self.paths,
            GridPlanner(plan, specs),
            self.launcher,
            self.results,
            self.listener,
            plan,
            reference,
        )

    def run(self) -> str:
        return self.engine.run()

    @property
    def references(self) -> int:
        return sum(role == "reference" for role, _ in self.launcher.ran)


@pytest.fixture
def reference() -> TrialSpec:
    return make_spec({"model": "cnn", "batch_size": 99})


def test_every_block_starts_with_the_reference_trial(tmp_path: Path, reference: TrialSpec) -> None:
    ran = EngineRun(tmp_path / "s", ALL_OK, points=5, reference=reference)
    assert ran.run() == "done"
    roles = [role[0] for role, _ in ran.launcher.ran]
    assert "".join(roles) == "rttrttrt"
    assert [r.block for r in ran.results.results] == [1, 1, 1, 2, 2, 2, 3, 3]


def test_a_time_budget_includes_earlier_runs(tmp_path: Path) -> None:
    ran = EngineRun(tmp_path / "s", ALL_OK, points=9, budget=Budget(seconds=3.5 * SECONDS))
    assert ran.run() == "budget"
    assert len(ran.launcher.ran) == 3, "a fourth would exceed the budget"
    more = EngineRun(tmp_path / "s", ALL_OK, 9, ran.results, budget=Budget(seconds=5.5 * SECONDS))
    assert more.run() == "budget"
    assert len(more.launcher.ran) == 2


def test_one_configuration_that_always_fails_does_not_stop_the_study(tmp_path: Path) -> None:
    """Its three repeats, with three attempts each, count as one failure."""
    outcomes: Outcomes = lambda job: (  # noqa: E731
        (Outcome.CRASHED, "no space left on device")
        if job.workload.batch_size == 2
        else ALL_OK(job)
    )
    ran = EngineRun(tmp_path / "s", outcomes, repeats=3, with_reference=False)
    assert ran.run() == "done"
    attempts = [batch for _, batch in ran.launcher.ran]
    assert attempts.count(2) == 9 and len(attempts) == 9 + 3 * 3


def test_three_failures_in_a_row_stop_the_study(tmp_path: Path) -> None:
    ran = EngineRun(tmp_path / "s", lambda job: TrialError("no disk"))
    with pytest.raises(
        TrialError, match=r"3 configurations in a row failed for an external reason; .*: no disk"
    ):
        ran.run()


def test_the_study_stops_if_the_first_configurations_crash(tmp_path: Path) -> None:
    ran = EngineRun(tmp_path / "s", lambda job: (Outcome.CRASHED, "ZeroDivisionError"), points=30)
    with pytest.raises(
        WorkloadError,
        match=r"^3 configurations crashed and none has trained: ZeroDiv.*stderr.log",
    ):
        ran.run()
    ran.results.retry_failed(crashed=True)
    again = EngineRun(tmp_path / "s", ALL_OK, 30, ran.results)
    assert again.run() == "done" and len(again.launcher.ran) == 30


def test_crashes_are_results_once_a_trial_has_trained(tmp_path: Path) -> None:
    """Then the settings are the cause, not the code."""
    outcomes: Outcomes = lambda job: (  # noqa: E731
        (Outcome.CRASHED, "too large") if job.workload.batch_size > 3 else ALL_OK(job)
    )
    ran = EngineRun(tmp_path / "s", outcomes, points=9)
    assert ran.run() == "done"
    assert sum(result.outcome is Outcome.CRASHED for result in ran.results.results) == 6


def _failing(numbers: set[int]) -> Outcomes:
    """Reference trials with these numbers run out of memory."""
    count: Iterator[int] = iter(range(1, 100))

    def outcomes(job: Job) -> tuple[Outcome, str]:
        assert job.facts.study is not None
        is_reference = job.facts.study.role == "reference"
        fails = is_reference and next(count) in numbers
        return (Outcome.GPU_OOM, "no memory") if fails else (Outcome.OK, "")

    return outcomes


@pytest.mark.parametrize(("fail", "run"), [({1, 2}, 2), ({2, 4}, 5), (set(), 5)])
def test_the_reference_trial_is_dropped_after_two_failures_in_a_row(
    tmp_path: Path, reference: TrialSpec, fail: set[int], run: int
) -> None:
    ran = EngineRun(tmp_path / "s", _failing(fail), points=10, reference=reference)
    assert ran.run() == "done"
    assert ran.references == run
    assert any("without a reference trial" in text for text in ran.listener.messages) == (run < 5)


def test_a_trial_that_was_never_started_leaves_no_claim(tmp_path: Path) -> None:
    def interrupt(job: Job) -> StepscopeError:
        raise KeyboardInterrupt

    ran = EngineRun(tmp_path / "s", interrupt)
    assert ran.run() == "interrupted"
    assert not list((tmp_path / "s").glob("*/*.claim"))


def test_an_invalid_workload_is_skipped_with_a_message(tmp_path: Path) -> None:
    outcomes: Outcomes = lambda job: (  # noqa: E731
        WorkloadError("Unknown setting --sequence-length")
        if job.workload.batch_size == 3
        else ALL_OK(job)
    )
    ran = EngineRun(tmp_path / "s", outcomes, repeats=2)
    assert ran.run() == "done"
    assert [batch for _, batch in ran.launcher.ran].count(3) == 1
    expected = "is skipped: Unknown setting sequence_length"
    assert any(text.endswith(expected) for text in ran.listener.messages)
