"""The command line: registers the commands, and turns our errors into one line and a code."""

from __future__ import annotations

import os
import sys

import typer

import stepscope
from stepscope.cli.doctor import doctor
from stepscope.cli.explain import explain
from stepscope.cli.fit import fit
from stepscope.cli.report import report
from stepscope.cli.run import run
from stepscope.cli.study import app as study
from stepscope.cli.top import top
from stepscope.cli.trial import trial
from stepscope.cli.watch import watch
from stepscope.errors import StepscopeError

app = typer.Typer(
    name="stepscope",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="See what a training run consumes, and what holds it back.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"stepscope {stepscope.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version."
    ),
) -> None:
    """See what a training run consumes, and what holds it back."""


app.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})(
    run
)
app.command()(watch)
app.command()(top)
app.command()(report)
app.command()(explain)
app.command()(trial)
app.command()(fit)
app.add_typer(study, name="study")
app.command()(doctor)


def main() -> None:
    """Entry point: errors of ours become one line on stderr and their exit code."""
    try:
        app()
    except StepscopeError as error:
        sys.stderr.write(f"stepscope: {error}\n")
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is not None or error.strerror is None:
            raise
        # Of no file: of what we print to. Nothing that is left in a buffer is tried again.
        sys.stderr.write(f"stepscope: The output cannot be written: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(StepscopeError.exit_code)


if __name__ == "__main__":
    main()
