"""`stepscope study` from the design to the report, with planted trials."""

from __future__ import annotations

import fcntl
import json
import shutil
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepscope.cli.app import app
from stepscope.errors import StepscopeError
from stepscope.report.study.export import study_dict
from stepscope.report.study.read import read_view
from stepscope.runs.facts import exit_status_of, read_facts
from stepscope.studies.folder import StudyPaths, exclusive_run
from stepscope.trials.processes import trial_processes
from studies import PLANTED, STUDY, design, planted_environment, study

NO_RERUNS = "blocks: {reruns: 0, reference: none}\n"
"""Other tests run at the same time: their interference must not cause reruns."""
FOUR = f"factors: {{batch_size: [16, 32, 64, 128]}}\n{NO_RERUNS}"
DESIGN = """
factors:
  batch_size: [16, 64]
  workers: [0, 1, 2, 4]
skip: {when: workers == 4 and batch_size == 16, reason: too slow}
repeats: 2
blocks: {reruns: 0, size: 7}
"""
KILLED = f"workload: cnn\nfixed: {{framework: made_up.killed, data: random}}\n{FOUR}"


class Folder:
    """The folder of a study, with commands in an environment of planted formulas."""

    def __init__(self, folder: Path, **planted: Any) -> None:
        self.folder = folder
        self.diary = folder / "diary"
        self.env = planted_environment(folder, diary=self.diary, **planted)
        self.env["COLUMNS"] = "200"
        self.study = folder / "planted"

    def run(self, text: str, *options: str, code: int = 0, name: str = "planted") -> str:
        """Run a design and return its messages."""
        return self.command("run", design(self.folder, text, name), *options, code=code).stderr

    def command(
        self, command: str, *options: str | Path, code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        done = study(command, *options, "--out", self.folder, env=self.env)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == code, done.stderr
        return done

    def error(self, text: str, *options: str) -> StepscopeError:
        """Return the error of a design that cannot run; in this process, to save time."""
        command = ["study", "run", str(design(self.folder, text)), "--out", str(self.folder)]
        done = CliRunner(env=self.env).invoke(app, [*command, *options])
        assert isinstance(done.exception, StepscopeError), done.output
        return done.exception

    def results(self, name: str = "planted") -> dict[str, Any]:
        """Return the data of `study show --json`; in this process, to save time."""
        return study_dict(read_view(self.folder / name))

    def start(self, text: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*STUDY, "run", str(design(self.folder, text)), "--out", str(self.folder)],
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, started: int) -> None:
        until = time.monotonic() + 60
        while self.started < started and time.monotonic() < until:
            time.sleep(0.01)
        assert self.started >= started

    @property
    def started(self) -> int:
        return self.diary.read_text().count(" begin ") if self.diary.exists() else 0

    def outcomes(self) -> Counter[tuple[str, str]]:
        """Count the outcomes of each trial, by its place without the attempt."""
        found: Counter[tuple[str, str]] = Counter()
        for facts in self.study.glob("*/r*a*/run.json"):
            place = f"{facts.parent.parent.name}/{facts.parent.name.partition('a')[0]}"
            exit_status = exit_status_of(read_facts(facts.parent), facts.parent)
            found[place, exit_status.outcome.value] += 1
        return found


@pytest.fixture
def here(tmp_path: Path) -> Folder:
    return Folder(tmp_path, formula="1000 + batch_size")


