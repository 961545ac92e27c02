"""What must not happen while a folder is read."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from fuzzing.reading import MAX_CPU_S, MAX_WALL_S, Ended, Reader

MAX_PEAK_BYTES = 1 << 30
SECRET = "canary-of-another-folder"
"""A text in files that do not belong to the folder."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")
_MAX_WRITTEN_BYTES = 100 << 20
"""Larger files were part of the folder before."""
_INJECTED = re.compile(r"<script>alert|<img src=x")

Snapshot = dict[str, tuple[object, ...]]


def snapshot(folder: Path, without: Path | None = None, with_reads: bool = False) -> Snapshot:
    """Return everything below a folder, except one part of it; with the times of the last reads,
    if requested."""
    found: Snapshot = {}
    remaining = [str(folder)]
    while remaining:
        place = remaining.pop()
        if not os.access(place, os.R_OK):
            continue
        with os.scandir(place) as entries:
            for entry in entries:
                if without is not None and entry.path == str(without):
                    continue
                status = entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    found[entry.path] = (status.st_mode,)
                    remaining.append(entry.path)
                else:
                    times = status.st_mtime_ns, status.st_atime_ns if with_reads else 0
                    found[entry.path] = (status.st_mode, status.st_ino, status.st_size, *times)
    return found


def changes(before: Snapshot, after: Snapshot) -> list[str]:
    """Return the names of what was created, changed or removed."""
    return sorted(path for path in {*before, *after} if before.get(path) != after.get(path))


def problems_of(reader: Reader, ended: Ended) -> Iterator[str]:
    """Yield what is wrong with how a reader ended and with what it printed."""
    out, err = (data.decode("utf-8", "surrogateescape") for data in (ended.out, ended.err))
    yield from _problems_of_end(reader, ended, err)
    if ended.peak_bytes > MAX_PEAK_BYTES:
        yield f"used {ended.peak_bytes >> 20} MiB of memory"
    for name, text in (("standard output", out), ("standard error", err)):
        if found := _CONTROL.search(text):
            around = text[max(0, found.start() - 40) : found.end() + 40]
            yield f"printed a control character to {name}: {around!r}"
        if SECRET in text:
            yield f"printed the contents of another folder to {name}"
    if "html" in reader.arguments and _INJECTED.search(out):
        yield "printed HTML of the folder without escaping it"
    if ended.status == 0 and reader.prints_json:
        try:
            json.loads(out, parse_constant=_refuse)
        except ValueError as error:
            yield f"printed invalid JSON: {error}"


def _problems_of_end(reader: Reader, ended: Ended, err: str) -> Iterator[str]:
    if ended.timed_out:
        yield f"did not end within {MAX_WALL_S:.0f} s"
    elif ended.status in (-signal.SIGXCPU, -signal.SIGKILL) or ended.cpu_s > MAX_CPU_S:
        yield f"used more than {MAX_CPU_S} s of CPU time"
    elif ended.status < 0:
        yield f"was killed by {signal.Signals(-ended.status).name}"
    elif "Traceback" in err or "Warning: " in err:
        lines = [line.strip()[:300] for line in err.strip().splitlines()]
        frame = next((line for line in reversed(lines) if "/stepscope/" in line), "")
        yield f"printed a traceback or a warning: {lines[-1]} ({frame})"
    elif ended.status not in reader.codes:
        yield f"exited with code {ended.status}"
    elif ended.status not in (0, 2) and not err.startswith("stepscope: "):
        yield f"printed no error: {err[:200]!r}"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def problems_of_files(folder: Path) -> Iterator[str]:
    """Yield what is wrong with the files that readers wrote."""
    for path in folder.rglob("*") if folder.is_dir() and not folder.is_symlink() else ():
        if path.is_symlink() or not path.is_file() or not os.access(path, os.R_OK):
            continue
        if path.stat().st_size > _MAX_WRITTEN_BYTES:
            continue
        text = path.read_text("utf-8", "replace")
        if SECRET in text:
            yield f"{path} contains the contents of another folder"
        if path.suffix == ".html" and _INJECTED.search(text):
            yield f"{path} contains HTML of the folder without escaping it"
        if path.name.endswith(".tmp"):
            yield f"{path} was left behind"
