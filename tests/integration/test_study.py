"""`stepscope study`, from its design to its report, with trials that train nothing."""

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
from stepscope.runs.facts import ending_of, read_facts
from stepscope.studies.folder import StudyPaths, alone
from stepscope.trials.processes import trial_processes
from studies import PLANTED, STUDY, design, planted_environment, study

CALM = "blocks: {reruns: 0, sentinel: none}\n"
"""Other tests run at the same time: what they disturb is not run again."""
FOUR = f"factors: {{batch_size: [16, 32, 64, 128]}}\n{CALM}"
TEACHES = """
factors:
  batch_size: [16, 64]
  workers: [0, 1, 2, 4]
skip: {when: workers == 4 and batch_size == 16, because: it is known}
repeats: 2
blocks: {reruns: 0, size: 7}
"""
DYING = f"workload: cnn\nfixed: {{framework: made_up.dying, data: random}}\n{FOUR}"


class Folder:
    """A place for a study, and its commands in an environment with planted formulas."""

    def __init__(self, folder: Path, **planted: Any) -> None:
        self.folder = folder
        self.diary = folder / "diary"
        self.env = planted_environment(folder, diary=self.diary, **planted)
        self.env["COLUMNS"] = "200"
        self.study = folder / "planted"

    def run(self, text: str, *options: str, code: int = 0, name: str = "planted") -> str:
        """Run a design; what it said."""
        return self.ask("run", design(self.folder, text, name), *options, code=code).stderr

    def ask(
        self, command: str, *options: str | Path, code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        done = study(command, *options, "--out", self.folder, env=self.env)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == code, done.stderr
        return done

    def refusal(self, text: str, *options: str) -> StepscopeError:
        """Why a design is not run at all; here, as no process is started for it."""
        command = ["study", "run", str(design(self.folder, text)), "--out", str(self.folder)]
        done = CliRunner(env=self.env).invoke(app, [*command, *options])
        assert isinstance(done.exception, StepscopeError), done.output
        return done.exception

    def told(self, name: str = "planted") -> dict[str, Any]:
        """What `study show --json` tells; here, as starting it takes longer than a trial."""
        return study_dict(read_view(self.folder / name))

    def start(self, text: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*STUDY, "run", str(design(self.folder, text)), "--out", str(self.folder)],
            env=self.env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, begun: int) -> None:
        until = time.monotonic() + 60
        while self.begun < begun and time.monotonic() < until:
            time.sleep(0.01)
        assert self.begun >= begun

    @property
    def begun(self) -> int:
        return self.diary.read_text().count(" begin ") if self.diary.exists() else 0

    def outcomes(self) -> Counter[tuple[str, str]]:
        """How the attempts at each trial ended: by its place without the attempt."""
        found: Counter[tuple[str, str]] = Counter()
        for facts in self.study.glob("*/r*a*/run.json"):
            place = f"{facts.parent.parent.name}/{facts.parent.name.partition('a')[0]}"
            ending = ending_of(read_facts(facts.parent), facts.parent)
            found[place, ending.outcome.value] += 1
        return found


@pytest.fixture
def here(tmp_path: Path) -> Folder:
    return Folder(tmp_path, formula="1000 + batch_size")


