"""Synthetic trials that leave processes and files behind, for tests that kill parts of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepscope.sensors import procfs
from stepscope.trials.limits.cgroups import PREFIX
from stepscope.trials.processes import trial_processes
from studies import planted_environment

NO_GROUPS = (
    "from stepscope.trials.limits import cgroups, enforcement; "
    "enforcement.make_group = lambda *_: cgroups.Refused('not here'); "
)
"""As on a machine where this user may not create cgroups."""


def until(condition: Callable[[], object], seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@dataclass
class Trials:
    """Runs `stepscope trial` in a folder of its own; see tests/data/studies/made_up/leaves.py."""

    folder: Path
    has_groups: bool = True
    runners: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def records(self) -> list[Path]:
        """The records of running trials in the state folder."""
        return list((self.folder / "state" / "running").glob("[0-9]*.json"))

    def knows_orphan(self) -> bool:
        """Whether the orphan is running and, without a group, the runner has seen it."""
        orphans = self.left("orphan")
        seen = [record.read_text() for record in self.records]
        return bool(orphans) and (self.has_groups or any(orphans[-1] in text for text in seen))

    def environment(self, leaves: str = "", real_s: float = 0.05) -> dict[str, str]:
        return planted_environment(
            self.folder, leaves=leaves, left=self.folder / "left", real_s=real_s
        )

    def start(self, *options: str, leaves: str = "", real_s: float = 0.05) -> subprocess.Popen[str]:
        code = f"{'' if self.has_groups else NO_GROUPS}from stepscope.cli.app import main; main()"
        words = ["trial", "cnn", "--data", "random", "--out", str(self.runs), *options]
        if "--framework" not in options:
            words += ["--framework", "made_up.leaves"]
        self.runners.append(
            subprocess.Popen(
                [sys.executable, "-c", code, *words],
                env=self.environment(leaves, real_s),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return self.runners[-1]

    def run(self, *options: str, **planted: Any) -> str:
        """Run a trial, which must be ok; return its messages."""
        runner = self.start(*options, **planted)
        _, err = runner.communicate(timeout=100)
        assert runner.returncode == 0, err
        return err

    def left(self, word: str) -> list[str]:
        """Return what the trials have left, running or not: pids, or paths of files."""
        try:
            lines = [line.split() for line in (self.folder / "left").read_text().splitlines()]
        except OSError:
            return []
        return [value for key, value in lines if key == word]

    def leftovers(self) -> list[str]:
        """Return everything of these trials that still exists."""
        words = ("orphan", "pt_data_worker", "rank")
        pids = [pid for word in words for pid in self.left(word)]
        running = [trial_processes.identify(int(pid)) for pid in pids]
        found = [str(process) for process in running if process]
        names = tuple(f"{runner.pid}." for runner in self.runners)
        found += map(str, marked(*names))
        groups = Path("/sys/fs/cgroup").glob(f"**/{PREFIX}*")
        found += [str(each) for each in groups if each.name[len(PREFIX) :].startswith(names)]
        return found + [path for path in self.left("shm") if Path(path).exists()]

    def kill_all(self) -> None:
        for runner in self.runners:
            runner.kill()
            runner.wait()
        for word in ("orphan", "pt_data_worker", "rank"):
            for pid in map(int, self.left(word)):
                if procfs.name(pid) in ("sleep", word):
                    os.kill(pid, signal.SIGKILL)
        for path in self.left("shm"):
            Path(path).unlink(missing_ok=True)


def marked(*names: str) -> list[trial_processes.TrialProcess]:
    """Return the processes whose tokens name these runners."""
    tokens = {pid: procfs.environ_value(pid, trial_processes.VARIABLE) for pid in procfs.pids()}
    pids = [pid for pid, token in tokens.items() if token and token.startswith(names)]
    return [process for process in map(trial_processes.identify, pids) if process]


def children(pid: int, word: str) -> list[int]:
    """Return the running children of a process with a word in their command line."""
    return [
        each
        for each in procfs.pids()
        if (process := trial_processes.identify(each)) is not None
        and process.parent == pid
        and any(word in argument for argument in procfs.command_line(each))
    ]


def guards(runner: int) -> list[int]:
    return children(runner, "run_guard")


def kill_together(runner: subprocess.Popen[str]) -> None:
    """Kill a runner and its guard so that neither can react to the end of the other."""
    os.kill(runner.pid, signal.SIGSTOP)
    found = guards(runner.pid)
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    for pid in (*found, runner.pid):
        os.kill(pid, signal.SIGKILL)
    runner.wait()
