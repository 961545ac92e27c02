"""Every file a run leaves, named in one place."""

from __future__ import annotations

import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

from stepscope.metrics import Scope
from stepscope.records.codec import dumps

FORMAT = 1
DEFAULT_FOLDER = "runs"


class RunPaths:
    """The files of one run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_json = folder / "run.json"
        self.events = folder / "events"
        self.hello = self.events / "hello.bin"
        """Interpreters in which the hook was loaded, one START record each."""
        self.stdout_log = folder / "stdout.log"
        self.stderr_log = folder / "stderr.log"
        self.derived = folder / "derived"
        self.summary_json = self.derived / "summary.json"
        self.findings_json = self.derived / "findings.json"
        self.report_html = self.derived / "report.html"
        self.trial = folder / "trial"
        """What a trial leaves beside what every run does."""
        self.trial_spec = self.trial / "spec.json"
        """The workload and its limits: what the trial's processes are told."""
        self.trial_stacks = self.trial / "stacks.txt"
        """Where each Python process was when a trial hung."""

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

    def live_stream(self, scope: Scope) -> Path:
        """Where samples are appended now."""
        return self.folder / f"{scope}.arrows"

    def closed_stream(self, scope: Scope, number: int) -> Path:
        """A stream that is complete and waits to be rolled to Parquet."""
        return self.folder / f"{scope}.{number:04d}.arrows"

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


def write_json(path: Path, record: Any, indent: int | None = 1) -> None:
    """Replace a JSON file by this record. Read it with `records.codec.loads`."""
    replace_atomically(path, dumps(record, indent=indent) + "\n")