def test_from_its_design_to_what_it_teaches(tmp_path: Path) -> None:
    """A batch that matters 1.5 times, and workers of which more than two do not pay."""
    formula = "1000 * (1.5 if batch_size == 64 else 1) * (1 + min(workers, 2)) * exp(0.01 * noise)"
    here = Folder(tmp_path, formula=formula, memory="1e9 + 1e7 * batch_size")
    text = TEACHES
    file = design(tmp_path, text)
    plan = here.ask("plan", file).stdout
    assert "14 trials to run" in plan and "it is known" in plan and not here.study.exists()
    planned = json.loads(here.ask("plan", file, "--json").stdout)
    assert (planned["trials"], planned["done"], planned["blocks"]) == (14, 0, 2)
    assert not planned["seconds_measured"]

    said = here.run(text)
    assert "[14/14]" in said and "report:" in said
    assert here.begun == 16, "two blocks begin with the sentinel"
    assert sorted(here.outcomes().values()) == [1] * 14
    planned = json.loads(here.ask("plan", file, "--json").stdout)
    assert (planned["done"], planned["to_come"], planned["seconds_measured"]) == (14, 0, True)

    told = json.loads(here.ask("report", file, "--json").stdout)
    trials = {key: value for key, value in told["trials"].items() if key != "disturbed"}
    assert trials == {
        "planned": 14,
        "finished": 14,
        "pending": 0,
        "attempts": 16,
        "outcomes": {"ok": 14},
    }
    (effects,) = (e for e in told["effects"] if e["response"] == "samples_per_second")
    sizes = {effect["factor"]: effect["size"] for effect in effects["main"]}
    assert sizes["batch_size"]["low"] <= 1.5 <= sizes["batch_size"]["high"]
    assert sizes["workers"]["low"] <= 3.0 <= sizes["workers"]["high"]
    assert sizes["batch_size"]["high"] / sizes["batch_size"]["low"] < 1.1
    (ranking,) = told["sensitivity"]
    assert [effect["factor"] for effect in ranking["effects"]] == ["workers", "batch_size"]
    (curve,) = (
        c for c in told["curves"] if c["factor"] == "workers" and c["knee"] and not c["group"]
    )
    assert curve["knee"]["level"] == 2
    (skipped,) = told["skipped"]
    assert skipped["levels"] == {"batch_size": 16, "workers": 4}
    assert "it is known" in skipped["reason"]
    derived = {path.name for path in (here.study / "derived").iterdir()}
    assert {"report.html", "effects.csv", "trials.csv"} <= derived
    shown = here.ask("show", file).stdout
    assert "workers" in shown and "batch_size" in shown

    again = here.run(text)
    assert "all 14 trials are done" in again and here.begun == 16


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_interrupted_it_goes_on_from_there(here: Folder, number: signal.Signals) -> None:
    here.env["PLANTED_REAL_S"] = "0.3"
    runner = here.start(FOUR)
    here.wait_for(2)
    name = runner_name(runner.pid)
    runner.send_signal(number)
    _, said = runner.communicate(timeout=60)
    assert runner.returncode == 130 and "Traceback" not in said
    assert "interrupted: the same command goes on from here" in said
    assert not trial_processes.processes_of(name)
    done = here.told()["trials"]["finished"]
    assert 1 <= done < 4

    here.env["PLANTED_REAL_S"] = "0.02"
    assert "done already" in here.run(FOUR) or done == 0
    answers = [place for (place, outcome) in here.outcomes() if outcome == "ok"]
    assert len(answers) == 4 and here.outcomes().total() <= 5
    assert all(here.outcomes()[place, "ok"] == 1 for place in answers)


def test_interrupted_while_it_waits_for_another_study(here: Folder) -> None:
    lock = here.folder / "state" / "machine.lock"
    lock.parent.mkdir()
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        runner = here.start(FOUR)
        assert runner.stderr is not None
        while "waiting for its turn" not in (line := runner.stderr.readline()):
            assert line, "it did not wait"
        runner.send_signal(signal.SIGINT)
        _, said = runner.communicate(timeout=60)
    assert runner.returncode == 130 and "Traceback" not in said
    assert not here.begun
    here.run(FOUR)
    assert sorted(here.outcomes().values()) == [1] * 4


def runner_name(pid: int) -> str:
    me = trial_processes.identify(pid)
    assert me is not None
    return f"{pid}.{me.started}.{trial_processes.runner_name().split('.')[2]}"


def test_while_it_runs(here: Folder) -> None:
    """Others can see how far it is, and a second one is told who runs it."""
    here.env["PLANTED_REAL_S"] = "1"
    many = f"factors: {{batch_size: {list(range(1, 100))}}}\n{CALM}"
    runner = here.start(many)
    try:
        here.wait_for(2)
        told = json.loads(here.ask("show", here.study, "--json").stdout)
        assert told["state"] == "running" and told["running"]["pid"] == runner.pid
        assert told["running"]["trial"].startswith("batch_size ")
        assert told["trials"]["finished"] >= 1 and told["trials"]["pending"] >= 1
        assert "batch_size" in here.ask("show", "planted").stdout
        done = here.ask("run", design(here.folder, many), code=7)
        assert f"by process {runner.pid} on " in done.stderr and "study show" in done.stderr
        assert runner.poll() is None
    finally:
        runner.send_signal(signal.SIGINT)
        runner.communicate(timeout=60)
    assert runner.returncode == 130
    assert here.told()["running"] is None


