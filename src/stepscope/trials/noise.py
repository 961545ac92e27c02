"""How much identical trials differ on this machine: a JSON file in the state folder.

It is learnt from repeats, by workload, machine and device. A workload that was never repeated is
taken to be like the noisier half of those that were; until any was, a noise is assumed. Where the
file cannot be read or written, the user is told, and trials go on.
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

from stepscope.analysis.trial.throughput import ASSUMED_NOISE, LEARNT_FROM, scatter, with_evidence
from stepscope.records.codec import dumps, loads
from stepscope.records.facts import Environment
from stepscope.records.trial import ProcessNoise, RankFacts
from stepscope.runs.paths import replace_atomically
from stepscope.trials.state import STATE_VARIABLE, locked, state_folder

Device = Literal["cpu", "gpu"]

FORMAT = 1
_REMEMBERED_DOF = 60.0  # older repeats fade as new ones come: a machine changes
_NOT_PART_OF_KEY = ("epochs", "steps", "seconds", "seed")


@dataclass(frozen=True)
class MachineKind:
    """What trials must share for their throughputs to scatter alike."""

    hardware: str
    device: Device
    workload: str = ""  # the model, and a digest of its settings but for its length and its seed

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
    """Squared relative deviations of repeats from their mean, with their degrees of freedom."""

    squares: float = 0.0
    dof: float = 0.0
    trials: float = 0.0

    def with_repeats(self, rates: Sequence[float]) -> NoiseEntry:
        squares, dof = scatter(rates)
        squares, dof = squares + self.squares, dof + self.dof
        fading = min(1.0, _REMEMBERED_DOF / dof)
        return NoiseEntry(squares * fading, dof * fading, self.trials + len(rates))


@dataclass(frozen=True)
class _NoiseFile:
    format: int
    machines: dict[str, NoiseEntry] = field(default_factory=dict)


class NoiseStore:
    """The noise of the machines that share a file. `tell` hears, once, what is wrong with it."""

    def __init__(
        self, path: Path | None = None, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self.path = path or state_folder() / "spread.json"
        self._tell = tell
        self._told: set[str] = set()

    def get(self, machine: MachineKind) -> ProcessNoise:
        return _known(machine, self._read())

    def learn(self, machine: MachineKind, rates: Sequence[float]) -> ProcessNoise:
        """Add the throughputs of repeats of one trial; returns what is known with them."""
        usable = [rate for rate in rates if math.isfinite(rate) and rate > 0]
        if len(usable) < 2:
            return self.get(machine)

        def learnt(entries: dict[str, NoiseEntry]) -> dict[str, NoiseEntry]:
            entry = entries.get(machine.key, NoiseEntry())
            return {**entries, machine.key: entry.with_repeats(usable)}

        try:
            # The lock is a file of its own, as the other one is replaced.
            with locked(self.path.with_suffix(".lock")):
                entries = learnt(self._read(set_aside=True))
                replace_atomically(self.path, dumps(_NoiseFile(FORMAT, entries), indent=1) + "\n")
        except OSError as error:
            self._tell_once(
                f"What these repeats teach is not kept: {self.path}: {error.strerror}. "
                f"Set {STATE_VARIABLE} to a folder that can be written"
            )
            entries = learnt(self._read())
        return _known(machine, entries)

    def _read(self, set_aside: bool = False) -> dict[str, NoiseEntry]:
        """The entries of all machines. Only under the lock may a file that cannot be understood be
        `set_aside`: else it may be another one by then."""
        try:
            stored = loads(_NoiseFile, self.path.read_bytes())
            amounts = [n for e in stored.machines.values() for n in (e.squares, e.dof, e.trials)]
            if stored.format != FORMAT or not all(math.isfinite(n) and n >= 0 for n in amounts):
                raise ValueError("not a file of ours")
            return stored.machines
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._tell_once(f"What repeats taught cannot be read: {self.path}: {error.strerror}")
        except ValueError:
            damaged = self.path.with_suffix(".damaged")
            if set_aside:
                os.replace(self.path, damaged)
            place = f" and is now {damaged.name}" if set_aside else ""
            anew = "the spread of trials is learnt anew"
            self._tell_once(f"{self.path} could not be understood{place}: {anew}")
        return {}

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)


def _known(machine: MachineKind, entries: Mapping[str, NoiseEntry]) -> ProcessNoise:
    """From repeats of the workload itself where there are enough; a few of them shift what is known
    of other workloads, or assumed."""
    own = entries.get(machine.key)
    known = ASSUMED_NOISE[machine.device]
    if own is None or own.dof < LEARNT_FROM:
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
            known = ProcessNoise(math.sqrt(squares / dof), known.dof, "others", trials)
    if own is None:
        return known
    return with_evidence(known, own.squares, own.dof, int(own.trials))


def device_kind(rank: RankFacts) -> Device:
    return "cpu" if rank.device in (None, "cpu") else "gpu"
