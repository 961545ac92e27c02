"""Errors of `stepscope.trial` if not all repeats could run."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope import api
from stepscope.api import TrialInterrupted, TrialResults, TrialsFailed
from stepscope.errors import TrialError
from stepscope.report.trial.view import trial_view
from synthetic_trials import write_trial


def test_error_in_a_later_repeat_has_the_earlier_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = [trial_view(write_trial(tmp_path / "run").folder)]
    error = TrialError("The next trial was not started", "End it")
    for results, raised in (
        (TrialResults(views, error), TrialsFailed),
        (TrialResults([], error), TrialError),
        (TrialResults(views, interrupted=True), TrialInterrupted),
    ):
        monkeypatch.setattr(api, "run_trials", lambda *_, results=results: results)
        with pytest.raises(raised) as caught:
            api.trial("cnn")
        if raised is not TrialError:
            assert caught.value.views == views
        if raised is TrialsFailed:
            assert caught.value.__cause__ is error
            assert str(caught.value) == str(error) and caught.value.exit_code == error.exit_code