def test_from_the_design_to_the_report(tmp_path: Path) -> None:
    """The large batch is 1.5× faster, and more than two workers gain nothing."""
    formula = "1000 * (1.5 if batch_size == 64 else 1) * (1 + min(workers, 2)) * exp(0.01 * noise)"
    here = Folder(tmp_path, formula=formula, memory="1e9 + 1e7 * batch_size")
    text = DESIGN
    file = design(tmp_path, text)
    plan = here.command("plan", file).stdout
    assert "14 trials to run" in plan and "too slow" in plan and not here.study.exists()
    planned = json.loads(here.command("plan", file, "--json").stdout)
    assert (planned["trials"], planned["done"], planned["blocks"]) == (14, 0, 2)
    assert not planned["remaining_seconds_measured"]

    messages = here.run(text)
    assert "[14/14]" in messages and "Report:" in messages
    assert here.started == 16, "two blocks start with the reference trial"
    assert sorted(here.outcomes().values()) == [1] * 14
    planned = json.loads(here.command("plan", file, "--json").stdout)
    assert (planned["done"], planned["remaining"], planned["remaining_seconds_measured"]) == (
        14,
        0,
        True,
    )

    results = json.loads(here.command("report", file, "--json").stdout)
    trials = {key: value for key, value in results["trials"].items() if key != "with_interference"}
    assert trials == {
        "planned": 14,
        "done": 14,
        "remaining": 0,
        "reruns": 0,
        "attempts": 16,
        "outcomes": {"ok": 14},
    }
    (effects,) = (e for e in results["effects"] if e["response"] == "samples_per_second")
    sizes = {effect["factor"]: effect["size"] for effect in effects["main"]}
    assert sizes["batch_size"]["low"] <= 1.5 <= sizes["batch_size"]["high"]
    assert sizes["workers"]["low"] <= 3.0 <= sizes["workers"]["high"]
    assert sizes["batch_size"]["high"] / sizes["batch_size"]["low"] < 1.1
    (ranking,) = results["sensitivity"]
    assert [effect["factor"] for effect in ranking["effects"]] == ["workers", "batch_size"]
    (curve,) = (
        c for c in results["curves"] if c["factor"] == "workers" and c["knee"] and not c["group"]
    )
    assert curve["knee"]["level"] == 2
    (skipped,) = results["skipped"]
    assert skipped["levels"] == {"batch_size": 16, "workers": 4}
    assert "too slow" in skipped["reason"]
    derived = {path.name for path in (here.study / "derived").iterdir()}
    assert {"report.html", "effects.csv", "trials.csv"} <= derived
    shown = here.command("show", file).stdout
    assert "workers" in shown and "batch_size" in shown

    again = here.run(text)
    assert "all 14 trials done" in again and here.started == 16


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_an_interrupted_study_resumes(here: Folder, number: signal.Signals) -> None:
    here.env["PLANTED_REAL_S"] = "0.3"
    runner = here.start(FOUR)
    here.wait_for(2)
    name = runner_name(runner.pid)
    runner.send_signal(number)
    _, messages = runner.communicate(timeout=60)
    assert runner.returncode == 130 and "Traceback" not in messages
    assert "interrupted; run the same command to resume" in messages
    assert not trial_processes.processes_of(name)
    done = here.results()["trials"]["done"]
    assert 1 <= done < 4

    here.env["PLANTED_REAL_S"] = "0.02"
    assert f"{done} of 4 trials done" in here.run(FOUR) or done == 0
    answers = [place for (place, outcome) in here.outcomes() if outcome == "ok"]
    assert len(answers) == 4 and here.outcomes().total() <= 5
    assert all(here.outcomes()[place, "ok"] == 1 for place in answers)


def test_interrupted_while_waiting_for_another_study(here: Folder) -> None:
    lock = here.folder / "state" / "machine.lock"
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        runner = here.start(FOUR)
        assert runner.stderr is not None
        while "waiting" not in (line := runner.stderr.readline()):
            assert line, "it did not wait"
        runner.send_signal(signal.SIGINT)
        _, messages = runner.communicate(timeout=60)
    assert runner.returncode == 130 and "Traceback" not in messages
    assert not here.started
    here.run(FOUR)
    assert sorted(here.outcomes().values()) == [1] * 4


def runner_name(pid: int) -> str:
    process = trial_processes.identify(pid)
    assert process is not None
    return f"{pid}.{process.started}.{trial_processes.runner_name().split('.')[2]}"


def test_a_running_study(here: Folder) -> None:
    """`show` shows its progress, and a second `run` names the process that runs it."""
    here.env["PLANTED_REAL_S"] = "1"
    many = f"factors: {{batch_size: {list(range(1, 100))}}}\n{NO_RERUNS}"
    runner = here.start(many)
    try:
        here.wait_for(2)
        results = json.loads(here.command("show", here.study, "--json").stdout)
        assert results["state"] == "running" and results["running"]["pid"] == runner.pid
        assert results["running"]["trial"].startswith("batch_size ")
        assert results["trials"]["done"] >= 1 and results["trials"]["remaining"] >= 1
        assert "batch_size" in here.command("show", "planted").stdout
        done = here.command("run", design(here.folder, many), code=7)
        assert (
            f"is already running (PID {runner.pid} on " in done.stderr
            and "study show" in done.stderr
        )
        assert runner.poll() is None
    finally:
        runner.send_signal(signal.SIGINT)
        runner.communicate(timeout=60)
    assert runner.returncode == 130
    assert here.results()["running"] is None


