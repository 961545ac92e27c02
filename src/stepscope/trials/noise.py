"""The noise between identical trials on this machine: a JSON file in the state folder.

It is estimated from repeats, by workload, machine and device. For a workload without repeats, the
noisier half of the other workloads is used; without any repeats, a default is assumed. If the file
cannot be read or written, the user is notified and trials continue.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stepscope.analysis.trial.throughput import ASSUMED_NOISE, MIN_NOISE_DOF, scatter, with_evidence
from stepscope.records.codec import dumps, loads
from stepscope.records.facts import Environment
from stepscope.records.trial import ProcessNoise, RankFacts
from stepscope.runs.files import UnsafeFile, replace_atomically
from stepscope.state import STATE_VARIABLE, state_folder
from stepscope.trials.locks import locked

Device = Literal["cpu", "gpu"]

FORMAT = 1
_MAX_DOF = 60.0  # older repeats lose weight, because a machine changes
_NOT_PART_OF_KEY = ("epochs", "steps", "seconds", "seed")


@dataclass(frozen=True)
class MachineKind:
    """The properties that trials must share to have the same noise."""

    hardware: str
    device: Device
    workload: str = ""  # the model and a digest of its settings without length and seed

    @classmethod
    def of(
        cls, environment: Environment, device: Device, workload: Mapping[str, Any]
    ) -> MachineKind:
        cpu, gpus = environment.cpu, sorted(gpu.model for gpu in environment.gpus)
        cores = f"{cpu.model or 'unknown CPU'} × {cpu.logical or os.cpu_count()}"
        settings = {key: value for key, value in workload.items() if key not in _NOT_PART_OF_KEY}
        digest = zlib.crc32(json.dumps(settings, sort_keys=True, default=str).encode())
        return cls("; ".join([cores, *gpus]), device, f"{workload.get('model')} {digest:08x}")

    @property
    def place(self) -> str:
        return f"{self.hardware}; on {self.device}"

    @property
    def key(self) -> str:
        return f"{self.place}; {self.workload}" if self.workload else self.place


@dataclass(frozen=True)
class NoiseEntry:
    """Squared relative deviations of repeats from their mean, with the degrees of freedom."""

    squares: float = 0.0
    dof: float = 0.0
    trials: float = 0.0

    def with_repeats(self, rates: Sequence[float]) -> NoiseEntry:
        squares, dof = scatter(rates)
        squares, dof = squares + self.squares, dof + self.dof
        weight = min(1.0, _MAX_DOF / dof)
        return NoiseEntry(squares * weight, dof * weight, self.trials + len(rates))


@dataclass(frozen=True)
class _NoiseFile:
    format: int
    machines: dict[str, NoiseEntry] = field(default_factory=dict)


class NoiseStore:
    """The noise of the machines that share a file. `notify` receives each problem once."""

    def __init__(
        self, path: Path | None = None, notify: Callable[[str], None] = lambda _: None
    ) -> None:
        self.path = path or state_folder() / "noise.json"
        self._notify = notify
        self._notified: set[str] = set()

    def get(self, machine: MachineKind) -> ProcessNoise:
        return _known(machine, self._read())

    def learn(self, machine: MachineKind, rates: Sequence[float]) -> ProcessNoise:
        """Add the throughputs of the repeats of a trial; return the updated noise."""
        usable = [rate for rate in rates if math.isfinite(rate) and rate > 0]
        if len(usable) < 2:
            return self.get(machine)

        def updated(entries: dict[str, NoiseEntry]) -> dict[str, NoiseEntry]:
            entry = entries.get(machine.key, NoiseEntry())
            return {**entries, machine.key: entry.with_repeats(usable)}

        try:
            # The lock is a separate file, because the data file is replaced.
            with locked(self.path.with_suffix(".lock")):
                entries = updated(self._read(rename_damaged=True))
                replace_atomically(self.path, dumps(_NoiseFile(FORMAT, entries), indent=1) + "\n")
        except (OSError, UnsafeFile) as error:
            if isinstance(error, UnsafeFile):
                problem = error.message
            else:
                problem = f"{self.path}: {error.strerror}"
            self._warn_once(
                f"the noise estimate could not be saved: {problem}. "
                f"Set {STATE_VARIABLE} to a writable folder"
            )
            entries = updated(self._read())
        return _known(machine, entries)

    def _read(self, rename_damaged: bool = False) -> dict[str, NoiseEntry]:
        """Return the entries of all machines. `rename_damaged` requires the lock, because another
        process may replace the file."""
        try:
            stored = loads(_NoiseFile, self.path.read_bytes())
            amounts = [n for e in stored.machines.values() for n in (e.squares, e.dof, e.trials)]
            if stored.format != FORMAT or not all(math.isfinite(n) and n >= 0 for n in amounts):
                raise ValueError("invalid contents")
            return stored.machines
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._warn_once(f"the noise estimate could not be read: {self.path}: {error.strerror}")
        except ValueError:
            damaged = self.path.with_suffix(".damaged")
            if rename_damaged:
                os.replace(self.path, damaged)
            renamed = f" and was renamed to {damaged.name}" if rename_damaged else ""
            self._warn_once(f"{self.path} is damaged{renamed}; the noise is estimated from scratch")
        return {}

    def _warn_once(self, text: str) -> None:
        if text not in self._notified:
            self._notified.add(text)
            self._notify(text)


def _known(machine: MachineKind, entries: Mapping[str, NoiseEntry]) -> ProcessNoise:
    """Return the noise from repeats of the workload if there are enough; a few repeats only adjust
    the noise of other workloads or the assumed one."""
    own = entries.get(machine.key)
    known = ASSUMED_NOISE[machine.device]
    if own is None or own.dof < MIN_NOISE_DOF:
        others = [
            entry
            for key, entry in entries.items()
            if key.startswith(f"{machine.place}; ") and key != machine.key and entry.dof >= 1
        ]
        if others:
            others.sort(key=lambda entry: entry.squares / entry.dof, reverse=True)
            noisier = others[: (len(others) + 1) // 2]
            squares, dof = sum(e.squares for e in noisier), sum(e.dof for e in noisier)
            trials = int(sum(e.trials for e in noisier))
            known = ProcessNoise(math.sqrt(squares / dof), known.dof, "other_workloads", trials)
    if own is None:
        return known
    return with_evidence(known, own.squares, own.dof, int(own.trials))


def device_kind(rank: RankFacts) -> Device:
    return "cpu" if rank.device in (None, "cpu") else "gpu"
