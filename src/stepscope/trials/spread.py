"""What is learnt, from one trial to the next, of how much identical trials differ on this machine.

Workloads differ in it as much as machines do, so that repeats teach of their own workload, on
their machine and device: a JSON file in `$STEPSCOPE_STATE`, `$XDG_STATE_HOME/stepscope` or
`~/.local/state/stepscope`. One that was never repeated is taken to be like the noisier half of
those that were; and until any was, a spread is assumed. Which it is, is said.

The file makes intervals better, and nothing depends on it: where it cannot be read or written, the
user is told, and trials go on.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepscope.analysis.throughput import LEARNT_FROM, Spread, scatter, with_evidence
from stepscope.runs.paths import replace_atomically

Device = Literal["cpu", "gpu"]
Entry = dict[str, float]
FIELDS = ("squares", "dof", "trials")

STATE_VARIABLE = "STEPSCOPE_STATE"
FORMAT = 1
ASSUMED: dict[Device, Spread] = {
    "cpu": Spread(0.08, 4, "assumed"),
    "gpu": Spread(0.02, 4, "assumed"),
}
"""Seen on two shared cores (6 to 9.5 %), and on a GPU that nobody else used."""
_REMEMBERED_DOF = 60.0
"""What is older fades as new repeats come: a machine changes."""
_PATIENCE_S = 2.0
_NOT_TOLD_APART = ("epochs", "steps", "seconds", "seed")


@dataclass(frozen=True)
class Machine:
    """What trials must share for their spreads to be alike."""

    hardware: str
    device: Device
    workload: str = ""
    """What tells it from others on this machine."""

    @classmethod
    def of(
        cls, environment: Mapping[str, Any], device: Device, workload: Mapping[str, Any]
    ) -> Machine:
        """From the environment and the workload of a run, as run.json has them."""
        cpu = environment.get("cpu") or {}
        cores = f"{cpu.get('model') or 'unknown CPU'} × {cpu.get('logical') or os.cpu_count()}"
        gpus = sorted(str(gpu.get("model")) for gpu in environment.get("gpus") or ())
        return cls("; ".join([cores, *gpus]), device, _named(workload))

    @property
    def place(self) -> str:
        return f"{self.hardware}; on {self.device}"

    @property
    def key(self) -> str:
        return f"{self.place}; {self.workload}" if self.workload else self.place


def _named(workload: Mapping[str, Any]) -> str:
    """A workload by its model and a digest of its knobs, but for its length and its seed."""
    knobs = {key: value for key, value in workload.items() if key not in _NOT_TOLD_APART}
    digest = zlib.crc32(json.dumps(knobs, sort_keys=True, default=str).encode())
    return f"{workload.get('model')} {digest:08x}"


class SpreadStore:
    """The spreads of the machines that share a file. `tell` hears, once, what is wrong with it."""

    def __init__(
        self, path: Path | None = None, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self.path = path or state_folder() / "spread.json"
        self._tell = tell
        self._told: set[str] = set()

    def get(self, machine: Machine) -> Spread:
        """What is known now."""
        return _spread(machine, self._read())

    def learn(self, machine: Machine, rates: Sequence[float]) -> Spread:
        """Add the rates of repeats of one trial; returns what is known with them."""
        usable = [rate for rate in rates if math.isfinite(rate) and rate > 0]
        if len(usable) < 2:
            return self.get(machine)
        try:
            with self._locked():
                machines = self._read(set_aside=True)
                machines[machine.key] = _with_repeats(machines.get(machine.key), usable)
                text = json.dumps({"format": FORMAT, "machines": machines}, indent=1)
                replace_atomically(self.path, text + "\n")
        except OSError as error:
            self._tell_once(
                f"What these repeats teach is not kept: {self.path}: {error.strerror}. "
                f"Set {STATE_VARIABLE} to a folder that can be written"
            )
            machines = self._read()
            machines[machine.key] = _with_repeats(machines.get(machine.key), usable)
        return _spread(machine, machines)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One writer at a time. The lock is a file of its own, as the other one is replaced."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(lock)
            yield
        finally:
            os.close(lock)

    def _read(self, set_aside: bool = False) -> dict[str, Entry]:
        """What is stored of each machine. Only who holds the lock may `set_aside` a file that
        cannot be understood: else it may be another one by then."""
        try:
            return _understood(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._tell_once(f"What repeats taught cannot be read: {self.path}: {error.strerror}")
        except ValueError:
            damaged = self.path.with_suffix(".damaged")
            if set_aside:
                os.replace(self.path, damaged)
            place = f" and is now {damaged.name}" if set_aside else ""
            self._tell_once(
                f"{self.path} could not be understood{place}: the spread of trials is learnt anew"
            )
        return {}

    def _tell_once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self._tell(text)


def state_folder() -> Path:
    """Where we remember what outlives a run."""
    told = os.environ.get(STATE_VARIABLE)
    if told:
        return Path(told)
    home = os.path.expanduser("~")
    if home == "~":  # nobody knows this user
        home = "/nonexistent"
    return Path(os.environ.get("XDG_STATE_HOME") or f"{home}/.local/state") / "stepscope"


def _understood(data: bytes) -> dict[str, Entry]:
    """The entries of a file; ValueError unless all of it is one of ours."""
    stored = json.loads(data)
    machines = stored.get("machines") if isinstance(stored, dict) else None
    if not isinstance(machines, dict) or stored.get("format") != FORMAT:
        raise ValueError("not a file of spreads")
    for entry in machines.values():
        if not isinstance(entry, dict) or not all(_is_amount(entry.get(field)) for field in FIELDS):
            raise ValueError("an entry that is none")
    return machines


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _with_repeats(entry: Entry | None, rates: Sequence[float]) -> Entry:
    """What is stored of a machine once these repeats are added."""
    before = entry or dict.fromkeys(FIELDS, 0.0)
    squares, dof = scatter(rates)
    squares, dof = squares + before["squares"], dof + before["dof"]
    fading = min(1.0, _REMEMBERED_DOF / dof)
    return {
        "squares": squares * fading,
        "dof": dof * fading,
        "trials": before["trials"] + len(rates),
    }


def _spread(machine: Machine, machines: Mapping[str, Entry]) -> Spread:
    """From repeats of the workload itself where there are enough; few of them move what is known of
    others, or assumed."""
    own = machines.get(machine.key)
    enough = own is not None and own["dof"] >= LEARNT_FROM
    known = ASSUMED[machine.device] if enough else _of_others(machine, machines)
    if own is None:
        return known
    return with_evidence(known, own["squares"], own["dof"], int(own["trials"]))


def _of_others(machine: Machine, machines: Mapping[str, Entry]) -> Spread:
    """Of a workload that was not repeated: as noisy as the noisier half of those that were."""
    others = [
        entry
        for key, entry in machines.items()
        if key.startswith(f"{machine.place}; ") and key != machine.key and entry["dof"] >= 1
    ]
    if not others:
        return ASSUMED[machine.device]
    others.sort(key=lambda entry: entry["squares"] / entry["dof"], reverse=True)
    noisier = others[: (len(others) + 1) // 2]
    squares, dof = (sum(entry[field] for entry in noisier) for field in ("squares", "dof"))
    trials = int(sum(entry["trials"] for entry in noisier))
    return Spread(math.sqrt(squares / dof), ASSUMED[machine.device].dof, "others", trials)


def _lock(descriptor: int) -> None:
    """Wait for the others, but not for ever: learning is not worth it."""
    end = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def device_kind(told: Mapping[str, Any]) -> Device:
    """On what a rank computed, from what it said of itself."""
    return "gpu" if str(told.get("device") or "").startswith("cuda") else "cpu"
