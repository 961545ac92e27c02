"""What is asked of monitoring: one record, built alike by `run`, `watch`, `stepscope.watch`, the
doctor and trials."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from stepscope.errors import CannotWatch
from stepscope.records.facts import RunFacts
from stepscope.runs.masking import mask_text
from stepscope.runs.paths import DEFAULT_FOLDER, RunPaths, make_run_folder, new_run_folder

SHORTEST_INTERVAL_S, LONGEST_INTERVAL_S = 0.02, 60.0


def check_interval(seconds: float, kind: type[Exception] = CannotWatch) -> None:
    """An error of this kind unless one can sample at this pace."""
    if not SHORTEST_INTERVAL_S <= seconds <= LONGEST_INTERVAL_S:
        raise kind(f"An interval of {seconds} s is not possible", "Give 0.02 to 60 seconds")


def _current_folder() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise CannotWatch(
            "The current folder does not exist any more", "Change to another: cd ~"
        ) from None


@dataclass(frozen=True)
class RunRequest:
    """What to monitor and how; CannotWatch where that is not possible."""

    name: str
    command: list[str]
    interval_s: float = 0.1
    out: Path = Path(DEFAULT_FOLDER)
    """Where the run folder goes."""
    folder: Path | None = None
    """The run folder itself, where it is not to be a new one in `out`. It must not exist."""
    cwd: Path = field(default_factory=_current_folder)
    hook: bool = True
    """Whether to look into Python processes for batches, steps and epochs."""
    hint: str = "use stepscope.mark()"
    """What else the user can do where the hook attaches to nothing."""
    announce_hook: bool = True
    """Whether to tell the user what the hook attached to."""
    epoch_pattern: str | None = None
    """A regular expression for lines of output that tell an epoch; only then is it captured."""
    wait_tree: bool = False
    """Whether to wait for processes that outlive the command."""
    duration_s: float | None = None
    """How long to monitor at most a process that ran before."""
    facts: RunFacts = field(default_factory=RunFacts)
    """What else run.json says from the start: of a trial, its workload and the user's command."""
    memory_burst_s: float = 0.08
    """CPU time that readings of shared memory may take beyond their budget, when processes come."""

    def __post_init__(self) -> None:
        check_interval(self.interval_s)
        try:
            re.compile(self.epoch_pattern or "")
        except re.error as error:
            raise CannotWatch(
                f"--epoch-pattern {self.epoch_pattern!r} is no regular expression: {error}",
                r"For example: --epoch-pattern 'Epoch (\d+)'",
            ) from None

    def make_folder(self) -> RunPaths:
        """Make the run folder, or say why it cannot be made."""
        try:
            if self.folder is not None:
                return make_run_folder(self.folder)
            return new_run_folder(self.out, mask_text(self.name))
        except OSError as error:
            raise CannotWatch(
                f"The run folder cannot be made in {self.folder or self.out}: {error.strerror}",
                "Choose another place with --out DIR",
            ) from None
