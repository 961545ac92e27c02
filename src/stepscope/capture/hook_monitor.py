"""Follows what the watched processes report while they run: what the hook attached to, epochs."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass, field

from stepscope.inject import events as written
from stepscope.records.facts import HookFacts
from stepscope.runs.paths import RunPaths
from stepscope.sensors import procfs
from stepscope.sensors.tree import ProcessTree

_SAY_NOTHING_LOADED_AFTER_S = 6.0
_SAY_NOTHING_ATTACHED_AFTER_S = 15.0
_OF_A_PROCESS = re.compile(r"[0-9]+\.bin")
_PYTHON = re.compile(r"^(python|pypy)[\d.]*$")
_ENDS_OF_EPOCHS = (written.LOADER_END, written.MARK, written.PHASE_END)
_TRAINING = (written.BATCH, written.STEP)


@dataclass
class _File:
    offset: int = 0
    names: dict[int, str] = field(default_factory=dict)


class HookMonitor:
    """Polls the `events` folder. Cheap: only the kinds of new records are looked at."""

    def __init__(
        self, paths: RunPaths, tree: ProcessTree, command: list[str], enabled: bool, hint: str
    ) -> None:
        self.attached: list[str] = []
        self.frameworks: dict[str, str] = {}
        self.message = "" if enabled else "hook: off, as asked"
        self._hint = hint
        self._pythons: dict[int, list[str]] = {}
        """Python processes seen so far, with their command lines."""
        self._enabled = enabled
        self._paths = paths
        self._tree = tree
        self._files: dict[str, _File] = {}
        self._begun = time.monotonic()
        self._told = not enabled
        self._news = False
        self._switched_off = switched_off_by(command)
        self._look_for_python()

    def poll(self) -> bool:
        """Read what is new; True if an epoch (or any marked stretch) ended."""
        ended = False
        self._news = False
        if not self._told:
            self._look_for_python()
        with contextlib.suppress(OSError), os.scandir(self._paths.events) as entries:
            for entry in entries:
                if _OF_A_PROCESS.fullmatch(entry.name):
                    ended = self._follow(entry) or ended
        return ended

    def new_message(self) -> str | None:
        """What to tell the user now, if anything: once, as soon as it is known."""
        if self._told:
            return None
        waited = time.monotonic() - self._begun
        if (self.attached and not self._news) or waited > _SAY_NOTHING_ATTACHED_AFTER_S:
            self._told = True
        elif waited > _SAY_NOTHING_LOADED_AFTER_S or self._switched_off:
            self._told = self._switched_off is not None or not self._paths.hello.exists()
        return self.describe() if self._told else None

    def last_message(self) -> str | None:
        """At the end: what was not told yet."""
        if self._told:
            return None
        self._told = True
        return self.describe()

    def describe(self) -> str:
        """What the hook is attached to, or why to nothing."""
        if self._enabled and self.attached:
            self.message = "hook: " + ", ".join(self.attached)
        elif self._enabled:
            self.message = f"hook: nothing attached ({self._why_nothing()})"
        return self.message

    def facts(self) -> HookFacts:
        return HookFacts(self.describe(), self._enabled, tuple(self.attached), self.frameworks)

    def _follow(self, entry: os.DirEntry[str]) -> bool:
        file = self._files.setdefault(entry.name, _File())
        try:
            size = entry.stat().st_size // written.SIZE * written.SIZE
            if size <= file.offset:
                return False
            with open(entry.path, "rb") as stream:
                stream.seek(file.offset)
                data = stream.read(size - file.offset)
        except OSError:
            return False
        file.offset += len(data)
        kinds = data[8 :: written.SIZE]  # the low byte of `kind` of every record
        if any(kind in kinds for kind in _TRAINING):
            self._tree.now_trains(int(entry.name[:-4]))
        if written.ATTACHED in kinds or written.SEEN in kinds:
            self._learn(file, data)
        return any(kind in kinds for kind in _ENDS_OF_EPOCHS)

    def _learn(self, file: _File, data: bytes) -> None:
        for record in written.RECORD.iter_unpack(data):
            _, kind, _, _, a, b = record
            if kind == written.NAME:
                ident, _, index, length, piece = written.NAME_RECORD.unpack(
                    written.RECORD.pack(*record)
                )
                text = file.names.get(ident, "")[: index * 16]
                file.names[ident] = text + piece[: max(0, length - index * 16)].decode("latin-1")
            elif kind == written.ATTACHED and file.names.get(a, "") not in self.attached:
                self.attached.append(file.names.get(a, "?"))
                self._news = True
            elif kind == written.SEEN:
                self.frameworks[file.names.get(a, "?")] = file.names.get(b, "?")

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
