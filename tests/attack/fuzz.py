"""Damages run, trial and study folders, reads them, and checks that their reader is not harmed.

    .venv/bin/python tests/attack/fuzz.py --seed 1 --folders 3000
    .venv/bin/python tests/attack/fuzz.py --only run.1.17 --keep DIR     one folder again

A folder is damaged in one to five places (`fuzzing/damage.py`) and then read by some commands and
functions (`fuzzing/reading.py`). None of them may end with a traceback or an undocumented exit
code, hang, use a gigabyte of memory, write outside of the folder, show files from outside of it,
control the terminal, or print invalid JSON (`fuzzing/checks.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import os
import pkgutil
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzzing.checks import SECRET, changes, problems_of, problems_of_files, snapshot
from fuzzing.damage import NAMES, Scene, damage
from fuzzing.folders import KINDS, make_folders
from fuzzing.reading import (
    DESIGN,
    FOLDER,
    MERGED,
    OTHER,
    READERS,
    Ended,
    Reader,
    run_reader,
)
from stepscope.cli import app

_REAL_SHARE = 0.01
"""Share of the readers that run as real commands, which are slow."""
_READ_BY = ("analysis", "cli", "records", "report", "runs", "studies")
"""The packages of stepscope that read folders."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="Chooses the damage")
    parser.add_argument("--folders", type=int, default=100, help="Number of folders")
    parser.add_argument("--kind", choices=KINDS, help="Only folders of this kind")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="Stop after this time")
    parser.add_argument("--readers", type=int, default=3, help="Number of readers of a folder")
    parser.add_argument("--intact", action="store_true", help="Read the folders without damage")
    parser.add_argument("--only", metavar="NAME", help="Read this folder again, with all readers")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="Keep a copy of that folder")
    options = parser.parse_args()
    kinds = [options.kind] if options.kind else KINDS
    until = time.monotonic() + options.seconds
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # faster than a disk
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=memory) as place:
        fuzzer = Fuzzer(Path(place))
        if options.intact:
            for folder in sorted(fuzzer.intact.glob("*/*")):
                fuzzer.read_intact(folder)
        elif options.only:
            fuzzer.fuzz(options.only, keep=options.keep)
        else:
            for number in range(options.folders):
                if time.monotonic() < until:
                    kind = kinds[number % len(kinds)]
                    fuzzer.fuzz(f"{kind}.{options.seed}.{number}", options.readers)
    print(fuzzer.statistics)
    return 1 if fuzzer.statistics.failed else 0


@dataclass
class Statistics:
    """How many folders were read, and how their readers ended."""

    folders: int = 0
    failed: int = 0
    codes: Counter[int] = field(default_factory=Counter)
    peak_bytes: int = 0
    longest_s: float = 0.0
    began: float = field(default_factory=time.monotonic)

    def add(self, ended: Ended) -> None:
        self.codes[ended.status] += 1
        self.peak_bytes = max(self.peak_bytes, ended.peak_bytes)
        self.longest_s = max(self.longest_s, ended.cpu_s)

    def __str__(self) -> str:
        codes = ", ".join(f"{code} ({count})" for code, count in sorted(self.codes.items()))
        return (
            f"{self.folders} folders in {time.monotonic() - self.began:.0f} s: {self.failed} "
            f"failed; exit codes {codes}; at most {self.peak_bytes >> 20} MiB and "
            f"{self.longest_s:.1f} s of CPU time"
        )


