"""Follow the events of the monitored processes: what the hook attached to, and ends of epochs."""

from __future__ import annotations

import os
import re
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from stepscope.inject import events as written
from stepscope.records.facts import HookFacts
from stepscope.runs.events import GrowingEvents, kinds_of
from stepscope.runs.paths import RunPaths
from stepscope.runs.tracking import tracking_text, unsupported_frameworks
from stepscope.sensors import procfs
from stepscope.sensors.tree import ProcessTree

_REPORT_NOT_LOADED_AFTER_S = 6.0
_REPORT_NOT_ATTACHED_AFTER_S = 15.0
_PYTHON = re.compile(r"^(python|pypy)[\d.]*$")
_EPOCH_ENDS = {written.LOADER_END, written.MARK, written.PHASE_END}
_TRAINING = {written.BATCH, written.STEP}
_NAMED_KINDS = {written.ATTACHED, written.SEEN, written.GPU_OOM}


class HookMonitor:
    """Polls the `events` folder. It is cheap: it reads only the kind of most new records."""

    def __init__(
        self, paths: RunPaths, tree: ProcessTree | None, command: list[str], enabled: bool
    ) -> None:
        """`tree` is None if the processes cannot be read."""
        self.attached: list[str] = []
        self.frameworks: dict[str, str] = {}
        self.gpu_ooms: list[tuple[int, str]] = []
        """Time and message of each GPU out-of-memory error that ended a process."""
        self._pythons: set[int] = set()
        """Python processes seen so far."""
        self._enabled = enabled
        self._off_reason = "" if enabled else "disabled"
        self._other_user: Literal["", "can write", "cannot write"] = ""
        """Whether a Python process runs as another user, and can write to `events`."""
        self._other_run = ""
        self._paths = paths
        self._tree = tree
        self._events = GrowingEvents(paths.events)
        self._begun = time.monotonic()
        self._announced = not enabled
        self._attached_just_now = False
        self._disabling_option = disabling_option(command)
        self._has_marks = False
        self._find_pythons()

    def attached_late(self, other_run: Path | None) -> None:
        """Note that the process was running before monitoring started, and reports to another
        run, if any."""
        self._off_reason = "already_running"
        self._other_run = str(other_run or "")

    def poll(self) -> bool:
        """Read new records. Return whether an epoch (or any marked time span) ended."""
        ended = False
        self._attached_just_now = False
        if not self._announced:
            self._find_pythons()
        for pid, records in self._events.poll():
            kinds = kinds_of(records)
            present = set(np.flatnonzero(np.bincount(kinds)).tolist())
            self._has_marks |= written.MARK in present
            if present & _TRAINING and self._tree is not None:
                self._tree.now_trains(pid)
            for kind in present & _NAMED_KINDS:
                for record in records[kinds == kind]:
                    self._add(kind, record, self._events.names[pid])
            ended = ended or bool(present & _EPOCH_ENDS)
        return ended

    def new_message(self, at_end: bool = False) -> str | None:
        """Return the message for the user once, as soon as it is known."""
        if self._announced:
            return None
        waited = time.monotonic() - self._begun
        settled = self.attached and not self._attached_just_now
        if at_end or settled or waited > _REPORT_NOT_ATTACHED_AFTER_S:
            self._announced = True
        elif waited > _REPORT_NOT_LOADED_AFTER_S or self._disabling_option:
            self._announced = bool(self._disabling_option) or not self._is_loaded()
        return tracking_text(self.facts()) if self._announced else None

    def facts(self) -> HookFacts:
        facts = HookFacts(
            enabled=self._enabled,
            attached=tuple(self.attached),
            frameworks=self.frameworks,
            other_run=self._other_run,
        )
        return facts if self.attached else replace(facts, reason=self._reason(facts))

    def _add(self, kind: int, record: np.void, names: dict[int, str]) -> None:
        name = names.get(int(record["a"]), "?")
        if kind == written.SEEN:
            self.frameworks[name] = names.get(int(record["b"]), "?")
        elif kind == written.GPU_OOM:
            self.gpu_ooms.append((int(record["t"]), name))
        elif name not in self.attached:
            self.attached.append(name)
            self._attached_just_now = True

    def _find_pythons(self) -> None:
        for process in self._tree or ():
            if process.pid not in self._pythons and _PYTHON.match(process.name):
                self._pythons.add(process.pid)
                user = procfs.owner(process.pid)
                if self._enabled and user not in (None, os.geteuid()):
                    is_writable = _make_writable_for(user, self._paths.events)
                    self._other_user = "can write" if is_writable else "cannot write"
                command = procfs.command_line(process.pid)
                self._disabling_option = self._disabling_option or disabling_option(command)

    def _is_loaded(self) -> bool:
        # Another user's Python loads the hook before it may write to the folder.
        is_loaded_there = self._other_user == "can write" and not self._disabling_option
        return is_loaded_there or self._paths.hook_loaded.exists()

    def _reason(self, facts: HookFacts) -> str:
        """Return the key of `HookFacts.reason` while nothing is attached."""
        if self._off_reason:
            return self._off_reason
        if self._has_marks:
            return "reported"
        if self._is_loaded():
            return "unsupported_framework" if unsupported_frameworks(facts) else "no_framework"
        if self._disabling_option:
            return self._disabling_option
        if self._other_user == "cannot write":
            return "other_user"
        return "not_loaded" if self._pythons else "no_python"


def _make_writable_for(user: int, folder: Path) -> bool:
    """Make another user the owner of a folder, as root only. Return whether this user can now write
    to it.

    Only root may be able to replace a folder on the path, or the user could redirect this function
    to any folder. In a folder with the sticky bit (/tmp), nobody can replace those of others.
    """
    folder = folder.resolve()
    for status in (parent.stat() for parent in folder.parents):
        is_open = status.st_mode & stat.S_IXOTH
        is_shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid or not is_open or (is_shared and not status.st_mode & stat.S_ISVTX):
            return False
    try:
        os.chown(folder, user, -1, follow_symlinks=False)
    except OSError:  # not root, or a file system without owners
        return False
    return True


def disabling_option(command: list[str]) -> str:
    """Return the reason why the options of a Python command keep it from loading the hook, as a
    key of `HookFacts.reason`; an empty text if they do not."""
    if not command or not _PYTHON.match(os.path.basename(command[0])):
        return ""
    words = iter(command[1:])
    for word in words:
        if word.startswith("--"):
            continue
        if not word.startswith("-") or word == "-":
            return ""
        for position, letter in enumerate(word[1:], 2):
            if letter in "IE":
                return "ignores_environment"
            if letter == "S":
                return "no_site"
            if letter in "cm":
                return ""
            if letter in "WX":
                if position == len(word):
                    next(words, None)
                break
    return ""
