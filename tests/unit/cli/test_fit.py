"""The command `fit`: its options and its exit codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

from stepscope.cli.app import app
from stepscope.cli.fit import exit_code
from stepscope.errors import WorkloadError
from stepscope.fit.result import FitResult, MemoryBudget, SearchCost, Verdict
from stepscope.workloads.spec import NOT_FOR_FIT, SETTINGS

GPU = MemoryBudget("gpu", 1, 1, 1)
HOST = MemoryBudget("host", 1, 1, 1)
FITS = FitResult(Verdict.FITS, "cnn", {}, "auto", GPU, None, SearchCost(0.0, 0, 0))


def test_settings_that_fit_determines_are_hidden() -> None:
    command = typer.main.get_command(app).commands["fit"]
    hidden = {each.name for each in command.params if getattr(each, "hidden", False)}
    assert hidden == set(NOT_FOR_FIT)
    assert set(SETTINGS) <= {each.name for each in command.params}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--batch-size", "32"],
            "`--batch-size` cannot be used with `fit`, which finds the batch size. Remove "
            "--batch-size, or use `stepscope trial` to train at a given batch size",
        ),
        (
            ["--batch-size", "many"],
            "`--batch-size` cannot be used with `fit`, which finds the batch size.",
        ),
        (
            ["--epochs", "2"],
            "`--epochs` cannot be used with `fit`, which sets the length of each probe. "
            "Remove --epochs",
        ),
        (
            ["--steps", "2"],
            "`--steps` cannot be used with `fit`, which sets the length of each probe. "
            "Remove --steps",
        ),
        (
            ["--seconds", "2"],
            "`--seconds` cannot be used with `fit`, which sets the length of each probe. "
            "Remove --seconds",
        ),
    ],
)
def test_settings_that_fit_determines_are_explained(words: list[str], message: str) -> None:
    error = CliRunner().invoke(app, ["fit", "cnn", *words]).exception
    assert isinstance(error, WorkloadError) and str(error).startswith(message)


@pytest.mark.parametrize(
    ("verdict", "budget", "code"),
    [
        (Verdict.FITS, GPU, 0),
        (Verdict.NO_LIMIT, HOST, 0),
        (Verdict.DOES_NOT_FIT, GPU, 10),
        (Verdict.DOES_NOT_FIT, HOST, 11),
        (Verdict.UNKNOWN, GPU, 14),
    ],
)
def test_exit_code(verdict: Verdict, budget: MemoryBudget, code: int) -> None:
    assert exit_code(replace(FITS, verdict=verdict, budget=budget)) == code
