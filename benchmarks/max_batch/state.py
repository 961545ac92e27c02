"""What was measured so far: one JSON file, replaced as a whole after each measurement."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Told = dict[str, Any]


class State:
    """Measurements by case and piece of work. A scan's are by batch, in `points`."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._told: Told = {"machine": None, "commands": [], "measured": {}}
        if path and path.exists():
            self._told = _state_in(json.loads(path.read_text()))

    @property
    def machine(self) -> Told | None:
        """Where it was measured."""
        machine: Told | None = self._told["machine"]
        return machine

    @property
    def commands(self) -> list[str]:
        commands: list[str] = self._told["commands"]
        return commands

    @property
    def measured(self) -> dict[str, dict[str, Told]]:
        measured: dict[str, dict[str, Told]] = self._told["measured"]
        return measured

    def begins(self, machine: Told, command: str) -> None:
        self._told["machine"] = machine
        self.commands.append(command)
        self._save()

    def get(self, case: str, item: str) -> Told | None:
        """A measurement that succeeded."""
        told = self.measured.get(case, {}).get(item)
        return told if told is not None and "failed" not in told else None

    def failure(self, case: str, item: str) -> str | None:
        told = self.measured.get(case, {}).get(item) or {}
        return told.get("failed")

    def put(self, case: str, item: str, told: Told) -> None:
        self.measured.setdefault(case, {})[item] = {**told, "at": round(time.time(), 1)}
        self._save()

    def points(self, case: str) -> dict[str, Told]:
        """The batches of a scan, each as its process told."""
        points: dict[str, Told] = self.measured.get(case, {}).get("points", {})
        return points

    def point(self, case: str, batch: int) -> Told | None:
        return self.points(case).get(str(batch))

    def put_point(self, case: str, batch: int, told: Told) -> None:
        points = self.measured.setdefault(case, {}).setdefault("points", {})
        points[str(batch)] = told
        self._save()

    def clear_failure(self, case: str, item: str) -> None:
        if self.failure(case, item) is not None:
            del self.measured[case][item]
            self._save()

    def forget(self, case: str, item: str) -> None:
        self.measured.get(case, {}).pop("points" if item == "scan" else item, None)

    def merge(self, others: Iterable[State]) -> None:
        """The newer of two measurements; one that failed only where there is no other."""
        for other in others:
            self._told["machine"] = self.machine or other.machine
            self.commands.extend(c for c in other.commands if c not in self.commands)
            for case, items in other.measured.items():
                mine = self.measured.setdefault(case, {})
                for item, told in items.items():
                    if item == "points":
                        mine[item] = {**told, **mine.get(item, {})}
                    elif item not in mine or _rank(told) > _rank(mine[item]):
                        mine[item] = told
        self._save()

    def _save(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(self._told, indent=1) + "\n")
        os.replace(fresh, self._path)


def _state_in(told: Told) -> Told:
    """Of a result file, what it was written from: so a later run goes on where it ended."""
    if "figures" not in told:
        return told
    figures = told["figures"]
    keys = ("commands", "measured")
    return {"machine": told["machine"], **{key: figures[key] for key in keys}}


def _rank(told: Told) -> tuple[bool, float]:
    return "failed" not in told, told.get("at", 0.0)
