"""`stepscope explain`, and the finding at the end of other commands: what is printed, and when."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from conftest import STEPSCOPE
from stepscope.analysis.run.data import RunData
from stepscope.cli.app import app
from stepscope.cli.run import show_run
from stepscope.cli.trial import _show
from stepscope.records import Diagnosis
from stepscope.report.bottleneck.json import FINDING_KEYS, KEYS
from stepscope.report.trial.view import trial_view
from synthetic import Plan, write_cut_off_run, write_empty_run, write_run
from synthetic_diagnoses import BAD, WORKERS, WORKERS_SUMMARY
from synthetic_trials import Trial, even_steps, write_trial

Verdicts = Callable[[Diagnosis | Exception], None]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Verdicts:
    """What the analysis comes to, whatever the run is like."""

    def say(verdict: Diagnosis | Exception) -> None:
        def explain(data: RunData) -> Diagnosis:
            if isinstance(verdict, Exception):
                raise verdict
            return verdict

        for module in ("stepscope.analysis.bottleneck.explain", "stepscope.report.bottleneck.view"):
            monkeypatch.setattr(f"{module}.explain", explain)

    return say


def stepscope(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments)


def short(folder: Path) -> Path:
    return write_run(folder, Plan(seconds=6, epochs=2, batches=8)).folder


@pytest.mark.parametrize("write", [write_run, write_empty_run, write_cut_off_run])
def test_every_run_is_explained_by_the_real_command(
    write: Callable[[Path], object], runs: Path
) -> None:
    write(runs / "one")
    done = subprocess.run([*STEPSCOPE, "explain"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("resnet18-cifar  ")
    assert "Judged: " in done.stdout and "\x1b" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    told = json.loads(subprocess.check_output([*STEPSCOPE, "explain", "--json"]))
    assert list(told) == [key for key, _ in KEYS]
    assert [list(each) for each in told["findings"]] == [
        [key for key, _, _ in FINDING_KEYS] for _ in told["findings"]
    ]
    assert " ".join(told["says"].split()) in " ".join(done.stdout.split())


def test_only_what_is_needed_is_imported(runs: Path) -> None:
    """The explanation alone has to be quick: no panels, no page, and no terminal for programs."""
    short(runs / "one")
    program = """
import sys
from stepscope.cli.app import app
sys.argv = ["stepscope", "explain", "--json"]
try: app()
except SystemExit: pass
print([m for m in ("rich.console", "stepscope.report.run.view", "stepscope.report.run.panels",
                   "stepscope.report.kit.html") if m in sys.modules])
"""
    lines = subprocess.check_output([sys.executable, "-c", program], text=True).splitlines()
    assert lines[-1] == "[]"


def test_runs_are_named_as_for_a_report(runs: Path, found: Verdicts) -> None:
    found(BAD)
    folder = short(runs / "one")
    for arguments in ([], [str(runs)], [str(folder)], [str(folder / "run.json")]):
        result = stepscope("explain", *arguments)
        assert result.exit_code == 0
        assert "Training waits" in result.output


def test_no_run_at_all_is_one_line(runs: Path) -> None:
    done = subprocess.run([*STEPSCOPE, "explain"], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.startswith("stepscope: There are no runs in runs.")


def test_all_findings_in_full_when_asked_for(runs: Path, found: Verdicts) -> None:
    found(BAD)
    short(runs / "one")
    assert "copy_rate" not in stepscope("explain").output
    assert "copy_rate" in stepscope("explain", "--all").output


def test_a_report_ends_with_the_finding(runs: Path, found: Verdicts) -> None:
    found(BAD)
    folder = short(runs / "one")
    lines = stepscope("report").output.splitlines()
    assert lines[-1] == "More  stepscope explain runs/one"
    assert any(line.startswith("Training waits") for line in lines)
    told = json.loads(stepscope("report", "--json").output)
    assert told["explained"]["cause"] == "input.workers"
    assert json.loads((folder / "derived" / "findings.json").read_text())["cause"] == WORKERS.cause


def test_an_error_of_the_analysis_costs_no_report(runs: Path, found: Verdicts) -> None:
    found(ZeroDivisionError("division by zero"))
    folder = short(runs / "one")
    result = stepscope("report")
    assert result.exit_code == 0
    assert "could not be found out" in result.output
    assert "Duration" in result.output
    assert (folder / "derived" / "report.html").exists()
    assert json.loads((folder / "derived" / "summary.json").read_text())["explained"] is None


def test_a_run_ends_with_the_finding_unless_it_is_quiet(
    runs: Path, found: Verdicts, capfd: pytest.CaptureFixture[str]
) -> None:
    found(BAD)
    folder = short(runs / "one")
    show_run(folder, quiet=False, as_json=False, begin=lambda: None)
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.rstrip().endswith("More  stepscope explain runs/one")
    assert "1. num_workers=3  (train.py:41)" in said.err
    show_run(folder, quiet=True, as_json=True, begin=lambda: None)
    said = capfd.readouterr()
    assert said.err == ""
    assert json.loads(said.out)["explained"]["says"] == WORKERS_SUMMARY


def test_a_trial_ends_with_the_finding_of_its_last_repeat_that_went_well(
    runs: Path, found: Verdicts, capfd: pytest.CaptureFixture[str]
) -> None:
    found(BAD)
    good = Trial(steps=even_steps(40))
    bad = replace(good, ending={"outcome": "crashed", "reason": "so it is"})
    views = [
        trial_view(write_trial(runs / name, each).folder)
        for name, each in (("a", good), ("b", bad))
    ]
    _show(views, quiet=False, as_json=True)
    said = capfd.readouterr()
    assert said.err.count("Training waits") == 1
    assert "Next:" not in said.err
    assert json.loads(said.out)["explained"]["cause"] == "input.workers"
    _show(views[1:], quiet=False, as_json=True)
    said = capfd.readouterr()
    assert "Training waits" not in said.err
    assert json.loads(said.out)["explained"] is None
