"""The command line has every setting, with the help of the table."""

from __future__ import annotations

import typer

from stepscope.cli.app import app
from stepscope.cli.console import EXIT_CODES
from stepscope.errors import TrialError, WorkloadError
from stepscope.records import Outcome
from stepscope.workloads.spec import SETTINGS, option_name, setting_default


def test_every_setting_has_an_option() -> None:
    command = typer.main.get_command(app).commands["trial"]
    options = {parameter.name: parameter for parameter in command.params}
    for name, setting in SETTINGS.items():
        option = options[name]
        assert option.opts == [option_name(name)]
        assert option.default == setting_default(name)
        assert option.help == setting.help


def test_exit_codes_are_distinct() -> None:
    outcomes = set(Outcome) - {Outcome.RUNNING, Outcome.SKIPPED, Outcome.LOST}
    assert set(EXIT_CODES) == outcomes
    codes = [*EXIT_CODES.values(), WorkloadError.exit_code, TrialError.exit_code, 1, 2]
    assert len(set(codes)) == len(codes)
