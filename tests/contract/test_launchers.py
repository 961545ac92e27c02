"""The contract of launchers. A new launcher is added as a case."""

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

from stepscope.errors import TrialError, WorkloadError
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
    """A launcher as `module:class`."""

    name: str
    place: str

    def make(self, messages: list[str] | None = None) -> Launcher:
        module, _, kind = self.place.partition(":")
        notify = (lambda text: None) if messages is None else messages.append
        return getattr(importlib.import_module(module), kind)(notify)  # type: ignore[no-any-return]


CASES = [
    Case("local", "stepscope.studies.launchers.local:LocalLauncher"),
    Case("two machines", "contract.two_machines:TwoMachines"),
]


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Run planted trials, which record their start and end in the diary."""
    environment = planted_environment(tmp_path, diary=tmp_path / "diary", formula="100 * cpus")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def make_job(folder: Path, limits: Limits | None = None, model: str = "cnn", **facts: Any) -> Job:
    settings = {} if ":" in model else {"framework": "made_up.loop", "data": "random"}
    return Job(
        make_workload(model, settings), limits or Limits(), folder, "some", TrialFacts(**facts)
    )


def run_all(launcher: Launcher, jobs: list[Job]) -> dict[Path, FinishedTrial]:
    """Run jobs as the engine does, in all slots."""
    finished: dict[Path, FinishedTrial] = {}
    waiting, running = list(jobs), Counter[str]()
    with launcher:
        while waiting or running.total():
            for machine, slots in launcher.machines.items():
                while waiting and running[machine] < slots:
                    launcher.start(replace(waiting.pop(0), machine=machine))
                    running[machine] += 1
            trials = launcher.wait(lambda job, progress: None)
            assert trials, "it returned before a job had finished"
            for each in trials:
                assert each.job.folder not in finished, "a job finished twice"
                finished[each.job.folder] = each
                running[each.job.machine] -= 1
    leftovers = trial_processes.processes_of(trial_processes.runner_name())
    assert not leftovers, "a process is left"
    return finished


def run_one(case: Case, job: Job) -> tuple[FinishedTrial, Run]:
    finished = run_all(case.make(), [job])[job.folder]
    assert finished.error is None and not finished.leftovers
    assert not finished.termination_requested
    return finished, open_run(job.folder)


def trial_spans(diary: Path) -> list[tuple[float, float]]:
    """Return the start and end times of all trials."""
    started: dict[str, float] = {}
    spans = []
    for line in diary.read_text().splitlines():
        pid, at, word, _ = line.split(" ", 3)
        if word == "begin":
            started[pid] = float(at)
        else:
            spans.append((started.pop(pid), float(at)))
    assert not started, "a trial did not finish"
    return sorted(spans)


def max_concurrent(spans: list[tuple[float, float]]) -> int:
    return max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans)


def test_a_job_runs_once_into_its_folder(case: Case, tmp_path: Path) -> None:
    place = StudyPlace(name="planted", settings={"lr": 0.1})
    job = make_job(tmp_path / "deep" / "er" / "r1a1", repeat=3, study=place)
    _, run = run_one(case, job)
    assert run.exit_status.outcome is Outcome.OK
    assert run.json["trial"]["repeat"] == 3
    assert run.json["trial"]["study"] == to_json(place)
    assert run.json["workload"] == to_json(job.workload)
    assert [path.name for path in job.folder.parent.iterdir()] == ["r1a1"]
    assert len(trial_spans(tmp_path / "diary")) == 1


def test_limits_are_passed_on(case: Case, tmp_path: Path, planted: pytest.MonkeyPatch) -> None:
    _, run = run_one(case, make_job(tmp_path / "a", Limits(cpus=1, memory=1 << 30)))
    limits = run.json["limits"]
    assert limits["cpus"]["requested"] == 1 and limits["memory"]["requested"] == 1 << 30
    planted.setenv("PLANTED_REAL_S", "60")
    _, run = run_one(case, make_job(tmp_path / "b", Limits(timeout_s=0.5)))
    assert run.exit_status.outcome is Outcome.TIMEOUT


def test_progress_is_reported(case: Case, tmp_path: Path, planted: pytest.MonkeyPatch) -> None:
    planted.setenv("PLANTED_REAL_S", "0.4")
    job = make_job(tmp_path / "a")
    reported: list[tuple[Job, Progress]] = []
    with case.make() as launcher:
        launcher.start(replace(job, machine=next(iter(launcher.machines))))
        launcher.wait(lambda job, progress: reported.append((job, progress)))
    assert {each.folder for each, _ in reported} == {job.folder}
    elapsed = [progress.elapsed_s for _, progress in reported]
    assert len(elapsed) > 2 and elapsed[-1] > 0 and elapsed == sorted(elapsed)


@pytest.mark.parametrize(
    ("variable", "text", "outcome"),
    [
        ("PLANTED_OOM", "True", Outcome.GPU_OOM),
        ("PLANTED_FORMULA", "1 / 0", Outcome.CRASHED),
    ],
)
def test_a_failed_trial_is_not_an_error_of_the_launcher(
    case: Case, tmp_path: Path, planted: pytest.MonkeyPatch, variable: str, text: str, outcome: Any
) -> None:
    planted.setenv(variable, text)
    _, run = run_one(case, make_job(tmp_path / "a"))
    assert run.exit_status.outcome is outcome


def test_an_invalid_workload_leaves_no_folder(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("def workload():\n    return 7\n")
    invalid, valid = make_job(tmp_path / "a", model=f"{file}:workload"), make_job(tmp_path / "b")
    finished = run_all(case.make(), [invalid, valid])
    assert isinstance(finished[invalid.folder].error, WorkloadError)
    assert not invalid.folder.exists()
    assert finished[valid.folder].error is None, "the next job runs"


def test_unavailable_limits_are_an_error(case: Case, tmp_path: Path) -> None:
    unavailable, valid = make_job(tmp_path / "a", Limits(cpus=10_000)), make_job(tmp_path / "b")
    finished = run_all(case.make(), [unavailable, valid])
    assert isinstance(finished[unavailable.folder].error, TrialError)
    assert not unavailable.folder.exists()
    assert finished[valid.folder].error is None
    assert len(trial_spans(tmp_path / "diary")) == 1


def test_an_existing_folder_is_not_changed(case: Case, tmp_path: Path) -> None:
    job = make_job(tmp_path / "a")
    job.folder.mkdir()
    (job.folder / "precious").write_text("of the user")
    assert isinstance(run_all(case.make(), [job])[job.folder].error, TrialError)
    assert [path.name for path in job.folder.iterdir()] == ["precious"]


def test_no_more_concurrent_jobs_than_slots(case: Case, tmp_path: Path) -> None:
    launcher = case.make()
    slots = sum(launcher.machines.values())
    jobs = [make_job(tmp_path / str(number)) for number in range(slots + 2)]
    finished = run_all(launcher, jobs)
    assert {open_run(folder).exit_status.outcome for folder in finished} == {Outcome.OK}
    spans = trial_spans(tmp_path / "diary")
    assert len(spans) == len(jobs) and max_concurrent(spans) <= slots


def test_wait_without_jobs(case: Case) -> None:
    with case.make() as launcher:
        assert launcher.wait(lambda job, progress: None) == []


PROGRAM = """
import sys
from pathlib import Path
from stepscope.trials.processes import trial_processes
from test_launchers import CASES, make_job, run_all