class Fuzzer:
    """Damages copies of the intact folders, and reads them.

    Everything happens in forked processes, because pyarrow starts threads. This process only
    imports what they need.
    """

    def __init__(self, place: Path) -> None:
        self.statistics = Statistics()
        self.intact = place / "intact"
        self._outside = place / "outside"
        """Marked copies of the intact folders, and other files that nobody may read or write."""
        self._bombs = place / "bombs"
        self._scene = place / "scene"
        sys.setrecursionlimit(20_000)  # for deeply nested folders; the readers keep their limit
        in_child(lambda: make_folders(self.intact))
        shutil.copytree(self.intact, self._outside)
        for folder in self._outside.glob("*/*"):
            _mark(folder)
        self._bombs.mkdir()
        warm_up(self._set_scene(self.intact / "study" / "study", "study"))

    def fuzz(self, name: str, readers: int | None = None, keep: Path | None = None) -> None:
        """Damage a folder as its name says, and read it with some or all readers."""
        rng = random.Random(name)
        kind = name.partition(".")[0]
        intact = rng.choice(sorted((self.intact / kind).iterdir()))
        hostile_name = os.fsdecode(rng.choice(NAMES)) if rng.random() < 0.1 else ""
        chosen = READERS[kind] if readers is None else rng.sample(READERS[kind], readers)
        folder = self._set_scene(intact, hostile_name or intact.name)
        scene = Scene(folder, self._outside / kind / intact.name, self._bombs)
        done = self._scene / "damage.txt"
        chance = random.Random(f"{name} damage")
        in_child(lambda: done.write_text("\n    ".join(damage(scene, chance)), errors="replace"))
        if keep:
            shutil.copytree(folder, keep, symlinks=True, ignore=_not_copied)
        problems = list(self._read(folder, intact, chosen, rng))
        self.statistics.folders += 1
        if problems or keep:
            print(f"{name}: {intact.name} with damage:\n    {done.read_text()}")
            print("\n".join(f"  {problem}" for problem in problems))
        if problems:
            self.statistics.failed += 1
            print(f"  To repeat: {sys.executable} {__file__} --only {name} --keep DIR", flush=True)

    def read_intact(self, intact: Path) -> None:
        """Check that all readers can read a folder that is not damaged."""
        folder = self._set_scene(intact, intact.name)
        before = self.statistics.codes[0]
        readers = READERS[intact.parent.name]
        if intact.name == "merged":
            readers = tuple(each for each in readers if not {"plan", "merge"} & {*each.arguments})
        problems = list(self._read(folder, intact, readers, random.Random(1)))
        if self.statistics.codes[0] - before < len(readers):
            problems.append("some readers refuse it")
        self.statistics.folders += 1
        self.statistics.failed += bool(problems)
        print("\n".join(f"{intact}: {problem}" for problem in problems))

    def _set_scene(self, intact: Path, name: str) -> Path:
        """Copy an intact folder to where it is damaged and read."""
        remove_scene(self._scene)
        folder = self._scene / "runs" / name
        for inner in ("work", "home", "runs"):
            (self._scene / inner).mkdir(parents=True)
        (self._scene / "home" / ".bashrc").write_text(SECRET)
        return Path(shutil.copytree(intact, folder))

    def _read(
        self, folder: Path, intact: Path, readers: Sequence[Reader], rng: random.Random
    ) -> Iterator[str]:
        """Read a folder and yield the problems."""
        outside = self._outside / intact.parent.name / intact.name
        home, work = self._scene / "home", self._scene / "work"
        places = {
            FOLDER: folder,
            DESIGN: folder / "design.yaml",
            OTHER: self.intact / "study" / "study",
            MERGED: self._scene / "merged",
        }
        env = {**os.environ, "HOME": str(home), "STEPSCOPE_RUNS": str(folder.parent)}
        env |= {"STEPSCOPE_STATE": str(home / "state"), "PYTHONPATH": os.pathsep.join(sys.path)}
        outside_before = snapshot(outside, with_reads=True)
        for reader in readers:
            if DESIGN in reader.arguments and places[DESIGN].is_symlink():
                continue  # a link that is passed to a command is followed
            allowed = {"derived": folder / "derived", "merged": places[MERGED]}
            written = allowed.get(reader.writes)
            before = snapshot(self._scene, written)
            ended = run_reader(reader, places, work, env, real=rng.random() < _REAL_SHARE)
            self.statistics.add(ended)
            problems = list(problems_of(reader, ended))
            changed = changes(before, snapshot(self._scene, written))
            problems += [f"changed {path}" for path in changed]
            if written:
                problems += problems_of_files(written)
            shutil.rmtree(places[MERGED], ignore_errors=True)
            yield from (f"{reader.name}: {problem}" for problem in problems)
        for path in changes(outside_before, snapshot(outside, with_reads=True)):
            yield f"read or changed {path}"
            os.utime(path, (0, 0))


def _mark(folder: Path) -> None:
    """Put the secret into a folder that must not be read."""
    for path in folder.rglob("*"):
        if path.name in ("run.json", "study.json"):
            path.write_text(path.read_text().replace('"name": "', f'"name": "{SECRET}', 1))
    (folder / "secret.txt").write_text(SECRET)
    (folder / "evil.py").write_text(f"raise SystemExit({SECRET!r})")
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))  # else a read does not always change the time


def remove_scene(scene: Path) -> None:
    """Remove a scene, also folders without permissions."""
    for place, folders, _ in os.walk(scene):
        for folder in (Path(place, name) for name in folders):
            if not folder.is_symlink():
                folder.chmod(0o700)
    shutil.rmtree(scene, ignore_errors=True)


def _not_copied(folder: str, names: list[str]) -> list[str]:
    """Return what cannot be copied: FIFOs and sockets."""
    paths = [Path(folder, name) for name in names]
    return [p.name for p in paths if not (p.is_symlink() or p.is_dir() or p.is_file())]


def warm_up(study: Path) -> None:
    """Import and compile what every reader would have to. Reading a study starts no threads."""
    for package in _READ_BY:
        found = importlib.import_module(f"stepscope.{package}")
        for module in pkgutil.walk_packages(found.__path__, f"{found.__name__}."):
            importlib.import_module(module.name)
    for name in ("pandas", "pyarrow.compute", "pyarrow.parquet"):
        importlib.import_module(name)
    sys.argv = ["stepscope", "report", str(study)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        app.main()
    gc.freeze()  # else garbage collection in a forked process copies all pages


def in_child(function: Callable[[], object]) -> None:
    """Call a function in a forked process."""
    sys.stdout.flush()
    pid = os.fork()
    if not pid:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        raise SystemExit("The fuzzer itself failed")


if __name__ == "__main__":
    sys.exit(main())
