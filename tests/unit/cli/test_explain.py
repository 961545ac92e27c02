"""`stepscope explain`, and the finding at the end of other commands."""

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
from stepscope.cli.run import Shown, show_run
from stepscope.cli.trial import _show
from stepscope.records import Diagnosis
from stepscope.report.bottleneck.json import FINDING_KEYS, KEYS
from stepscope.report.trial.view import trial_view
from synthetic import Plan, write_cut_off_run, write_empty_run, write_run
from synthetic_diagnoses import BAD, WORKERS, WORKERS_SUMMARY
from synthetic_trials import Trial, even_steps, write_trial

SetDiagnosis = Callable[[Diagnosis | Exception], None]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.fixture
def set_diagnosis(monkeypatch: pytest.MonkeyPatch) -> SetDiagnosis:
    """Replaces the analysis by one with a fixed result."""

    def replace_explain(result: Diagnosis | Exception) -> None:
        def explain(data: RunData) -> Diagnosis:
            if isinstance(result, Exception):
                raise result
            return result

        for module in ("stepscope.analysis.bottleneck.explain", "stepscope.report.bottleneck.view"):
            monkeypatch.setattr(f"{module}.explain", explain)

    return replace_explain


def stepscope(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, arguments)


def short(folder: Path) -> Path:
    return write_run(folder, Plan(seconds=6, epochs=2, batches=8)).folder


@pytest.mark.parametrize("write", [write_run, write_empty_run, write_cut_off_run])
def test_command_explains_every_run(write: Callable[[Path], object], runs: Path) -> None:
    write(runs / "one")
    done = subprocess.run([*STEPSCOPE, "explain"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("resnet18-cifar  ")
    assert "Based on: " in done.stdout and "\x1b" not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    plain = json.loads(subprocess.check_output([*STEPSCOPE, "explain", "--json"]))
    assert list(plain) == [key for key, _ in KEYS]
    assert [list(each) for each in plain["findings"]] == [
        [key for key, _, _ in FINDING_KEYS] for _ in plain["findings"]
    ]
    assert " ".join(plain["summary"].split()) in " ".join(done.stdout.split())


def test_explain_imports_little(runs: Path) -> None:
    """It must start fast: no panels, no report page, and no rich for JSON."""
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


def test_run_argument(runs: Path, set_diagnosis: SetDiagnosis) -> None:
    set_diagnosis(BAD)
    folder = short(runs / "one")
    for arguments in ([], [str(runs)], [str(folder)], [str(folder / "run.json")]):
        result = stepscope("explain", *arguments)
        assert result.exit_code == 0
        assert "Training waits" in result.output


def test_all_shows_all_findings_in_full(runs: Path, set_diagnosis: SetDiagnosis) -> None:
    set_diagnosis(BAD)
    short(runs / "one")
    assert "copy_rate" not in stepscope("explain").output
    assert "copy_rate" in stepscope("explain", "--all").output


def test_report_ends_with_the_finding(runs: Path, set_diagnosis: SetDiagnosis) -> None:
    set_diagnosis(BAD)
    folder = short(runs / "one")
    lines = stepscope("report").output.splitlines()
    assert lines[-1] == "Details  stepscope explain runs/one"
    assert any(line.startswith("Training waits") for line in lines)
    plain = json.loads(stepscope("report", "--json").output)
    assert plain["diagnosis"]["cause"] == "input.workers"
    assert json.loads((folder / "derived" / "findings.json").read_text())["cause"] == WORKERS.cause


def test_report_survives_an_error_of_the_analysis(runs: Path, set_diagnosis: SetDiagnosis) -> None:
    set_diagnosis(ZeroDivisionError("division by zero"))
    folder = short(runs / "one")
    result = stepscope("report")
    assert result.exit_code == 0
    assert "The bottleneck could not be determined" in result.output
    assert "Duration" in result.output
    assert (folder / "derived" / "report.html").exists()
    assert json.loads((folder / "derived" / "summary.json").read_text())["diagnosis"] is None


def test_run_ends_with_the_finding_unless_quiet(
    runs: Path, set_diagnosis: SetDiagnosis, capfd: pytest.CaptureFixture[str]
) -> None:
    set_diagnosis(BAD)
    folder = short(runs / "one")
    show_run(folder, Shown(False, False, False, False), lambda: None)
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.rstrip().endswith("Details     stepscope explain runs/one")
    assert "Set num_workers=3  (train.py:41)" in printed.err
    show_run(folder, Shown(False, True, True, False), lambda: None)
    printed = capfd.readouterr()
    assert printed.err == ""
    assert json.loads(printed.out)["diagnosis"]["summary"] == WORKERS_SUMMARY


def test_trial_ends_with_the_finding_of_its_last_successful_repeat(
    runs: Path, set_diagnosis: SetDiagnosis, capfd: pytest.CaptureFixture[str]
) -> None:
    set_diagnosis(BAD)
    good = Trial(steps=even_steps(40))
    bad = replace(good, exit_status={"outcome": "crashed", "reason": "killed by SIGSEGV"})
    views = [
        trial_view(write_trial(runs / name, each).folder)
        for name, each in (("a", good), ("b", bad))
    ]
    _show(views, quiet=False, as_json=True)
    printed = capfd.readouterr()
    assert printed.err.count("Training waits") == 1
    assert "Next bottleneck:" not in printed.err
    assert json.loads(printed.out)["diagnosis"]["cause"] == "input.workers"
    _show(views[1:], quiet=False, as_json=True)
    printed = capfd.readouterr()
    assert "Training waits" not in printed.err
    assert json.loads(printed.out)["diagnosis"] is None


def test_a_command_that_failed_at_once_has_no_diagnosis(runs: Path) -> None:
    script = "raise SystemExit(2)"
    subprocess.run([*STEPSCOPE, "run", "-q", "--", sys.executable, "-c", script], check=False)

    done = CliRunner().invoke(app, ["explain"])

    text = "The command failed before it completed a step. Fix the error in its output first."
    assert text in " ".join(done.stdout.split()) and "Train for" not in done.stdout
    (run,) = runs.iterdir()
    assert "too short" not in (run / "derived" / "report.html").read_text()


def test_a_short_run_names_what_is_missing(runs: Path) -> None:
    subprocess.run([*STEPSCOPE, "run", "-q", "--", "true"], check=True)

    text = " ".join(CliRunner().invoke(app, ["explain"]).stdout.split())

    assert "Train for at least 20 steps and 3 s after the warm-up" in text
    assert "below 3.0 s (min_seconds)" in text
    assert "Confidence" not in text and "min_steps" not in text
