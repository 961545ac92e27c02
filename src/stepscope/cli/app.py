"""The command line: registers the commands, and prints errors as one line with an exit code."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from typing import Any

import typer

import stepscope
from stepscope.cli.console import CommandGroup, print_message
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


class _Commands(CommandGroup):
    """The commands; the error for a program in place of a command names `stepscope run`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        words = ["python", *args] if args[0].endswith(".py") else args
        if args[0] not in self.commands and shutil.which(words[0]):
            command = shlex.join(["stepscope", "run", "--", *words])
            ctx.fail(f"No such command {args[0]!r}. To monitor a program: {command}")
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="stepscope",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Monitor neural-network training and find its bottleneck.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"stepscope {stepscope.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit"
    ),
) -> None:
    """Monitor neural-network training and find its bottleneck."""


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


def _reserve_standard_descriptors() -> None:
    """Open the standard descriptors that are closed, so that no other file gets their number:
    libraries write messages to descriptor 2. Started commands do not inherit them."""
    while (descriptor := os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)) <= 2:
        pass
    os.close(descriptor)


def main() -> None:
    """Run the command line. A StepscopeError becomes one line on stderr and its exit code."""
    try:
        _reserve_standard_descriptors()
        app()
    except StepscopeError as error:
        print_message(str(error))
        sys.exit(error.exit_code)
    except OSError as error:
        if error.filename is not None or error.strerror is None:
            raise
        # Without a file name it is an error of standard output. Its buffer must not be flushed.
        sys.stderr.write(f"stepscope: Cannot write to standard output: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(StepscopeError.exit_code)


if __name__ == "__main__":
    main()
