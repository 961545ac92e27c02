"""The command `fit`: its options, and what its exit code tells."""

from __future__ import annotations

from dataclasses import replace

import pytest
import typer

from stepscope.advice.answer import Effort, Fit, Room
from stepscope.cli.app import app
from stepscope.cli.fit import NOT_ASKED, exit_code
from stepscope.report import fit as report
from stepscope.workloads.spec import KNOBS

GPU = Room("gpu", 1, 1, 1)
HOST = Room("host", 1, 1, 1)
FITS = Fit("fits", "", "cnn", {}, "auto", GPU, None, Effort(0.0, 0, 0))


def test_every_knob_but_those_that_it_finds_out() -> None:
    command = typer.main.get_command(app).commands["fit"]
    names = {parameter.name for parameter in command.params}
    assert names & set(KNOBS) == set(KNOBS) - set(NOT_ASKED)
    assert NOT_ASKED == report.NOT_ASKED


@pytest.mark.parametrize(
    ("verdict", "room", "code"),
    [
        ("fits", GPU, 0),
        ("no limit", HOST, 0),
        ("does not fit", GPU, 10),
        ("does not fit", HOST, 11),
        ("cannot tell", GPU, 14),
    ],
)
def test_the_exit_code_tells_the_verdict(verdict: str, room: Room, code: int) -> None:
    assert exit_code(replace(FITS, verdict=verdict, room=room)) == code  # type: ignore[arg-type]
