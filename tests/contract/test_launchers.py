"""The contract of every launcher, as one suite. A new launcher adds a case, and passes."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import BadWorkload, CannotTry
from stepscope.records import Outcome
from stepscope.records.codec import to_json
from stepscope.records.trial import StudyPlace, TrialFacts
from stepscope.runs.reader import Run, open_run
from stepscope.studies.engine import SilentListener
from stepscope.studies.launchers.contract import FinishedTrial, Job, Launcher
from stepscope.studies.results import Results
from stepscope.studies.run import StudyRun, run_study
from stepscope.studies.study import Study
from stepscope.trials.heartbeat import Progress
from stepscope.trials.limits.spec import Limits
from stepscope.trials.processes import trial_processes
from stepscope.workloads.spec import make_workload
from studies import design, planted_environment


@dataclass(frozen=True)
class Case:
    """A launcher: `module:class`, made with who is told what a user should know."""

    name: str
    place: str

    def make(self, told: list[str] | None = None) -> Launcher:
        module, _, kind = self.place.partition(":")
        tell = (lambda text: None) if told is None else told.append
        return getattr(importlib.import_module(module), kind)(tell)  # type: ignore[no-any-return]


CASES = [
    Case("local", "stepscope.studies.launchers.local:LocalLauncher"),
    Case("two machines", "contract.two_machines:TwoMachines"),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Trials train nothing, and write down when they began and ended."""
    environment = planted_environment(tmp_path, diary=tmp_path / "diary", formula="100 * cpus")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def job(folder: Path, limits: Limits | None = None, model: str = "cnn", **facts: Any) -> Job:
    knobs = {} if ":" in model else {"framework": "made_up.loop", "data": "random"}
    return Job(make_workload(model, knobs), limits or Limits(), folder, "some", TrialFacts(**facts))


def run_all(launcher: Launcher, jobs: list[Job]) -> dict[Path, FinishedTrial]:
    """As the engine does: as many at once as it takes."""
    over: dict[Path, FinishedTrial] = {}
    waiting, under_way = list(jobs), Counter[str]()
    with launcher:
        while waiting or under_way.total():
            for machine, slots in launcher.machines.items():
                while waiting and under_way[machine] < slots:
                    launcher.start(replace(waiting.pop(0), machine=machine))
                    under_way[machine] += 1
            ended = launcher.wait(lambda job, progress: None)
            assert ended, "it waits until one is over"
            for each in ended:
                assert each.job.folder not in over, "a job is over once"
                over[each.job.folder] = each
                under_way[each.job.machine] -= 1
    left = trial_processes.processes_of(trial_processes.runner_name())
    assert not left, "something of it is left"
    return over


def run_one(case: Case, it: Job) -> tuple[FinishedTrial, Run]:
    over = run_all(case.make(), [it])[it.folder]
    assert over.error is None and not over.left and not over.asked_to_end
    return over, open_run(it.folder)


def lives_in(diary: Path) -> list[tuple[float, float]]:
    """From when to when each trial was at work."""
    begun: dict[str, float] = {}
    lives = []
    for line in diary.read_text().splitlines():
        pid, at, word, _ = line.split(" ", 3)
        if word == "begin":
            begun[pid] = float(at)
        else:
            lives.append((begun.pop(pid), float(at)))
    assert not begun, "one did not end"
    return sorted(lives)


def most_at_once(lives: list[tuple[float, float]]) -> int:
    return max(sum(begin <= moment < end for begin, end in lives) for moment, _ in lives)


def test_a_job_runs_once_and_leaves_its_folder_where_it_says(case: Case, tmp_path: Path) -> None:
    place = StudyPlace(name="planted", settings={"lr": 0.1})
    it = job(tmp_path / "deep" / "er" / "r1a1", repeat=3, study=place)
    _, run = run_one(case, it)
    assert run.ending.outcome is Outcome.OK
    assert run.json["trial"]["repeat"] == 3
    assert run.json["trial"]["study"] == to_json(place)
    assert run.json["workload"] == to_json(it.workload)
    assert [path.name for path in it.folder.parent.iterdir()] == ["r1a1"]
    assert len(lives_in(tmp_path / "diary")) == 1


def test_limits_are_passed_on(case: Case, tmp_path: Path, planted: pytest.MonkeyPatch) -> None:
    _, run = run_one(case, job(tmp_path / "a", Limits(cpus=1, memory=1 << 30)))
    limits = run.json["limits"]
    assert limits["cpus"]["asked"] == 1 and limits["memory"]["asked"] == 1 << 30
    planted.setenv("PLANTED_REAL_S", "60")
    _, run = run_one(case, job(tmp_path / "b", Limits(timeout_s=0.5)))
    assert run.ending.outcome is Outcome.TIMEOUT


