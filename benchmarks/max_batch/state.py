"""The state of the benchmark: one JSON file, replaced atomically after each measurement."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class State:
    """Measurements by case and item. Those of a scan are in `points`, by batch."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._data: Record = {"machine": None, "commands": [], "measured": {}}
        if path and path.exists():
            self._data = _state_in(json.loads(path.read_text()))

    @property
    def machine(self) -> Record | None:
        """The machine that measured."""
        machine: Record | None = self._data["machine"]
        return machine

    @property
    def commands(self) -> list[str]:
        commands: list[str] = self._data["commands"]
        return commands

    @property
    def measured(self) -> dict[str, dict[str, Record]]:
        measured: dict[str, dict[str, Record]] = self._data["measured"]
        return measured

    def start_run(self, machine: Record, command: str) -> None:
        self._data["machine"] = machine
        self.commands.append(command)
        self._save()

    def get(self, case: str, item: str) -> Record | None:
        """Return a measurement, or None if it is missing or failed."""
        record = self.measured.get(case, {}).get(item)
        return record if record is not None and "failed" not in record else None

    def failure(self, case: str, item: str) -> str | None:
        record = self.measured.get(case, {}).get(item) or {}
        return record.get("failed")

    def put(self, case: str, item: str, record: Record) -> None:
        self.measured.setdefault(case, {})[item] = {**record, "at": round(time.time(), 1)}
        self._save()

    def points(self, case: str) -> dict[str, Record]:
        """Return the records of a scan by batch."""
        points: dict[str, Record] = self.measured.get(case, {}).get("points", {})
        return points

    def point(self, case: str, batch: int) -> Record | None:
        return self.points(case).get(str(batch))

    def put_point(self, case: str, batch: int, record: Record) -> None:
        points = self.measured.setdefault(case, {}).setdefault("points", {})
        points[str(batch)] = record
        self._save()

    def clear_failure(self, case: str, item: str) -> None:
        if self.failure(case, item) is not None:
            del self.measured[case][item]
            self._save()

    def forget(self, case: str, item: str) -> None:
        self.measured.get(case, {}).pop("points" if item == "scan" else item, None)

    def merge(self, others: Iterable[State]) -> None:
        """Add other states. The newer measurement wins, and a failure always loses."""
        for other in others:
            self._data["machine"] = self.machine or other.machine
            self.commands.extend(c for c in other.commands if c not in self.commands)
            for case, items in other.measured.items():
                mine = self.measured.setdefault(case, {})
                for item, record in items.items():
                    if item == "points":
                        mine[item] = {**record, **mine.get(item, {})}
                    elif item not in mine or _rank(record) > _rank(mine[item]):
                        mine[item] = record
        self._save()

    def _save(self) -> None:
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(self._data, indent=1) + "\n")
        os.replace(fresh, self._path)


def _state_in(record: Record) -> Record:
    """Return the state, also from a result file, so that a later run can continue it."""
    if "figures" not in record:
        return record
    figures = record["figures"]
    keys = ("commands", "measured")
    return {"machine": record["machine"], **{key: figures[key] for key in keys}}


def _rank(record: Record) -> tuple[bool, float]:
    return "failed" not in record, record.get("at", 0.0)
