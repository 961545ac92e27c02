"""CPU affinity of a trial: choice of CPUs and enforcement."""

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

_CHECK_ALL_S = 2.0  # libraries may change an affinity mask at any time
_MAX_RECORDED = 20


class Core(NamedTuple):
    """The physical core of a CPU; two CPUs of one core share its units."""

    package: int
    core: int


def choose_cpus(count: int, allowed: Collection[int], cores: Mapping[int, Core]) -> tuple[int, ...]:
    """Choose CPUs of distinct cores first, on one package if possible.

    The package with the most allowed cores is used first. A CPU with an unknown topology counts as
    a separate core.
    """
    core_of = {cpu: cores.get(cpu, Core(0, -1 - cpu)) for cpu in allowed}
    sizes = Counter(core.package for core in set(core_of.values()))
    siblings: dict[Core, int] = defaultdict(int)
    ranked = []
    for cpu, core in sorted(core_of.items()):
        ranked.append((siblings[core], -sizes[core.package], core.package, cpu))
        siblings[core] += 1
    return tuple(sorted(cpu for *_, cpu in sorted(ranked)[:count]))


def read_cores(folder: Path = Path("/sys/devices/system/cpu")) -> dict[int, Core]:
    cores = {}
    for topology in folder.glob("cpu[0-9]*/topology"):
        try:
            package = int((topology / "physical_package_id").read_text())
            core = int((topology / "core_id").read_text())
        except (OSError, ValueError):
            continue
        cores[int(topology.parent.name[3:])] = Core(package, core)
    return cores


class Affinity:
    """Keeps all threads of a trial on a set of CPUs."""

    def __init__(self, cpus: Collection[int]) -> None:
        self.cpus = tuple(cpus)
        self.masks_checked = 0
        self.escaped: list[dict[str, Any]] = []  # processes found on other CPUs and moved back
        self._allowed = frozenset(cpus)
        self._seen: set[int] = set()
        self._next_full_check = 0.0

    def place(self, pid: int) -> None:
        """Set the affinity of a process; raises OSError."""
        for thread in procfs.threads(pid):
            os.sched_setaffinity(thread, self._allowed)

    def inspect(self, pids: Collection[int]) -> None:
        """Check the masks of new processes and, every 2 s, of all processes."""
        now = time.monotonic()
        due = now >= self._next_full_check
        if due:
            self._next_full_check = now + _CHECK_ALL_S
        for pid in pids if due else set(pids) - self._seen:
            for thread in procfs.threads(pid):
                with contextlib.suppress(OSError):  # the thread has exited
                    mask = os.sched_getaffinity(thread)
                    self.masks_checked += 1
                    if mask <= self._allowed:
                        continue
                    process = trial_processes.identify(pid)
                    if process is not None and len(self.escaped) < _MAX_RECORDED:
                        self.escaped.append(
                            {"pid": pid, "name": process.name, "cpus": sorted(mask)}
                        )
                    os.sched_setaffinity(thread, self._allowed)
        self._seen = set(pids)