name, folder, count = sys.argv[1:]
case = next(case for case in CASES if case.name == name)
print(trial_processes.runner_name(), flush=True)
try:
    finished = run_all(case.make(), [make_job(Path(folder) / str(n)) for n in range(int(count))])
except KeyboardInterrupt:
    sys.exit("interrupted")
sys.exit("terminated" if any(each.termination_requested for each in finished.values()) else 0)
"""


def program_environment() -> dict[str, str]:
    here = str(Path(__file__).parent)
    path = os.pathsep.join([os.environ["PYTHONPATH"], here, str(Path(here).parent)])
    return {**os.environ, "PYTHONPATH": path}


@contextlib.contextmanager
def other_process(case: Case, folder: Path, count: int = 1) -> Iterator[tuple[Any, str]]:
    """Start another process that runs jobs; yield it with the runner name of its trials."""
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


def wait_for(condition: Any, seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.02)
    return bool(condition())


def has_started(diary: Path) -> bool:
    return diary.exists() and " begin " in diary.read_text()


def test_ctrl_c_ends_the_trial_and_is_reported(
    case: Case, tmp_path: Path, planted: pytest.MonkeyPatch
) -> None:
    planted.setenv("PLANTED_REAL_S", "60")
    with other_process(case, tmp_path / "jobs") as (process, name):
        assert wait_for(lambda: has_started(tmp_path / "diary"))
        assert trial_processes.processes_of(name)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
    assert stderr.strip() in ("terminated", "interrupted"), stderr
    assert not trial_processes.processes_of(name)
    facts = json.loads((tmp_path / "jobs" / "0" / "run.json").read_text())
    # `running` is left if the monitor was cut off; readers see that it has exited.
    assert facts["exit_status"]["outcome"] in ("interrupted", "running")


def test_trials_end_with_the_process_that_uses_the_launcher(
    case: Case, tmp_path: Path, planted: pytest.MonkeyPatch
) -> None:
    planted.setenv("PLANTED_REAL_S", "60")
    with other_process(case, tmp_path / "jobs") as (process, name):
        assert wait_for(lambda: has_started(tmp_path / "diary"))
        assert trial_processes.processes_of(name)
        process.kill()
        process.wait()
        assert wait_for(lambda: not trial_processes.processes_of(name))
    run = tmp_path / "jobs" / "0"  # its monitor, on another machine, exits last
    assert wait_for(lambda: open_run(run).exit_status.outcome is Outcome.LOST)


def test_two_processes_on_one_machine_take_turns(
    case: Case, tmp_path: Path, planted: pytest.MonkeyPatch
) -> None:
    """Concurrent trials slow each other down, also if they belong to different studies."""
    planted.setenv("PLANTED_REAL_S", "0.3")
    each = 5
    a, b = tmp_path / "a", tmp_path / "b"
    with other_process(case, a, each) as (first, _), other_process(case, b, each) as (second, _):
        assert [first.wait(60), second.wait(60)] == [0, 0]
    spans = trial_spans(tmp_path / "diary")
    assert len(spans) == 2 * each and max_concurrent(spans) <= sum(case.make().machines.values())
    assert {open_run(p).exit_status.outcome for f in (a, b) for p in f.iterdir()} == {Outcome.OK}
    lines = [line for line in (tmp_path / "diary").read_text().splitlines() if " begin " in line]
    order = ["a" if f"{a}/" in line else "b" for line in lines]
    assert {*order[: each + 1]} == {"a", "b"}, "one process waits for all trials of the other"


DESIGN = """
factors: {batch_size: [16, 32, 64, 128], workers: [0, 1, 2]}
blocks: {size: 2, reruns: 0}
"""


def run_planted(case: Case, folder: Path) -> StudyRun:
    """Run a study of twelve trials in blocks of two."""
    study = Study.of(design(folder, DESIGN), folder / "studies").to_run()
    return run_study(study, study.grid_to_run(), case.make(), SilentListener())


def check_blocks(all_results: Results) -> None:
    """Check that each block starts with a reference trial and is on one machine."""
    for results in all_results.in_blocks().values():
        first, *others = sorted(results, key=lambda result: result.started)
        assert first.is_reference and not any(each.is_reference for each in others)
        assert {each.machine for each in others} <= {first.machine}


def test_each_machine_has_its_own_blocks(case: Case, tmp_path: Path) -> None:
    ran = run_planted(case, tmp_path)
    results = ran.scanned.results
    machines = case.make().machines
    assert ran.stop_reason == "done"
    assert {result.machine for result in results.results} == set(machines)
    assert all(result.is_ok for result in results.results)
    check_blocks(results)
    assert ran.trials >= 12 + 6
    assert not any(judged.is_outlier for judged in results.judged.values()), (
        "a slower machine is not drift"
    )
    reread = Study.of(ran.scanned.study.paths.folder).scan().results
    assert sorted(reread.results, key=str) == sorted(results.results, key=str)


STUDY_PROGRAM = """
import sys
from pathlib import Path
from test_launchers import CASES, run_planted

name, folder = sys.argv[1:]
run_planted(next(case for case in CASES if case.name == name), Path(folder))
"""


def test_a_killed_study_resumes(case: Case, tmp_path: Path, planted: pytest.MonkeyPatch) -> None:
    planted.setenv("PLANTED_REAL_S", "0.6")  # long enough to be killed within
    diary = tmp_path / "diary"
    with subprocess.Popen(
        [sys.executable, "-c", STUDY_PROGRAM, case.name, str(tmp_path)], env=program_environment()
    ) as process:
        assert wait_for(lambda: diary.exists() and diary.read_text().count(" begin ") >= 3)
        process.kill()
    planted.setenv("PLANTED_REAL_S", "0.02")
    ran = run_planted(case, tmp_path)
    results = ran.scanned.results
    assert ran.stop_reason == "done"
    check_blocks(results)
    answers = Counter(r.key for r in results.results if r.is_trial and r.is_result)
    assert len(answers) == 12 and set(answers.values()) == {1}, "each trial has one result"
    lost = [result for result in results.results if result.outcome is Outcome.LOST]
    assert 1 <= len(lost) <= len(case.make().machines)