def test_an_oom_is_a_result_and_what_needs_more_is_skipped(tmp_path: Path) -> None:
    here = Folder(tmp_path, formula="100.0", oom="batch_size > 16")
    batches = ", ".join(str(16 * number) for number in range(1, 13))
    text = f"factors: {{batch_size: [{batches}]}}\noom: {{test: 0.3}}\nseed: 4\n{CALM}"
    here.run(text)
    told = here.told()
    trained = told["trials"]["outcomes"]["ok"]
    ran_out = told["trials"]["outcomes"]["gpu_oom"]
    skipped = {each["levels"]["batch_size"]: each["reason"] for each in told["skipped"]}
    assert trained == 1 and ran_out >= 2 and len(skipped) >= 3
    assert ran_out + len(skipped) == 11
    tried = {each["levels"]["batch_size"] for each in told["configurations"]}
    least = min(batch for batch in tried if batch > 16)
    assert all(reason.startswith("gpu_oom already with") for reason in skipped.values())
    assert min(skipped) > least
    assert max(tried) > min(skipped), "a share is tried in any case"
    rows = (here.study / "derived" / "skipped.csv").read_text()
    assert rows.count("gpu_oom already with") == len(skipped)
    begun = here.begun
    assert "all" in here.run(text) and here.begun == begun, "what was skipped stays skipped"


def test_what_fails_around_a_trial_is_tried_again_twice_at_most(tmp_path: Path) -> None:
    here = Folder(tmp_path, dies="batch_size == 32", deaths=2)
    here.run(DYING)
    assert sorted(here.outcomes().values()) == [1, 1, 1, 1, 2]
    told = here.told()
    assert told["trials"]["outcomes"] == {"ok": 4} and told["trials"]["attempts"] == 6
    assert all("SIGKILL" in each["reason"] for each in told["failures"])

    shutil.rmtree(here.study)
    here.env["PLANTED_DEATHS"] = "99"
    here.run(DYING)
    assert sorted(here.outcomes().values()) == [1, 1, 1, 3]
    told = here.told()
    assert told["trials"]["outcomes"] == {"crashed": 1, "ok": 3} and not told["trials"]["pending"]
    here.env["PLANTED_DEATHS"] = "0"
    here.run(DYING)
    assert sorted(here.outcomes().values()) == [1, 1, 1, 1, 3], "run again, it has a new chance"


def test_where_everything_fails_it_stops_and_says_why(tmp_path: Path) -> None:
    here = Folder(tmp_path, dies="True", deaths=1)
    said = here.run(DYING, code=5)
    assert "3 configurations in a row failed" in said and "SIGKILL" in said
    assert here.outcomes().total() == 3
    here.run(DYING)
    assert here.told()["trials"]["outcomes"] == {"ok": 4}


def test_a_budget_of_trials_and_one_of_time(here: Folder) -> None:
    said = here.run(FOUR + "budget: {trials: 2}\n")
    assert "the budget is used up" in said and "raise it in the design to go on" in said
    assert here.told()["trials"]["finished"] == here.begun == 2
    said = here.run(FOUR + "budget: {trials: 99, time: 0.1 s}\n")
    assert "budget is used up" in said and here.begun == 2
    said = here.run(FOUR + "budget: 10 min\n")
    assert "budget is used up" not in said and here.begun == 4
    assert sorted(here.outcomes().values()) == [1] * 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("factors: {batchsize: [1, 2]}\n", ["planted.yaml:3", "batchsize", "batch_size"]),
        ("factors: {batch_size: []}\n", ["planted.yaml:3", "batch_size"]),
        ("factors: {batch_size: [1, 0]}\n", ["planted.yaml:3", "batch_size"]),
        ("factors: {workers: [0, 1]}\nskip: [workers < 1, workers > 0]\n", ["none is left"]),
        ("factors: {gpus: [4, 8]}\n" + CALM, ["Nothing of planted can be tried", "GPUs"]),
        ("factors: [\n", ["planted.yaml:"]),
        ("", ["planted.yaml"]),
    ],
)
def test_a_design_that_cannot_be_used(
    here: Folder, monkeypatch: pytest.MonkeyPatch, text: str, said: list[str]
) -> None:
    monkeypatch.syspath_prepend(PLANTED)
    error = here.refusal(text)
    assert error.exit_code == 6 and all(words in str(error) for words in said), error
    assert not here.study.exists() and not here.begun