def test_who_watches_hears_how_far_it_is(
    case: Case, tmp_path: Path, planted: pytest.MonkeyPatch
) -> None:
    planted.setenv("PLANTED_REAL_S", "0.4")
    it = job(tmp_path / "a")
    heard: list[tuple[Job, Progress]] = []
    with case.make() as launcher:
        launcher.start(replace(it, machine=next(iter(launcher.machines))))
        launcher.wait(lambda job, progress: heard.append((job, progress)))
    assert {each.folder for each, _ in heard} == {it.folder}
    elapsed = [progress.elapsed_s for _, progress in heard]
    assert len(elapsed) > 2 and elapsed[-1] > 0 and elapsed == sorted(elapsed)


@pytest.mark.parametrize(
    ("variable", "text", "outcome"),
    [
        ("PLANTED_OOM", "True", Outcome.GPU_OOM),
        ("PLANTED_FORMULA", "1 / 0", Outcome.CRASHED),
    ],
)
def test_a_trial_that_fails_is_no_error_of_its_launcher(
    case: Case, tmp_path: Path, planted: pytest.MonkeyPatch, variable: str, text: str, outcome: Any
) -> None:
    planted.setenv(variable, text)
    _, run = run_one(case, job(tmp_path / "a"))
    assert run.ending.outcome is outcome


def test_what_is_no_workload_leaves_nothing(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("def workload():\n    return 7\n")
    bad, good = job(tmp_path / "a", model=f"{file}:workload"), job(tmp_path / "b")
    over = run_all(case.make(), [bad, good])
    assert isinstance(over[bad.folder].error, BadWorkload)
    assert not bad.folder.exists()
    assert over[good.folder].error is None, "the next one is not held up"


def test_what_cannot_be_had_is_not_tried(case: Case, tmp_path: Path) -> None:
    much, good = job(tmp_path / "a", Limits(cpus=10_000)), job(tmp_path / "b")
    over = run_all(case.make(), [much, good])
    assert isinstance(over[much.folder].error, CannotTry)
    assert not much.folder.exists()
    assert over[good.folder].error is None
    assert len(lives_in(tmp_path / "diary")) == 1


def test_a_folder_that_is_there_is_left_alone(case: Case, tmp_path: Path) -> None:
    it = job(tmp_path / "a")
    it.folder.mkdir()
    (it.folder / "precious").write_text("of the user")
    assert isinstance(run_all(case.make(), [it])[it.folder].error, CannotTry)
    assert [path.name for path in it.folder.iterdir()] == ["precious"]


def test_no_more_at_once_than_it_has_slots(case: Case, tmp_path: Path) -> None:
    launcher = case.make()
    slots = sum(launcher.machines.values())
    jobs = [job(tmp_path / str(number)) for number in range(slots + 2)]
    over = run_all(launcher, jobs)
    assert {open_run(folder).ending.outcome for folder in over} == {Outcome.OK}
    lives = lives_in(tmp_path / "diary")
    assert len(lives) == len(jobs) and most_at_once(lives) <= slots


def test_nothing_to_wait_for(case: Case) -> None:
    with case.make() as launcher:
        assert launcher.wait(lambda job, progress: None) == []


PROGRAM = """
import sys
from pathlib import Path
from stepscope.trials.processes import trial_processes
from test_launchers import CASES, job, run_all

name, folder, count = sys.argv[1:]
case = next(case for case in CASES if case.name == name)
print(trial_processes.runner_name(), flush=True)
try:
    over = run_all(case.make(), [job(Path(folder) / str(n)) for n in range(int(count))])
except KeyboardInterrupt:
    sys.exit("interrupted")
sys.exit("asked to end" if any(each.asked_to_end for each in over.values()) else 0)
"""


def program_environment() -> dict[str, str]:
    here = str(Path(__file__).parent)
    path = os.pathsep.join([os.environ["PYTHONPATH"], here, str(Path(here).parent)])
    return {**os.environ, "PYTHONPATH": path}


@contextlib.contextmanager
def somebody(case: Case, folder: Path, count: int = 1) -> Iterator[tuple[Any, str]]:
    """Another process that runs jobs; with the name that its trials carry."""
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, case.name, str(folder), str(count)],
        env=program_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


