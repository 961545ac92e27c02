"""`stepscope report --format`: the full report in every format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepscope.cli.app import app
from stepscope.errors import StepscopeError
from stepscope.report.kit.renderers import RENDERERS
from synthetic import Plan, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    return write_run(folder, Plan(seconds=6, epochs=2, batches=8)).folder


@pytest.mark.parametrize("name", RENDERERS)
def test_every_format(run: Path, name: str) -> None:
    result = CliRunner().invoke(app, ["report", str(run), "--format", name])
    assert result.exit_code == 0
    assert "resnet18-cifar" in result.output
    if name == "json":
        assert json.loads(result.output) == json.loads((run / "derived/summary.json").read_text())


def test_unknown_format_lists_the_valid_ones(run: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(run), "--format", "markdwon"])
    assert isinstance(result.exception, StepscopeError)
    assert "terminal, html, json" in str(result.exception)