def test_a_level_that_cannot_be_had_here_is_left_out(here: Folder) -> None:
    text = "factors: {batch_size: [16, 32], gpus: [0, 4]}\n" + CALM
    assert "4 GPUs cannot be had here" in here.ask("plan", design(here.folder, text)).stdout
    here.run(text)
    told = here.told()
    assert told["trials"]["outcomes"] == {"ok": 2} and told["trials"]["pending"] == 0
    assert [each["levels"] for each in told["skipped"]] == [
        {"batch_size": 16, "gpus": 4},
        {"batch_size": 32, "gpus": 4},
    ]


def test_a_design_that_is_edited(here: Folder) -> None:
    here.run("factors: {batch_size: [16, 32]}\n" + CALM)
    assert here.begun == 2
    here.run("factors: {batch_size: [16, 32, 64]}\n" + CALM)
    assert here.begun == 3 and here.told()["trials"]["finished"] == 3
    here.run("factors: {batch_size: [32, 64]}\n" + CALM)
    told = here.told()
    assert here.begun == 3
    shown = {each["levels"]["batch_size"] for each in told["configurations"]}
    assert shown == {32, 64}
    assert any("no part of the design any more" in text for text in told["remarks"])


def test_what_is_damaged_or_deleted_is_run_again_and_nothing_else(here: Folder) -> None:
    here.run(FOUR)
    first, second, _, _ = sorted(here.study.glob("*/r1a1"))
    (first / "run.json").write_bytes(b"\0" * 100)
    shutil.rmtree(second)
    shutil.rmtree(here.study / "ledger")
    told = here.told()
    assert told["trials"]["finished"] == 2 and told["trials"]["pending"] == 2
    assert any("counts as lost, and is tried again" in text for text in told["remarks"])
    assert "counts as lost" in here.run(FOUR)
    assert here.begun == 6 and (first / "run.json").read_bytes() == b"\0" * 100
    assert (first.parent / "r1a2").is_dir() and (second.parent / "r1a2").is_dir()
    assert here.told()["trials"]["outcomes"] == {"ok": 4}


def test_a_study_of_another_machine_or_of_another_name(here: Folder) -> None:
    here.run("factors: {batch_size: [16, 32]}\n" + CALM)
    file = here.study / "study.json"
    told = json.loads(file.read_text())
    file.write_text(json.dumps({**told, "machine": "128 × Another"}))
    said = here.run(FOUR, code=5)
    assert "128 × Another" in said and "study merge" in said
    assert here.told()["trials"]["finished"] == 2, "it can be read anywhere"
    file.write_text(json.dumps({**told, "name": "plan:ted"}))
    assert "is of another study, 'plan:ted'" in here.run(FOUR, code=5)
    assert here.begun == 2
    file.write_text('{"format": 1')
    assert "study.json cannot be read" in here.ask("show", here.study, code=3).stderr
    here.run(FOUR)
    assert here.begun == here.told()["trials"]["finished"] == 4, "it is made anew"


def test_a_name_with_spaces_is_found_by_it(here: Folder) -> None:
    here.run(f"name: my study\nworkload: cnn\nfixed: {{framework: made_up.loop}}\n{FOUR}")
    assert "4 trials" in here.ask("show", "my study").stdout


def test_another_design_of_the_same_name(here: Folder) -> None:
    here.run("factors: {batch_size: [16]}\n" + CALM)
    other = here.folder / "project"
    other.mkdir()
    file = design(other, "factors: {batch_size: [17]}\n" + CALM)
    done = study("run", file, "--out", here.folder, env=here.env)
    assert done.returncode == 5 and "is of another study, 'planted' by " in done.stderr


def test_studies_of_two_machines_are_joined(here: Folder) -> None:
    text = "factors: {batch_size: [16, 32]}\n" + CALM
    here.run(text)
    other = Path(shutil.copytree(here.study, here.folder / "other"))
    told = json.loads((other / "study.json").read_text())
    (other / "study.json").write_text(json.dumps({**told, "machine": "128 × Another"}))
    both = here.folder / "both"
    done = study("merge", here.study, other, "--out", both, env=here.env)
    assert done.returncode == 0 and "2 studies of 2 machines" in done.stderr
    shown = here.ask("report", both).stdout
    assert "machine" in shown and "128 × Another" in shown
    assert here.told("both")["trials"]["outcomes"] == {"ok": 4}
    here.ask("run", both, code=3)


