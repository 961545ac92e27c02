"""The help of every command."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from stepscope.cli.app import app

COMMANDS = ("run", "watch", "top", "report", "explain", "trial", "fit", "doctor", "study run")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_narrow_terminal(command: str) -> None:
    done = CliRunner(env={"COLUMNS": "60"}).invoke(app, [*command.split(), "--help"])
    lines = [line.strip() for line in done.stdout.partition("╭")[0].splitlines()]
    assert done.exit_code == 0 and "<bool>" not in done.stdout
    for line, below in zip(lines, lines[1:], strict=False):
        first = below.partition(" ")[0]
        assert not (line and below) or len(line) + 1 + len(first) > 58, f"{line!r} is wrapped early"
