"""The paths of all files of a run."""

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
        pattern = re.compile(rf"{scope}\.(\d+)\.(arrows|parquet)")
        for path in sorted(self.folder.iterdir()):
            match = pattern.fullmatch(path.name)
            if match:  # sorted: .parquet comes after .arrows and replaces it
                numbers[int(match[1])] = path
        segments = [numbers[number] for number in sorted(numbers)]
        if self.live_stream(scope).exists():
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


def replace_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see either the old or the new contents, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode("utf-8", "replace"))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, record: Any, indent: int | None = 1) -> None:
    """Replace a JSON file with this record. Read it with `records.codec.loads`."""
    replace_atomically(path, dumps(record, indent=indent) + "\n")
