"""The command `fit`: its options, and what its exit code tells."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer

from stepscope.cli.app import app
from stepscope.cli.fit import exit_code
from stepscope.fit.answer import Effort, Fit, MemoryBudget
from stepscope.workloads.spec import NOT_FOR_FIT, SETTINGS

GPU = MemoryBudget("gpu", 1, 1, 1)
HOST = MemoryBudget("host", 1, 1, 1)
FITS = Fit("fits", "cnn", {}, "auto", GPU, None, Effort(0.0, 0, 0))


def test_every_knob_but_those_that_it_finds_out() -> None:
    command = typer.main.get_command(app).commands["fit"]
    names = {parameter.name for parameter in command.params}
    assert names & set(SETTINGS) == set(SETTINGS) - set(NOT_FOR_FIT)


@pytest.mark.parametrize(
    ("verdict", "budget", "code"),
    [
        ("fits", GPU, 0),
        ("no limit", HOST, 0),
        ("does not fit", GPU, 10),
        ("does not fit", HOST, 11),
        ("cannot tell", GPU, 14),
    ],
)
def test_the_exit_code_tells_the_verdict(verdict: str, budget: MemoryBudget, code: int) -> None:
    assert exit_code(replace(FITS, verdict=verdict, budget=budget)) == code  # type: ignore[arg-type]
