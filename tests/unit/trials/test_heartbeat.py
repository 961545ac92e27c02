"""The heartbeat reports progress and reads files only after they change."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.runs.paths import RunPaths
from stepscope.trials import heartbeat
from stepscope.trials.heartbeat import Heartbeat
from synthetic_trials import CNN, write_trial


def test_rank_files_are_read_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_trial(tmp_path / "run")
    read: list[int] = []

    def count(paths: RunPaths, rank: int) -> object:
        read.append(rank)
        return read_rank(paths, rank)

    read_rank = heartbeat.read_rank
    monkeypatch.setattr(heartbeat, "read_rank", count)
    beat = Heartbeat(paths, CNN)
    progress = beat.read(at_once=True)
    assert progress.steps > 0 and read == [0]
    with paths.trial_steps(0).open("ab") as steps:
        steps.write(b"x" * heartbeat.RECORD.size)
    assert beat.read(at_once=True).steps == progress.steps + 1 and read == [0]
    paths.trial_rank(0).write_text('{"pid": 1, "phase": "data"}')
    assert beat.read(at_once=True).silent_s == 0.0 and read == [0, 0]
