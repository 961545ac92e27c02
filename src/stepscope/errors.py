"""What can go wrong, with the exit code and what the user can do next.

    StepscopeError                 1    anything of ours
    ├── RunFolderError             3    no such run, or a folder that cannot be read as one
    ├── BadWorkload                4    no such model, data or setting; a function of no use
    ├── CannotTry                  5    the trial was not started: limits, or leftovers of another
    ├── BadDesign                  6    a study's file that cannot be used: it names the line
    ├── StudyBusy                  7    somebody else runs this study
    └── CannotWatch              125    `run` could not begin: the command was not started
        ├── CommandNotExecutable 126    found, but it cannot be executed
        └── CommandNotFound      127    there is no such command

125 to 127 are what `env`, `nohup`, `timeout` and `docker run` use, so that every other code of
`stepscope run` is the command's own. Wrong options are 2, as everywhere.
"""

from __future__ import annotations


class StepscopeError(Exception):
    """An error for people: what happened and why, then what to do next."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class RunFolderError(StepscopeError):
    """No such run, or a folder that cannot be read as one."""

    exit_code = 3


class BadWorkload(StepscopeError):
    """No such model, data or setting, or a function of the user's that cannot be used."""

    exit_code = 4


class TooFewSamples(BadWorkload):
    """The data set has less than one batch."""


class CannotTry(StepscopeError):
    """A trial was not started: a limit that cannot be had, or something is left of another."""

    exit_code = 5


class BadDesign(StepscopeError):
    """A study's file that cannot be used: the message names the line."""

    exit_code = 6


class StudyBusy(StepscopeError):
    """Somebody else runs this study now: nothing was started."""

    exit_code = 7


class CannotWatch(StepscopeError):
    """Watching could not begin; the command was not started."""

    exit_code = 125


class CommandNotExecutable(CannotWatch):
    """The command exists but cannot be executed."""

    exit_code = 126


class CommandNotFound(CannotWatch):
    """There is no such command."""

    exit_code = 127
