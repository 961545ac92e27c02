"""Output and reports of `stepscope trial`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.cli.trial import _show
from stepscope.records import ExitStatus, Outcome
from stepscope.report.trial.view import trial_view
from stepscope.runs import facts
from synthetic import RUNNING
from synthetic_trials import Trial, write_trial


def test_the_outcome_of_a_trial_that_could_not_be_recorded_is_in_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(facts, "is_alive", lambda monitor, folder: True)
    paths = write_trial(tmp_path / "run", Trial(exit_status=RUNNING))
    exit_status = ExitStatus(Outcome.CRASHED, "the disk with the run folder is full")
    _show([trial_view(paths.folder, exit_status)], quiet=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["outcome"] == "crashed"
    assert json.loads(paths.summary_json.read_text())["outcome"] == "crashed"
