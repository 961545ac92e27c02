"""What to monitor and how: for `run`, `watch`, `stepscope.watch`, `doctor` and trials."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.errors import MonitorError
from stepscope.inject.masking import mask_text
from stepscope.records.facts import RunFacts
from stepscope.runs.paths import DEFAULT_FOLDER, RunPaths, make_run_folder, new_run_folder

SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 0.02, 60.0


def check_interval(seconds: float, kind: type[Exception] = MonitorError) -> None:
    """Raise an error of this kind if the sampling interval is out of range."""
    if not isinstance(seconds, int | float):
        raise kind(f"The sampling interval must be a number, got {seconds!r}")
    if not SHORTEST_INTERVAL_S <= seconds <= LONGEST_INTERVAL_S:
        raise kind(f"The sampling interval {seconds} s is out of range", "Use 0.02 to 60 seconds")


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise MonitorError(
            "The current folder no longer exists",
            "Change to another folder, for example with `cd ~`",
        ) from None


@dataclass(frozen=True)
class RunRequest:
    """What to monitor and how. Raises MonitorError if a value is invalid."""

    name: str
    command: list[str]
    interval_s: float = 0.1
    out: Path = Path(DEFAULT_FOLDER)
    """Parent folder of the run folder."""
    folder: Path | None = None
    """The run folder itself, instead of a new one in `out`. It must not exist."""
    cwd: Path = field(default_factory=_current_folder)
    hook: bool = True
    """Whether to inject the import hook into Python processes."""
    announce_hook: bool = True
    """Whether to print whether epochs and steps are tracked."""
    epoch_pattern: str | None = None
    """Regular expression that matches an epoch in the output. Captures the output."""
    wait_tree: bool = False
    """Whether to wait for processes that are still running after the command."""
    duration_s: float | None = None
    """Maximum duration of monitoring a process that was already running."""
    facts: RunFacts = field(default_factory=RunFacts)
    """Initial contents of run.json, for example the workload of a trial."""
    memory_burst_s: float = 0.08
    """CPU time that readings of shared memory may take beyond their budget when processes start."""

    def __post_init__(self) -> None:
        check_interval(self.interval_s)
        try:
            re.compile(self.epoch_pattern or "")
        except re.error as error:
            raise MonitorError(
                f"Invalid regular expression {self.epoch_pattern!r} for `--epoch-pattern`: {error}",
                r"For example: --epoch-pattern 'Epoch (\d+)'",
            ) from None

    def make_folder(self) -> RunPaths:
        """Create the run folder. Raises MonitorError if that fails."""
        try:
            if self.folder is not None:
                return make_run_folder(self.folder)
            return new_run_folder(self.out, mask_text(self.name))
        except OSError as error:
            raise MonitorError(
                f"Cannot create a run folder in {self.folder or self.out}: {error.strerror}",
                "Choose another folder with --out DIR",
            ) from None