def test_an_oom_is_a_result_and_larger_trials_are_skipped(tmp_path: Path) -> None:
    here = Folder(tmp_path, formula="100.0", oom="batch_size > 16")
    batches = ", ".join(str(16 * number) for number in range(1, 13))
    text = f"factors: {{batch_size: [{batches}]}}\noom: {{test: 0.3}}\nseed: 4\n{NO_RERUNS}"
    here.run(text)
    results = here.results()
    trained = results["trials"]["outcomes"]["ok"]
    ran_out = results["trials"]["outcomes"]["gpu_oom"]
    skipped = {each["levels"]["batch_size"]: each["reason"] for each in results["skipped"]}
    assert trained == 1 and ran_out >= 2 and len(skipped) >= 3
    assert ran_out + len(skipped) == 11
    run = {each["levels"]["batch_size"] for each in results["configurations"]}
    least = min(batch for batch in run if batch > 16)
    assert all(reason.startswith("already failed (gpu_oom) with") for reason in skipped.values())
    assert min(skipped) > least
    assert max(run) > min(skipped), "a share is run in any case"
    rows = (here.study / "derived" / "skipped.csv").read_text()
    assert rows.count("already failed (gpu_oom) with") == len(skipped)
    started = here.started
    assert "all" in here.run(text) and here.started == started, "skipped trials stay skipped"


def test_failures_of_the_infrastructure_are_retried_twice(tmp_path: Path) -> None:
    here = Folder(tmp_path, killed="batch_size == 32", kills=2)
    here.run(KILLED)
    assert sorted(here.outcomes().values()) == [1, 1, 1, 1, 2]
    results = here.results()
    assert results["trials"]["outcomes"] == {"ok": 4} and results["trials"]["attempts"] == 6
    assert all("SIGKILL" in each["reason"] for each in results["failures"])

    shutil.rmtree(here.study)
    here.env["PLANTED_KILLS"] = "99"
    here.run(KILLED)
    assert sorted(here.outcomes().values()) == [1, 1, 1, 3]
    trials = here.results()["trials"]
    assert trials["outcomes"] == {"crashed": 1, "ok": 3} and not trials["remaining"]
    here.env["PLANTED_KILLS"] = "0"
    here.run(KILLED)
    assert sorted(here.outcomes().values()) == [1, 1, 1, 1, 3], "a new run retries it"


def test_a_study_stops_if_every_trial_fails(tmp_path: Path) -> None:
    here = Folder(tmp_path, killed="True", kills=1)
    messages = here.run(KILLED, code=5)
    assert "3 configurations in a row failed" in messages and "SIGKILL" in messages
    assert here.outcomes().total() == 3
    here.run(KILLED)
    assert here.results()["trials"]["outcomes"] == {"ok": 4}


def test_crashed_trials_are_retried_on_request(tmp_path: Path) -> None:
    here = Folder(tmp_path, formula="1 / 0")
    messages = here.run(FOUR, code=4)
    assert "3 configurations crashed and none has trained" in messages
    assert "ZeroDivisionError" in messages and "--retry-failed" in messages
    here.env["PLANTED_FORMULA"] = "100.0"
    here.run(FOUR, "--retry-failed")
    assert here.results()["trials"]["outcomes"] == {"ok": 4} and here.started == 3 + 4


def test_budgets_of_trials_and_of_time(here: Folder) -> None:
    messages = here.run(FOUR + "budget: {trials: 2}\n")
    assert "the budget is used up" in messages and "raise it in the design to resume" in messages
    assert here.results()["trials"]["done"] == here.started == 2
    messages = here.run(FOUR + "budget: {trials: 99, time: 0.1 s}\n")
    assert "budget is used up" in messages and here.started == 2
    messages = here.run(FOUR + "budget: 10 min\n")
    assert "budget is used up" not in messages and here.started == 4
    assert sorted(here.outcomes().values()) == [1] * 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "factors: {workers: [0, 1]}\nskip: [workers < 1, workers > 0]\n",
            ["None of the 2 combinations is left"],
        ),
        (
            "factors: {gpus: [4, 8]}\n" + NO_RERUNS,
            ["No trial of planted can run on this machine", "GPUs"],
        ),
    ],
)
def test_invalid_designs(
    here: Folder, monkeypatch: pytest.MonkeyPatch, text: str, expected: list[str]
) -> None:
    monkeypatch.syspath_prepend(PLANTED)
    error = here.error(text)
    assert error.exit_code == 6 and all(part in str(error) for part in expected), error
    assert not here.study.exists() and not here.started