def test_places_that_cannot_be_written(here: Folder) -> None:
    (here.folder / "file").write_text("")
    file = design(here.folder, FOUR)
    done = study("run", file, "--out", here.folder / "file", env=here.env)
    assert done.returncode == 5 and "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr and not here.begun


def test_who_only_looks_writes_nothing(here: Folder) -> None:
    here.run("factors: {batch_size: [16, 32]}\n" + CALM)
    shutil.rmtree(here.study / "derived")
    with alone(StudyPaths(here.study)):
        pass  # leaves its lock behind
    shutil.rmtree(here.study / "ledger")
    before = sorted((str(p), p.stat().st_mtime_ns) for p in here.study.rglob("*"))
    assert here.told()["trials"]["finished"] == 2
    here.ask("plan", design(here.folder, FOUR))
    after = sorted((str(p), p.stat().st_mtime_ns) for p in here.study.rglob("*"))
    assert after == before


def test_a_workload_beside_the_design(here: Folder) -> None:
    """Its file is found from wherever the study is run; if it is none, that is an error."""
    (here.folder / "mine.py").write_text("def workload():\n    return 7\n")
    text = f"workload: mine.py:workload\nfactors: {{batch_size: [16, 32]}}\n{CALM}"
    said = here.run(text, code=4)
    assert "is left out" in said and "mine.py" in said and "no such file" not in said.lower()


def test_a_workload_that_is_edited_between_two_runs(here: Folder) -> None:
    """Its trials are not of the same code: that is said, there and in the report."""
    mine = here.folder / "mine.py"
    mine.write_text("def workload(): ...\n")
    text = "workload: mine.py:workload\nfixed: {framework: made_up.loop}\n" + CALM
    here.run(text + "factors: {batch_size: [16]}\n")
    assert not any("versions" in remark for remark in here.told()["remarks"])
    mine.write_text("def workload(): return 1\n")
    said = here.run(text + "factors: {batch_size: [16, 32]}\n")
    assert "mine.py was changed between runs of the study: its trials are of 2 versions" in said
    assert any("2 versions" in remark for remark in here.told()["remarks"])


def test_a_level_more_keeps_the_sentinel(here: Folder) -> None:
    """The middle of the levels is another one then, and its rate could not be compared."""
    blocks = "blocks: {size: 2, reruns: 0}\n"
    here.run("factors: {batch_size: [16, 32, 64]}\n" + blocks)
    here.run("factors: {batch_size: [16, 32, 64, 128, 256, 512]}\n" + blocks)
    sentinels = {path.parent.name for path in here.study.glob("*/s*a1")}
    assert len(sentinels) == 1
    file = design(here.folder, FOUR)
    assert "was changed since the study was run" in here.ask("show", file).stderr


@pytest.mark.parametrize("interval", ["0", "nan", "-1", "100"])
def test_an_interval_that_is_none(here: Folder, interval: str) -> None:
    error = here.refusal(FOUR, "--interval", interval)
    assert error.exit_code == 5 and "Give 0.02 to 60 seconds" in str(error)
    assert not here.begun and not here.study.exists()


def test_nothing_that_can_be_had_here(here: Folder) -> None:
    file = design(here.folder, "factors: {cpus: [5000, 6000]}\n")
    shown = here.ask("plan", file).stdout
    assert "nothing of it can be tried on this machine" in shown
    assert "5000 CPUs cannot be had here" in shown and "6000 CPUs" in shown
    assert f"study plan {file}" in here.ask("run", file, code=6).stderr


def test_a_study_that_was_disturbed_says_so_on_top(here: Folder) -> None:
    here.run(FOUR)
    (ledger,) = (here.study / "ledger").iterdir()
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    noisy = [{**line, "noise": ["others used 1.5 of 2 cores"]} for line in lines]
    ledger.write_text("".join(json.dumps(line) + "\n" for line in noisy))
    told = here.told()
    assert told["trials"]["disturbed"] == 4 and "do not trust" in told["warning"]
    shown = here.ask("report", here.study).stdout
    assert shown.index("do not trust") < shown.index("Best")
    assert "do not trust" in (here.study / "derived" / "report.html").read_text()
