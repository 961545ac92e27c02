"""What the engine decides, with a launcher that only writes down what trials came to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import BadWorkload, CannotTry, StepscopeError
from stepscope.records import Outcome
from stepscope.records.codec import to_json
from stepscope.studies.design.records import Budget, Design
from stepscope.studies.engine import Engine, SilentListener
from stepscope.studies.folder import StudyPaths
from stepscope.studies.launchers.contract import FinishedTrial, Job, Show
from stepscope.studies.planner import GridPlanner
from stepscope.studies.results import Results
from stepscope.studies.trial_spec import TrialSpec, make_spec

Ends = Callable[[Job], tuple[Outcome, str] | StepscopeError]
WELL: Ends = lambda job: (Outcome.OK, "")  # noqa: E731
SECONDS = 2.0


class Paper:
    """A launcher of trials that take two seconds on paper, and end as a test says."""

    machines: Mapping[str, int] = {"": 1}

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._jobs: list[Job] = []
        self.ran: list[tuple[str, int]] = []
        """Role and batch size."""

    def __enter__(self) -> Paper:
        return self

    def __exit__(self, *error: object) -> None: ...

    def start(self, job: Job) -> None:
        self._jobs.append(job)

    def wait(self, show: Show) -> list[FinishedTrial]:
        job = self._jobs.pop()
        assert job.facts.study is not None
        self.ran.append((job.facts.study.role, job.workload.batch_size))
        ended = self._ends(job)
        if isinstance(ended, StepscopeError):
            return [FinishedTrial(job, ended)]
        _write(job, *ended)
        return [FinishedTrial(job)]


def _write(job: Job, outcome: Outcome, reason: str) -> None:
    job.folder.mkdir(parents=True)
    (job.folder / "events").mkdir()
    facts = {
        "format": 1,
        "clock": {"monotonic_ns": 0, "wall_ns": time.time_ns()},
        "watcher": {},
        "ending": {
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
        self.told: list[str] = []

    def tell(self, text: str) -> None:
        self.told.append(text)


class Ran:
    """An engine that ran, and all that it left."""

    def __init__(
        self, folder: Path, ends: Ends, points: int = 4, known: Results | None = None, **design: Any
    ) -> None:
        specs = [make_spec({"model": "cnn", "batch_size": n}) for n in range(1, points + 1)]
        reference = design.pop("reference", None)
        plan = Design("paper", {"model": "cnn"}, (), **{"block": 2, **design})
        self.paths = StudyPaths(folder)
        folder.mkdir(exist_ok=True)
        self.launcher, self.listener = Paper(ends), Listener()
        self.known = known or Results(plan.reruns)
        self.engine = Engine(
            self.paths,
            GridPlanner(plan, specs),
            self.launcher,
            self.known,
            self.listener,
            plan,
            reference,
        )

    def run(self) -> str:
        return self.engine.run()

    @property
    def references(self) -> int:
        return sum(role == "sentinel" for role, _ in self.launcher.ran)


@pytest.fixture
def reference() -> TrialSpec:
    return make_spec({"model": "cnn", "batch_size": 99})


def test_every_block_begins_with_the_sentinel(tmp_path: Path, reference: TrialSpec) -> None:
    ran = Ran(tmp_path / "s", WELL, points=5, reference=reference)
    assert ran.run() == "done"
    roles = [role[0] for role, _ in ran.launcher.ran]
    assert "".join(roles) == "sttsttst"
    assert [r.block for r in ran.known.results] == [1, 1, 1, 2, 2, 2, 3, 3]


def test_a_budget_of_time_counts_what_was_spent_before(tmp_path: Path) -> None:
    ran = Ran(tmp_path / "s", WELL, points=9, budget=Budget(seconds=3.5 * SECONDS))
    assert ran.run() == "budget"
    assert len(ran.launcher.ran) == 3, "a fourth would not fit"
    more = Ran(tmp_path / "s", WELL, 9, ran.known, budget=Budget(seconds=5.5 * SECONDS))
    assert more.run() == "budget"
    assert len(more.launcher.ran) == 2


def test_one_configuration_that_always_fails_does_not_end_the_study(tmp_path: Path) -> None:
    """Three repeats of it, tried three times each, are one cause and not three."""
    ends: Ends = lambda job: (  # noqa: E731
        (Outcome.CRASHED, "no space left on device") if job.workload.batch_size == 2 else WELL(job)
    )
    ran = Ran(tmp_path / "s", ends, repeats=3, with_reference=False)
    assert ran.run() == "done"
    tries = [batch for _, batch in ran.launcher.ran]
    assert tries.count(2) == 9 and len(tries) == 9 + 3 * 3


def test_three_that_fail_in_a_row_end_it(tmp_path: Path) -> None:
    ran = Ran(tmp_path / "s", lambda job: CannotTry("no disk"))
    with pytest.raises(CannotTry, match=r"3 configurations in a row .* no disk"):
        ran.run()


def test_where_all_crash_it_is_the_code(tmp_path: Path) -> None:
    ran = Ran(tmp_path / "s", lambda job: (Outcome.CRASHED, "ZeroDivisionError"), points=30)
    with pytest.raises(BadWorkload, match=r"first 3 .* ZeroDivisionError .*stderr.log"):
        ran.run()
    ran.known.retry_failed(crashed=True)
    again = Ran(tmp_path / "s", WELL, 30, ran.known)
    assert again.run() == "done" and len(again.launcher.ran) == 30


def test_some_that_crash_are_results(tmp_path: Path) -> None:
    """Where one has trained, it is the settings."""
    ends: Ends = lambda job: (  # noqa: E731
        (Outcome.CRASHED, "too large") if job.workload.batch_size > 3 else WELL(job)
    )
    ran = Ran(tmp_path / "s", ends, points=9)
    assert ran.run() == "done"
    assert sum(result.outcome is Outcome.CRASHED for result in ran.known.results) == 6


def _failing(numbers: set[int]) -> Ends:
    """Sentinels that run out of memory, by their number."""
    count: Iterator[int] = iter(range(1, 100))

    def ends(job: Job) -> tuple[Outcome, str]:
        assert job.facts.study is not None
        is_reference = job.facts.study.role == "sentinel"
        fails = is_reference and next(count) in numbers
        return (Outcome.GPU_OOM, "no memory") if fails else (Outcome.OK, "")

    return ends


@pytest.mark.parametrize(("fail", "left"), [({1, 2}, 2), ({2, 4}, 5), (set(), 5)])
def test_a_sentinel_that_does_not_train_is_dropped(
    tmp_path: Path, reference: TrialSpec, fail: set[int], left: int
) -> None:
    """Two that fail in a row; not two of many."""
    ran = Ran(tmp_path / "s", _failing(fail), points=10, reference=reference)
    assert ran.run() == "done"
    assert ran.references == left
    assert any("does not train" in text for text in ran.listener.told) == (left < 5)


def test_what_was_never_begun_leaves_no_claim(tmp_path: Path) -> None:
    def interrupt(job: Job) -> StepscopeError:
        raise KeyboardInterrupt

    ran = Ran(tmp_path / "s", interrupt)
    assert ran.run() == "interrupted"
    assert not list((tmp_path / "s").glob("*/*.claim"))


def test_what_is_no_workload_is_told_and_left_out(tmp_path: Path) -> None:
    ends: Ends = lambda job: (  # noqa: E731
        BadWorkload("--length is no setting of it") if job.workload.batch_size == 3 else WELL(job)
    )
    ran = Ran(tmp_path / "s", ends, repeats=2)
    assert ran.run() == "done"
    assert [batch for _, batch in ran.launcher.ran].count(3) == 1
    assert any("length is no setting" in t and "--length" not in t for t in ran.listener.told)