def test_unavailable_levels_are_skipped(here: Folder) -> None:
    text = "factors: {batch_size: [16, 32], gpus: [0, 4]}\n" + NO_RERUNS
    plan = here.command("plan", design(here.folder, text)).stdout
    assert "4 GPUs requested, but none is available" in plan
    here.run(text)
    results = here.results()
    assert results["trials"]["outcomes"] == {"ok": 2} and results["trials"]["remaining"] == 0
    assert [each["levels"] for each in results["skipped"]] == [
        {"batch_size": 16, "gpus": 4},
        {"batch_size": 32, "gpus": 4},
    ]


def test_an_edited_design(here: Folder) -> None:
    here.run("factors: {batch_size: [16, 32]}\n" + NO_RERUNS)
    assert here.started == 2
    here.run("factors: {batch_size: [16, 32, 64]}\n" + NO_RERUNS)
    assert here.started == 3 and here.results()["trials"]["done"] == 3
    here.run("factors: {batch_size: [32, 64]}\n" + NO_RERUNS)
    results = here.results()
    assert here.started == 3
    shown = {each["levels"]["batch_size"] for each in results["configurations"]}
    assert shown == {32, 64}
    assert any(text.startswith("1 configuration") for text in results["notes"])


def test_only_damaged_and_deleted_trials_are_rerun(here: Folder) -> None:
    here.run(FOUR)
    first, second, _, _ = sorted(here.study.glob("*/r1a1"))
    (first / "run.json").write_bytes(b"\0" * 100)
    shutil.rmtree(second)
    shutil.rmtree(here.study / "ledger")
    results = here.results()
    assert results["trials"]["done"] == 2 and results["trials"]["remaining"] == 2
    assert any("counts as lost and is retried" in text for text in results["notes"])
    assert "counts as lost" in here.run(FOUR)
    assert here.started == 6 and (first / "run.json").read_bytes() == b"\0" * 100
    assert (first.parent / "r1a2").is_dir() and (second.parent / "r1a2").is_dir()
    assert here.results()["trials"]["outcomes"] == {"ok": 4}


def test_a_folder_of_another_machine_or_another_study(here: Folder) -> None:
    here.run("factors: {batch_size: [16, 32]}\n" + NO_RERUNS)
    file = here.study / "study.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "machine": "128 × Another"}))
    messages = here.run(FOUR, code=5)
    assert "started on another machine (128 × Another" in messages and "study merge" in messages
    assert here.results()["trials"]["done"] == 2, "it can be read anywhere"
    file.write_text(json.dumps({**facts, "name": "plan:ted"}))
    assert "contains another study, 'plan:ted'" in here.run(FOUR, code=5)
    assert here.started == 2
    file.write_text('{"format": 1')
    stderr = here.command("show", here.study, code=3).stderr
    assert "Cannot read" in stderr and "study.json" in stderr
    here.run(FOUR)
    assert here.started == here.results()["trials"]["done"] == 4, "study.json is written again"


def test_a_study_is_found_by_a_name_with_spaces(here: Folder) -> None:
    here.run(f"name: my study\nworkload: cnn\nfixed: {{framework: made_up.loop}}\n{FOUR}")
    assert "4 trials" in here.command("show", "my study").stdout


def test_another_design_of_the_same_name(here: Folder) -> None:
    here.run("factors: {batch_size: [16]}\n" + NO_RERUNS)
    other = here.folder / "project"
    other.mkdir()
    file = design(other, "factors: {batch_size: [17]}\n" + NO_RERUNS)
    done = study("run", file, "--out", here.folder, env=here.env)
    assert done.returncode == 5 and "contains another study, 'planted' from " in done.stderr


