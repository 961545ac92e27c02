"""The command line has every setting, and says of each what the table says."""

from __future__ import annotations

import typer

from stepscope.cli.app import app
from stepscope.cli.console import EXIT_CODES
from stepscope.errors import BadWorkload, CannotTry
from stepscope.records import Outcome
from stepscope.workloads.spec import SETTINGS, option_name, setting_default


def test_an_option_for_every_setting() -> None:
    command = typer.main.get_command(app).commands["trial"]
    options = {parameter.name: parameter for parameter in command.params}
    for name, setting in SETTINGS.items():
        option = options[name]
        assert option.opts == [option_name(name)]
        assert option.default == setting_default(name)
        assert option.help == setting.help


def test_codes_tell_outcomes_apart() -> None:
    ends = set(Outcome) - {Outcome.RUNNING, Outcome.SKIPPED, Outcome.LOST}
    assert set(EXIT_CODES) == ends
    codes = [*EXIT_CODES.values(), BadWorkload.exit_code, CannotTry.exit_code, 1, 2]
    assert len(set(codes)) == len(codes)
