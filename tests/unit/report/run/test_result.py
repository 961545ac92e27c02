"""The result that a command prints, as text and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.report.kit.document import Document
from stepscope.report.kit.renderers import RENDERERS
from stepscope.report.run.derive import derive
from stepscope.report.run.result import run_result, trials_result
from stepscope.report.run.view import RunView
from stepscope.runs.reader import open_run
from synthetic import write_run
from synthetic_trials import Trial, even_steps, write_trial

FOLDER = Path("runs/one")
OPERATOR = {"name": "aten::mm", "kind": "operator", "calls": 5, "self_cpu_us": 9.0, "cpu_us": 9.0}
PROFILE = {
    "device": "cpu",
    "steps": 5,
    "step_us": [2000.0] * 5,
    "operators": [{**OPERATOR, "self_cuda_us": None, "cuda_us": None}],
    "kernels": [],
    "sums": {"operator_cpu_us": 9.0},
    "copies": None,
    "memory": {},
    "missing": "",
    "trace": {"file": "trace0.json.gz", "bytes": 1000, "unzipped_bytes": 2000},
}


def text(document: Document) -> str:
    return RENDERERS["terminal"](document)


@pytest.fixture
def trial(tmp_path: Path) -> RunView:
    paths = write_trial(tmp_path / "trial", Trial(steps=even_steps(40)))
    paths.trial_profile(0).write_text(json.dumps(PROFILE))
    return derive(open_run(paths.folder))


def test_a_run_is_its_summary_and_its_bottleneck(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run").folder)
    (document,) = run_result(derive(run), FOLDER)
    assert document.data == json.loads(run.paths.summary_json.read_text())
    lines = text(document).splitlines()
    assert f"Report    {(FOLDER / 'derived' / 'report.html').absolute().as_uri()}" in lines
    assert lines[-1] == "Details  stepscope explain runs/one"


def test_trial_shows_its_measurements_before_the_run(trial: RunView) -> None:
    measured, run = run_result(trial, FOLDER)
    assert "Run folder" in text(measured) and "aten::mm" in text(measured)
    assert text(measured).rstrip().endswith("from the start of its processes to their exit:")
    assert "Duration" in text(run)
    assert run.data is not None and measured.data is not None
    assert run.data["trial"] == measured.data
    assert run.data["profile"]["ranks"][0]["operators"][0]["name"] == "aten::mm"


def test_trials_are_one_document_with_one_bottleneck(trial: RunView) -> None:
    assert trial.trial and trial.finding
    failed = replace(trial.trial, exit_status=replace(trial.trial.exit_status, outcome="crashed"))
    document = trials_result([trial, trial, replace(trial, trial=failed)])
    assert text(document).count(" ".join(trial.finding.first.summary.split())[:40]) == 1
    assert "More" not in text(document)
    assert document.data is not None
    assert len(document.data["profiles"]) == len(document.data["trials"]) == 3
    assert document.data["diagnosis"]["cause"] == trial.finding.first.cause
    alone = trials_result([replace(trial, trial=failed, profile=None)])
    assert alone.data is not None and alone.data["diagnosis"] is None
    assert "profiles" not in alone.data
