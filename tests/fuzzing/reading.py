"""The readers of a folder: commands, and the Python API. Each reads in a process of its own."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import stepscope
from stepscope.cli import app
from stepscope.errors import StepscopeError
from stepscope.metrics import SCOPES

MAX_CPU_S = 10
MAX_WALL_S = 30.0
"""More than the CPU time, because other processes use the machine."""
_MAX_ADDRESSES = 16 << 30
"""Protects the machine. The memory that a reader really used is checked afterwards."""

FOLDER, DESIGN, OTHER, MERGED = "FOLDER", "DESIGN", "OTHER", "MERGED"
"""Placeholders in the arguments of a command."""


@dataclass(frozen=True)
class Reader:
    """A command, or a function that uses the Python API, that reads a folder."""

    arguments: tuple[str, ...] = ()
    function: Callable[[Path], None] | None = None
    codes: tuple[int, ...] = (0, 1, 3)
    """The exit codes of the command in docs/cli.md."""
    writes: str = ""
    """What it may write: `derived` in the folder, or `merged` beside it."""

    @property
    def name(self) -> str:
        return " ".join(self.arguments) or "Python API"

    @property
    def prints_json(self) -> bool:
        return "--json" in self.arguments or "json" in self.arguments


@dataclass(frozen=True)
class Ended:
    """A process that read a folder."""

    status: int
    """The exit code, or the negative number of a signal."""
    peak_bytes: int
    cpu_s: float
    timed_out: bool
    out: bytes
    err: bytes


def read_run(folder: Path) -> None:
    """Use all of a run. Only errors of stepscope are allowed."""
    run = stepscope.open_run(folder)
    uses: list[Callable[[], object]] = [run.marks, run.steps, run.summary, run.explain]
    for scope in SCOPES:
        uses.append(lambda scope=scope: run.samples(scope).to_pylist())
        uses.append(lambda scope=scope: run.samples(scope, ["t_ns", "entity"]))
    uses.append(lambda: (run.name, run.command, run.exit_status, run.begin_ns))
    uses.append(lambda: stepscope.latest_run(folder.parent))
    for use in uses:
        with contextlib.suppress(StepscopeError):
            use()


def read_study(folder: Path) -> None:
    """Use all attributes of a study. Only errors of stepscope are allowed."""
    view = stepscope.open_study(folder)
    for name in dir(view):
        with contextlib.suppress(StepscopeError):
            getattr(view, name)


def _reports(codes: tuple[int, ...]) -> list[Reader]:
    formats = [(), ("--json",), *(("--format", name) for name in ("html", "json", "terminal"))]
    return [
        Reader(("report", FOLDER, *options), codes=codes, writes="derived") for options in formats
    ]


_STUDY_CODES = (0, 1, 3, 4, 6)
_OF_RUNS = (
    Reader(function=read_run),
    *_reports(Reader.codes),
    Reader(("report",), writes="derived"),  # the latest run
    Reader(("explain", FOLDER)),
    Reader(("explain", FOLDER, "--all")),
    Reader(("explain", FOLDER, "--json")),
    Reader(("top", FOLDER, "--once")),
    Reader(("top", FOLDER, "--json")),
    Reader(("top",)),
)
_OF_STUDIES = (
    Reader(function=read_study, codes=_STUDY_CODES),
    *_reports(_STUDY_CODES),
    Reader(("study", "show", FOLDER), codes=_STUDY_CODES),
    Reader(("study", "show", FOLDER, "--json"), codes=_STUDY_CODES),
    Reader(("study", "plan", FOLDER), codes=_STUDY_CODES),
    Reader(("study", "plan", FOLDER, "--json"), codes=_STUDY_CODES),
    Reader(("study", "plan", DESIGN), codes=(*_STUDY_CODES, 2)),
    Reader(("study", "report", FOLDER), codes=_STUDY_CODES, writes="derived"),
    Reader(("study", "report", FOLDER, "--json"), codes=_STUDY_CODES, writes="derived"),
    Reader(("study", "merge", FOLDER, OTHER, "--out", MERGED), codes=_STUDY_CODES, writes="merged"),
)
READERS: Mapping[str, tuple[Reader, ...]] = {
    "run": _OF_RUNS,
    "trial": _OF_RUNS,
    "study": _OF_STUDIES,
}
"""By kind of folder."""


def run_reader(
    reader: Reader, places: Mapping[str, Path], cwd: Path, env: Mapping[str, str], real: bool
) -> Ended:
    """Run a reader and wait for it: in a fork of this process, which is fast, or as a `real`
    command."""
    arguments = [str(places.get(word, word)) for word in reader.arguments]
    out, err = (cwd.parents[1] / name for name in ("stdout", "stderr"))
    with open(os.devnull) as nothing, out.open("wb") as out_file, err.open("wb") as err_file:
        files = {"stdin": nothing, "stdout": out_file, "stderr": err_file}
        if real and reader.function is None:
            command = [sys.executable, "-m", "stepscope", *arguments]
            pid = subprocess.Popen(command, cwd=cwd, env=env, **files).pid
        elif not (pid := os.fork()):
            for number, file in enumerate(files.values()):
                os.dup2(file.fileno(), number)
            os.chdir(cwd)
            os.environ.update(env)
            _read(reader, arguments, places[FOLDER])
    return _wait(pid, out, err)


def _read(reader: Reader, arguments: list[str], folder: Path) -> NoReturn:
    """Read a folder in this process, like the interpreter that runs `python -m stepscope`."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_ADDRESSES, _MAX_ADDRESSES))
    sys.setrecursionlimit(1000)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.argv = ["stepscope", *arguments]
    status = 0
    try:
        if reader.function is None:
            app.main()
        else:
            reader.function(folder)
        sys.stdout.flush()
    except SystemExit as exit_request:
        status = int(exit_request.code or 0)
    except StepscopeError as error:  # of a function
        status = error.exit_code
        sys.stderr.write("stepscope: the folder cannot be read\n")
    except BaseException:
        status = 1
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _wait(pid: int, out: Path, err: Path) -> Ended:
    process = os.pidfd_open(pid)
    ended, _, _ = select.select([process], [], [], MAX_WALL_S)
    os.close(process)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    _, status, usage = os.wait4(pid, 0)
    return Ended(
        status=os.waitstatus_to_exitcode(status),
        peak_bytes=usage.ru_maxrss * 1024,
        cpu_s=usage.ru_utime + usage.ru_stime,
        timed_out=not ended,
        out=out.read_bytes(),
        err=err.read_bytes(),
    )
