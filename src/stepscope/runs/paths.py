"""Every file a run leaves, named in one place."""

from __future__ import annotations

import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from stepscope.metrics import Scope

FORMAT = 1
DEFAULT_FOLDER = "runs"


@dataclass(frozen=True)
class RunPaths:
    """The files of one run folder."""

    folder: Path

    @property
    def run_json(self) -> Path:
        return self.folder / "run.json"

    @property
    def events(self) -> Path:
        return self.folder / "events"

    @property
    def hello(self) -> Path:
        """Interpreters in which the hook was loaded, one START record each."""
        return self.events / "hello.bin"

    @property
    def stdout_log(self) -> Path:
        return self.folder / "stdout.log"

    @property
    def stderr_log(self) -> Path:
        return self.folder / "stderr.log"

    @property
    def trial(self) -> Path:
        """What a trial leaves beside what every run does."""
        return self.folder / "trial"

    @property
    def trial_spec(self) -> Path:
        """The workload and its limits: what the trial's processes are told."""
        return self.trial / "spec.json"

    def trial_rank(self, rank: int) -> Path:
        """What a rank says of itself: what it built, what it used, how it failed."""
        return self.trial / f"rank{rank}.json"

    def trial_steps(self, rank: int) -> Path:
        """Its steps, as `steplog` writes them."""
        return self.trial / f"steps{rank}.bin"

    def trial_profile(self, rank: int) -> Path:
        return self.trial / f"profile{rank}.json"

    def trial_trace(self, rank: int) -> Path:
        """For Perfetto."""
        return self.trial / f"trace{rank}.json.gz"

    @property
    def trial_stacks(self) -> Path:
        """Where each Python process was when a trial hung."""
        return self.trial / "stacks.txt"

    @property
    def derived(self) -> Path:
        return self.folder / "derived"

    @property
    def summary_json(self) -> Path:
        return self.derived / "summary.json"

    @property
    def findings_json(self) -> Path:
        return self.derived / "findings.json"

    @property
    def report_html(self) -> Path:
        return self.derived / "report.html"

    def live_stream(self, scope: Scope) -> Path:
        """Where samples are appended now."""
        return self.folder / f"{scope}.arrows"

    def closed_stream(self, scope: Scope, number: int) -> Path:
        """A stream that is complete and waits to be rolled to Parquet."""
        return self.folder / f"{scope}.{number:04d}.arrows"

    def parquet(self, scope: Scope, number: int) -> Path:
        return self.folder / f"{scope}.{number:04d}.parquet"

    def segments(self, scope: Scope) -> list[Path]:
        """All sample files of a scope, oldest first; Parquet stands for the stream it was."""
        numbers: dict[int, Path] = {}
        pattern = re.compile(rf"{scope}\.(\d+)\.(arrows|parquet)")
        for path in sorted(self.folder.iterdir()):
            match = pattern.fullmatch(path.name)
            if match:  # sorted: .parquet comes after .arrows and wins
                numbers[int(match[1])] = path
        found = [numbers[number] for number in sorted(numbers)]
        if self.live_stream(scope).exists():
            found.append(self.live_stream(scope))
        return found


def new_run_folder(parent: Path, name: str) -> RunPaths:
    """Make `<when>_<name>_<id>` with its `events` below `parent`."""
    when = time.strftime("%Y%m%d-%H%M%S")
    return make_run_folder(parent / f"{when}_{slug(name)}_{secrets.token_hex(3)}")


def make_run_folder(folder: Path) -> RunPaths:
    """Make a run folder with its `events`; an OSError if it is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir()
    paths = RunPaths(folder.absolute())
    paths.events.mkdir()
    return paths


def slug(name: str) -> str:
    """A name that is safe in a path, whatever the user called the run."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", name).strip("-.")[:40] or "run"


def replace_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8", "replace"))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
