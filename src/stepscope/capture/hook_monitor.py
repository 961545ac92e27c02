"""Follows what the watched processes report while they run: what the hook attached to, epochs."""

from __future__ import annotations

import os
import re
import time

import numpy as np

from stepscope.inject import events as written
from stepscope.records.facts import HookFacts
from stepscope.runs.events import GrowingEvents, kinds_of
from stepscope.runs.paths import RunPaths
from stepscope.sensors import procfs
from stepscope.sensors.tree import ProcessTree

_SAY_NOTHING_LOADED_AFTER_S = 6.0
_SAY_NOTHING_ATTACHED_AFTER_S = 15.0
_PYTHON = re.compile(r"^(python|pypy)[\d.]*$")
_ENDS_OF_EPOCHS = {written.LOADER_END, written.MARK, written.PHASE_END}
_TRAINING = {written.BATCH, written.STEP}
_NAMED_KINDS = {written.ATTACHED, written.SEEN, written.GPU_OOM}


class HookMonitor:
    """Polls the `events` folder. Cheap: of most new records only the kinds are looked at."""

    def __init__(
        self, paths: RunPaths, tree: ProcessTree, command: list[str], enabled: bool, hint: str
    ) -> None:
        self.attached: list[str] = []
        self.frameworks: dict[str, str] = {}
        self.gpu_ooms: list[tuple[int, str]] = []
        """When processes ended because a GPU had no memory left, and the error of each."""
        self.message = "" if enabled else "hook: off, as asked"
        self._hint = hint
        self._pythons: dict[int, list[str]] = {}
        """Python processes seen so far, with their command lines."""
        self._enabled = enabled
        self._paths = paths
        self._tree = tree
        self._events = GrowingEvents(paths.events)
        self._begun = time.monotonic()
        self._announced = not enabled
        self._news = False
        self._switched_off = switched_off_by(command)
        self._look_for_python()

    def poll(self) -> bool:
        """Read what is new; True if an epoch (or any marked stretch) ended."""
        ended = False
        self._news = False
        if not self._announced:
            self._look_for_python()
        for pid, records in self._events.poll():
            kinds = kinds_of(records)
            present = set(np.flatnonzero(np.bincount(kinds)).tolist())
            if present & _TRAINING:
                self._tree.now_trains(pid)
            for kind in present & _NAMED_KINDS:
                for record in records[kinds == kind]:
                    self._learn(kind, record, self._events.names[pid])
            ended = ended or bool(present & _ENDS_OF_EPOCHS)
        return ended

    def new_message(self, at_end: bool = False) -> str | None:
        """What to tell the user now, if anything: once, as soon as it is known."""
        if self._announced:
            return None
        waited = time.monotonic() - self._begun
        settled = self.attached and not self._news
        if at_end or settled or waited > _SAY_NOTHING_ATTACHED_AFTER_S:
            self._announced = True
        elif waited > _SAY_NOTHING_LOADED_AFTER_S or self._switched_off:
            self._announced = self._switched_off is not None or not self._paths.hello.exists()
        return self.describe() if self._announced else None

    def describe(self) -> str:
        """What the hook is attached to, or why to nothing."""
        if self._enabled and self.attached:
            self.message = "hook: " + ", ".join(self.attached)
        elif self._enabled:
            self.message = f"hook: nothing attached ({self._why_nothing()})"
        return self.message

    def facts(self) -> HookFacts:
        return HookFacts(self.describe(), self._enabled, tuple(self.attached), self.frameworks)

    def _learn(self, kind: int, record: np.void, names: dict[int, str]) -> None:
        name = names.get(int(record["a"]), "?")
        if kind == written.SEEN:
            self.frameworks[name] = names.get(int(record["b"]), "?")
        elif kind == written.GPU_OOM:
            self.gpu_ooms.append((int(record["t"]), name))
        elif name not in self.attached:
            self.attached.append(name)
            self._news = True

    def _look_for_python(self) -> None:
        for process in self._tree:
            if process.pid not in self._pythons and _PYTHON.match(process.name):
                self._pythons[process.pid] = command = procfs.command_line(process.pid)
                self._switched_off = self._switched_off or switched_off_by(command)

    def _why_nothing(self) -> str:
        if self._paths.hello.exists():
            seen = [name for name in self.frameworks if name not in ("torch", "keras")]
            if seen:
                return f"{', '.join(seen)} has no hook: {self._hint}"
            return f"no PyTorch or Keras was imported: {self._hint}"
        if self._switched_off:
            return f"python {self._switched_off}: {self._hint}, or run without that flag"
        if self._pythons:
            return f"its Python does not read PYTHONPATH from us: {self._hint}"
        return f"no Python among its processes: {self._hint}"


def switched_off_by(command: list[str]) -> str | None:
    """The flag that keeps a Python command from loading the hook, in words."""
    if not command or not _PYTHON.match(os.path.basename(command[0])):
        return None
    words = iter(command[1:])
    for word in words:
        if word.startswith("--"):
            continue
        if not word.startswith("-") or word == "-":
            return None
        for position, letter in enumerate(word[1:], 2):
            if letter in "IE":
                return f"-{letter} ignores the environment"
            if letter == "S":
                return "-S imports no site"
            if letter in "cm":
                return None
            if letter in "WX":
                if position == len(word):
                    next(words, None)
                break
    return None
