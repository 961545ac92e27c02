"""Old formats stay readable: tests/data/runs has one folder of each."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from stepscope.opened_run import open_run
from stepscope.report.run.view import run_view

RUNS = Path(__file__).parents[2] / "data" / "runs"


def test_format_1(tmp_path: Path) -> None:
    run = open_run(shutil.copytree(RUNS / "format1", tmp_path / "run"))
    summary = run.summary()
    assert run.exit_status.outcome == "ok"
    assert [row.steps for row in summary.epochs] == [20, 20]
    assert [row.samples for row in summary.epochs] == [2560, 2560]
    assert {"main", "worker"} <= set(summary.roles)
    assert summary.core_seconds is not None and 5 < summary.core_seconds < 25
    assert run_view(run).charts.panels


def test_format_1_cut_off(tmp_path: Path) -> None:
    folder = shutil.copytree(RUNS / "format1-cut", tmp_path / "run")
    for stream in folder.glob("*.arrows"):
        os.utime(stream, (0, 0))  # the checkout is newer than the run
    run = open_run(folder)
    assert run.exit_status.outcome == "lost"
    assert 0 < run.summary().steps < 40
    assert run.samples("process").num_rows > 0