def wait_for(happened: Any, seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not happened() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(happened())


def has_begun(diary: Path) -> bool:
    return diary.exists() and " begin " in diary.read_text()


def test_a_ctrl_c_ends_the_trial_and_says_so(
    case: Case, tmp_path: Path, planted: pytest.MonkeyPatch
) -> None:
    planted.setenv("PLANTED_REAL_S", "60")
    with somebody(case, tmp_path / "jobs") as (process, name):
        assert wait_for(lambda: has_begun(tmp_path / "diary"))
        assert trial_processes.processes_of(name)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert said.strip() in ("asked to end", "interrupted"), said
    assert not trial_processes.processes_of(name)
    assert json.loads((tmp_path / "jobs" / "0" / "run.json").read_text())["ending"]["outcome"] in (
        "interrupted",
        "running",  # cut off: whoever reads it sees that its watcher is gone
    )


def test_nothing_outlives_who_uses_it(
    case: Case, tmp_path: Path, planted: pytest.MonkeyPatch
) -> None:
    planted.setenv("PLANTED_REAL_S", "60")
    with somebody(case, tmp_path / "jobs") as (process, name):
        assert wait_for(lambda: has_begun(tmp_path / "diary"))
        assert trial_processes.processes_of(name)
        process.kill()
        process.wait()
        assert wait_for(lambda: not trial_processes.processes_of(name))
    run = tmp_path / "jobs" / "0"  # whoever watched it, on another machine, goes last
    assert wait_for(lambda: open_run(run).ending.outcome is Outcome.LOST)


def test_two_on_one_machine_take_turns(
    case: Case, tmp_path: Path, planted: pytest.MonkeyPatch
) -> None:
    """Trials that run at once disturb each other, whichever study they are of."""
    planted.setenv("PLANTED_REAL_S", "0.3")
    each = 5
    a, b = tmp_path / "a", tmp_path / "b"
    with somebody(case, a, each) as (first, _), somebody(case, b, each) as (second, _):
        assert [first.wait(60), second.wait(60)] == [0, 0]
    lives = lives_in(tmp_path / "diary")
    assert len(lives) == 2 * each and most_at_once(lives) <= sum(case.make().machines.values())
    assert {open_run(p).ending.outcome for f in (a, b) for p in f.iterdir()} == {Outcome.OK}
    lines = [line for line in (tmp_path / "diary").read_text().splitlines() if " begin " in line]
    whose = ["a" if f"{a}/" in line else "b" for line in lines]
    assert "b" in whose[: each + 1] and "a" in whose[: each + 1], "one waits for all of the other"


DESIGN = """
factors: {batch_size: [16, 32, 64, 128], workers: [0, 1, 2]}
blocks: {size: 2, reruns: 0}
"""


def run_planted(case: Case, folder: Path) -> StudyRun:
    """A study of twelve trials, in blocks of two."""
    study = Study.of(design(folder, DESIGN), folder / "studies").to_run()
    return run_study(study, study.grid_to_run(), case.make(), SilentListener())


def check_blocks(known: Results) -> None:
    """Each machine has a reference trial before its block, and no other machine is in it."""
    for results in known.in_blocks().values():
        first, *others = sorted(results, key=lambda result: result.began)
        assert first.is_reference and not any(each.is_reference for each in others)
        assert {each.machine for each in others} <= {first.machine}


def test_each_machine_has_its_own_blocks(case: Case, tmp_path: Path) -> None:
    ran = run_planted(case, tmp_path)
    known = ran.scanned.results
    machines = case.make().machines
    assert ran.stop_reason == "done"
    assert {result.machine for result in known.results} == set(machines)
    assert all(result.is_ok for result in known.results)
    check_blocks(known)
    assert ran.trials >= 12 + 6
    assert not any(judged.is_out_of_line for judged in known.judged.values()), (
        "a slower machine is no drift"
    )
    reread = Study.of(ran.scanned.study.paths.folder).scan().results
    assert sorted(reread.results, key=str) == sorted(known.results, key=str)


STUDY_PROGRAM = """
import sys
from pathlib import Path
from test_launchers import CASES, run_planted

name, folder = sys.argv[1:]
run_planted(next(case for case in CASES if case.name == name), Path(folder))
"""


def test_a_study_that_was_killed_goes_on_where_it_was(
    case: Case, tmp_path: Path, planted: pytest.MonkeyPatch
) -> None:
    planted.setenv("PLANTED_REAL_S", "0.6")  # long enough to be killed within
    diary = tmp_path / "diary"
    with subprocess.Popen(
        [sys.executable, "-c", STUDY_PROGRAM, case.name, str(tmp_path)], env=program_environment()
    ) as process:
        assert wait_for(lambda: diary.exists() and diary.read_text().count(" begin ") >= 3)
        process.kill()
    planted.setenv("PLANTED_REAL_S", "0.02")
    ran = run_planted(case, tmp_path)
    known = ran.scanned.results
    assert ran.stop_reason == "done"
    check_blocks(known)
    answers = Counter(r.key for r in known.results if r.is_trial and r.is_result)
    assert len(answers) == 12 and set(answers.values()) == {1}, "each is run to its end once"
    lost = [result for result in known.results if result.outcome is Outcome.LOST]
    assert 1 <= len(lost) <= len(case.make().machines)
