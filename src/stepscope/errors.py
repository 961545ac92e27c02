"""The exceptions that stepscope raises, and their exit codes.

    StepscopeError                 1    any other error
    ├── RunFolderError             3    the run folder does not exist or cannot be read
    ├── WorkloadError              4    the workload cannot be used
    │   └── GpuUnavailable         5    a GPU is not available
    ├── TrialError                 5    the trial was not started
    ├── DesignError                6    the study design is invalid
    ├── StudyBusy                  7    another process is running the study
    └── MonitorError             125    monitoring could not start
        ├── CommandNotExecutable 126    the command cannot be executed
        └── CommandNotFound      127    the command was not found

`env`, `nohup`, `timeout` and `docker run` use 125 to 127 in the same way. Every other exit code of
`stepscope run` is the exit code of the command. Invalid options exit with code 2.
"""

from __future__ import annotations


class StepscopeError(Exception):
    """An error with a message that says what is wrong and a hint that says what to do."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class RunFolderError(StepscopeError):
    """The run folder does not exist or cannot be read."""

    exit_code = 3


class WorkloadError(StepscopeError):
    """The workload cannot be used: the model, data or a setting is unknown or invalid, or the
    function of a custom workload failed."""

    exit_code = 4


class TooFewSamples(WorkloadError):
    """The dataset has fewer samples than one batch."""


class GpuUnavailable(WorkloadError):
    """The workload or a limit needs a GPU, GPU memory or several GPUs that are not available."""

    exit_code = 5


class TrialError(StepscopeError):
    """The trial was not started: a limit is not available, or processes or files of an earlier
    trial remain."""

    exit_code = 5


class DesignError(StepscopeError):
    """The study design is invalid: the message names the line."""

    exit_code = 6


class StudyBusy(StepscopeError):
    """Another process is running the study, so nothing was started."""

    exit_code = 7


class MonitorError(StepscopeError):
    """Monitoring could not start, so the command was not started."""

    exit_code = 125


class CommandNotExecutable(MonitorError):
    """The command exists but cannot be executed."""

    exit_code = 126


class CommandNotFound(MonitorError):
    """The command was not found."""

    exit_code = 127
