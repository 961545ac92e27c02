"""Which CPUs a trial runs on, and whether it stays there."""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from stepscope.sensors import procfs
from stepscope.trials.processes import trial_processes

_AGAIN_S = 2.0  # libraries may set a mask at any time: all are read again this often
_KEPT = 20


class Core(NamedTuple):
    """Where a CPU sits: two of the same core share its units."""

    package: int
    core: int


def choose_cpus(count: int, allowed: Collection[int], cores: Mapping[int, Core]) -> tuple[int, ...]:
    """CPUs of distinct cores first, of one package as far as that goes.

    The package with most cores for us comes first; CPUs whose place is not known are cores of
    their own.
    """
    places = {cpu: cores.get(cpu, Core(0, -1 - cpu)) for cpu in allowed}
    sizes = Counter(place.package for place in set(places.values()))
    siblings: dict[Core, int] = defaultdict(int)
    ranked = []
    for cpu, place in sorted(places.items()):
        ranked.append((siblings[place], -sizes[place.package], place.package, cpu))
        siblings[place] += 1
    return tuple(sorted(cpu for *_, cpu in sorted(ranked)[:count]))


def read_cores(folder: Path = Path("/sys/devices/system/cpu")) -> dict[int, Core]:
    found = {}
    for topology in folder.glob("cpu[0-9]*/topology"):
        try:
            package = int((topology / "physical_package_id").read_text())
            core = int((topology / "core_id").read_text())
        except (OSError, ValueError):
            continue
        found[int(topology.parent.name[3:])] = Core(package, core)
    return found


class Affinity:
    """Keeps the processes of a trial, with all their threads, on some CPUs."""

    def __init__(self, cpus: Collection[int]) -> None:
        self.cpus = tuple(cpus)
        self.masks_checked = 0
        self.escaped: list[dict[str, Any]] = []  # who was seen on other CPUs. They were put back
        self._allowed = frozenset(cpus)
        self._seen: set[int] = set()
        self._again_at = 0.0

    def place(self, pid: int) -> None:
        """OSError if it may not be."""
        for thread in procfs.threads(pid):
            os.sched_setaffinity(thread, self._allowed)

    def inspect(self, pids: Collection[int]) -> None:
        """Look at the masks of new processes, and now and then at those of all."""
        now = time.monotonic()
        due = now >= self._again_at
        if due:
            self._again_at = now + _AGAIN_S
        for pid in pids if due else set(pids) - self._seen:
            for thread in procfs.threads(pid):
                with contextlib.suppress(OSError):  # it has ended
                    mask = os.sched_getaffinity(thread)
                    self.masks_checked += 1
                    if mask <= self._allowed:
                        continue
                    process = trial_processes.identify(pid)
                    if process is not None and len(self.escaped) < _KEPT:
                        found = {"pid": pid, "name": process.name, "cpus": sorted(mask)}
                        self.escaped.append(found)
                    os.sched_setaffinity(thread, self._allowed)
        self._seen = set(pids)