def test_studies_of_two_machines_are_merged(here: Folder) -> None:
    text = "factors: {batch_size: [16, 32]}\n" + NO_RERUNS
    here.run(text)
    other = Path(shutil.copytree(here.study, here.folder / "other"))
    facts = json.loads((other / "study.json").read_text())
    (other / "study.json").write_text(json.dumps({**facts, "machine": "128 × Another"}))
    both = here.folder / "both"
    done = study("merge", here.study, other, "--out", both, env=here.env)
    assert done.returncode == 0 and "2 studies from 2 machines" in done.stderr
    shown = here.command("report", both).stdout
    assert "machine" in shown and "128 × Another" in shown
    assert here.results("both")["trials"]["outcomes"] == {"ok": 4}
    here.command("run", both, code=3)


def test_a_folder_that_cannot_be_written(here: Folder) -> None:
    (here.folder / "file").write_text("")
    file = design(here.folder, FOUR)
    done = study("run", file, "--out", here.folder / "file", env=here.env)
    assert done.returncode == 5 and "Cannot write the study" in done.stderr
    assert "Traceback" not in done.stderr and not here.started


def test_reading_a_study_writes_nothing(here: Folder) -> None:
    here.run("factors: {batch_size: [16, 32]}\n" + NO_RERUNS)
    shutil.rmtree(here.study / "derived")
    with exclusive_run(StudyPaths(here.study)):
        pass  # leaves the lock file
    shutil.rmtree(here.study / "ledger")
    before = sorted((str(p), p.stat().st_mtime_ns) for p in here.study.rglob("*"))
    assert here.results()["trials"]["done"] == 2
    here.command("plan", design(here.folder, FOUR))
    after = sorted((str(p), p.stat().st_mtime_ns) for p in here.study.rglob("*"))
    assert after == before


def test_an_invalid_custom_workload(here: Folder) -> None:
    """Its file is found relative to the design, whatever the current folder is."""
    (here.folder / "mine.py").write_text("def workload():\n    return 7\n")
    text = f"workload: mine.py:workload\nfactors: {{batch_size: [16, 32]}}\n{NO_RERUNS}"
    messages = here.run(text, code=4)
    assert "is skipped" in messages and "mine.py" in messages
    assert "no such file" not in messages.lower()


def test_a_custom_workload_that_changes_between_runs(here: Folder) -> None:
    """A message and the report say that the trials use different code."""
    mine = here.folder / "mine.py"
    mine.write_text("def workload(): ...\n")
    text = "workload: mine.py:workload\nfixed: {framework: made_up.loop}\n" + NO_RERUNS
    here.run(text + "factors: {batch_size: [16]}\n")
    assert not any("versions" in remark for remark in here.results()["notes"])
    mine.write_text("def workload(): return 1\n")
    messages = here.run(text + "factors: {batch_size: [16, 32]}\n")
    assert "mine.py changed between runs of the study: the trials use 2 versions" in messages
    assert any("2 versions" in remark for remark in here.results()["notes"])


def test_an_additional_level_keeps_the_reference_trial(here: Folder) -> None:
    """The middle level changes, but the throughput of another trial could not be compared."""
    blocks = "blocks: {size: 2, reruns: 0}\n"
    here.run("factors: {batch_size: [16, 32, 64]}\n" + blocks)
    here.run("factors: {batch_size: [16, 32, 64, 128, 256, 512]}\n" + blocks)
    references = {path.parent.name for path in here.study.glob("*/s*a1")}
    assert len(references) == 1
    file = design(here.folder, FOUR)
    assert "has changed since the study ran" in here.command("show", file).stderr


def test_no_available_trial(here: Folder) -> None:
    file = design(here.folder, "factors: {cpus: [5000, 6000]}\n")
    shown = here.command("plan", file).stdout
    assert "on this machine" in shown
    assert "5000 CPUs requested, but only" in shown and "6000 CPUs" in shown
    assert f"study plan {file}" in here.command("run", file, code=6).stderr


def test_the_report_starts_with_a_warning_about_interference(here: Folder) -> None:
    here.run(FOUR)
    (ledger,) = (here.study / "ledger").iterdir()
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    reason = {"kind": "cpu", "value": 1.5, "cores": 2.0}
    changed = [{**line, "interference": [reason]} for line in lines]
    ledger.write_text("".join(json.dumps(line) + "\n" for line in changed))
    results = here.results()
    warning = results["warning"]
    assert results["trials"]["with_interference"] == 4 and warning
    shown = " ".join(here.command("report", here.study).stdout.split())
    assert shown.index(warning[:40]) < shown.index("Best")
    assert warning[:40] in (here.study / "derived" / "report.html").read_text()
