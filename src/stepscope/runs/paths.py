"""The paths of all files of a run."""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path

from stepscope.metrics import Scope
from stepscope.runs.files import entries_in

FORMAT = 1
DEFAULT_FOLDER = "runs"


class RunPaths:
    """The files of one run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_json = folder / "run.json"
        self.events = folder / "events"
        self.hook_loaded = self.events / "interpreters.bin"
        """The Python interpreters that loaded the import hook, one START record each."""
        self.stdout_log = folder / "stdout.log"
        self.stderr_log = folder / "stderr.log"
        self.derived = folder / "derived"
        self.summary_json = self.derived / "summary.json"
        self.findings_json = self.derived / "findings.json"
        self.report_html = self.derived / "report.html"
        self.trial = folder / "trial"
        """Additional files of a trial."""
        self.trial_spec = self.trial / "spec.json"
        """The workload and its limits, as read by the processes of the trial."""
        self.trial_stacks = self.trial / "stacks.txt"
        """The stacks of all Python processes at the stall timeout."""

    def trial_rank(self, rank: int) -> Path:
        """`RankFacts` of a rank."""
        return self.trial / f"rank{rank}.json"

    def trial_steps(self, rank: int) -> Path:
        """The step log of a rank, as written by `steplog`."""
        return self.trial / f"steps{rank}.bin"

    def trial_profile(self, rank: int) -> Path:
        return self.trial / f"profile{rank}.json"

    def trial_trace(self, rank: int) -> Path:
        """The profiler trace of a rank, for Perfetto."""
        return self.trial / f"trace{rank}.json.gz"

    def live_stream(self, scope: Scope) -> Path:
        """The stream that samples are appended to."""
        return self.folder / f"{scope}.arrows"

    def closed_stream(self, scope: Scope, number: int) -> Path:
        """A complete stream, before it is converted to Parquet."""
        return self.folder / f"{scope}.{number:04d}.arrows"

    def segments(self, scope: Scope) -> list[Path]:
        """Return all sample files of a scope, oldest first. A Parquet file replaces its stream."""
        numbers: dict[int, Path] = {}
        pattern = re.compile(rf"{scope}\.([0-9]{{1,9}})\.(arrows|parquet)")
        names = [entry.name for entry in entries_in(self.folder)]
        for name in names:
            match = pattern.fullmatch(name)
            if match:  # sorted: .parquet comes after .arrows and replaces it
                numbers[int(match[1])] = self.folder / name
        segments = [numbers[number] for number in sorted(numbers)]
        if self.live_stream(scope).name in names:
            segments.append(self.live_stream(scope))
        return segments


def new_run_folder(parent: Path, name: str) -> RunPaths:
    """Create the run folder `<time>_<name>_<id>` in `parent`."""
    now = time.strftime("%Y%m%d-%H%M%S")
    return make_run_folder(parent / f"{now}_{slug(name)}_{secrets.token_hex(3)}")


def make_run_folder(folder: Path) -> RunPaths:
    """Create a run folder. Raises OSError if it exists."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    paths = RunPaths(folder.absolute())
    paths.events.mkdir()
    return paths


def slug(name: str) -> str:
    """Return the name with only characters that are safe in a path."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.")[:40] or "run"
