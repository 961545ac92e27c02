"""`stepscope trial` shows what its trials were, and writes their reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepscope.cli.trial import _show
from stepscope.records import Ending, Outcome
from stepscope.report.trial.view import trial_view
from stepscope.runs import facts
from synthetic import RUNNING
from synthetic_trials import Trial, write_trial


def test_a_trial_that_could_not_write_its_end_has_the_same_end_in_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(facts, "is_alive", lambda monitor, folder: True)
    paths = write_trial(tmp_path / "run", Trial(ending=RUNNING))
    ending = Ending(Outcome.CRASHED, "the disk of its run folder is full")
    _show([trial_view(paths.folder, ending)], quiet=True, as_json=True)
    assert json.loads(capsys.readouterr().out)["outcome"] == "crashed"
    assert json.loads(paths.summary_json.read_text())["outcome"] == "crashed"
