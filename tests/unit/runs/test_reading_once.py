"""Reading samples is slow, so each command reads every segment only once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepscope.cli.app import app
from stepscope.cli.trial import _show
from stepscope.report.trial.view import trial_view
from stepscope.runs import segments
from synthetic import write_cut_off_run, write_run
from synthetic_trials import Trial, even_steps, write_trial


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The number of reads of each segment."""
    counts: Counter[str] = Counter()
    read = segments.read_segment

    def counted(path: Path, *args: object, **options: object) -> object:
        counts[f"{path.parent.name}/{path.name}"] += 1
        return read(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(segments, "read_segment", counted)
    return counts


@pytest.mark.parametrize("command", ["report", "explain"])
@pytest.mark.parametrize("write", [write_run, write_cut_off_run, write_trial])
def test_command_reads_each_segment_once(
    command: str, write: Callable[[Path], object], tmp_path: Path, readings: Counter[str]
) -> None:
    write(tmp_path / "run")
    done = CliRunner().invoke(app, [command, str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert len(readings) >= 2 and set(readings.values()) == {1}


def test_summary_of_trials_reads_each_segment_once(tmp_path: Path, readings: Counter[str]) -> None:
    folders = [write_trial(tmp_path / name, Trial(steps=even_steps(40))).folder for name in "ab"]
    views = [trial_view(folder) for folder in folders]
    _show(views, quiet=True, as_json=True)
    assert len(readings) >= 4 and set(readings.values()) == {1}
