"""Hostile event files of processes, and step logs of ranks."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stepscope.inject import events
from stepscope.runs.events import RECORD, Records

EXTREMES = (0, 1, -1, 2**31, -(2**31), 2**53, 10**18, 2**62, 2**63 - 1, -(2**63))
VALUES = (0.0, -0.0, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "epoch",
    "step",
    "train",
    "\x1b[31mred\x1b]0;owned\x07\x9b31m",
    "<script>alert(1)</script>",
    "a\0b\nc\td",
    "\u202e",
    "x" * 1024,
    "train.py:41\tloader = DataLoader()\tinner.py:\x1b[31m\t<b>\tloader",
    '{"threads": 1e400, "parameters": -1, "device": ["\\ud800"]}',
    '{"threads":' * 90,
    "GPU-\x1b[31m",
)
MANY = 30_000
"""Records of one kind. The files stay below a megabyte."""


def hostile_events(path: Path, rng: random.Random) -> str:
    data = path.read_bytes()
    records = np.frombuffer(data, RECORD, len(data) // events.SIZE).copy()
    random_numbers = np.random.default_rng(rng.getrandbits(32))
    action = rng.choice(_ACTIONS)
    path.write_bytes(_name_records(rng) + action(records, rng, random_numbers).tobytes())
    return f"hostile events ({action.__name__})"


def _name_records(rng: random.Random) -> bytes:
    return b"".join(events.name_records(text) for text in rng.sample(TEXTS, 4))


def _ids() -> npt.NDArray[np.int64]:
    return np.array([events.name_id(text) for text in TEXTS])


def _random_fields(records: Records, rng: random.Random, numbers: np.random.Generator) -> Records:
    """Put extreme values into one field of some records."""
    field = rng.choice(("t", "number", "a", "b", "flags"))
    chosen = numbers.random(len(records)) < rng.choice((0.01, 0.3, 1.0))
    extremes = np.array(EXTREMES).astype(records.dtype[field])
    records[field][chosen] = numbers.choice(extremes, chosen.sum())
    return records


def _random_kinds(records: Records, rng: random.Random, numbers: np.random.Generator) -> Records:
    chosen = numbers.random(len(records)) < rng.choice((0.1, 1.0))
    records["kind"][chosen] = numbers.integers(0, events.LAST_KIND + 2, chosen.sum())
    records["a"][chosen] = numbers.choice(_ids(), chosen.sum())
    return records


def _random_records(records: Records, rng: random.Random, numbers: np.random.Generator) -> Records:
    new = np.frombuffer(numbers.bytes(events.SIZE * 2000), RECORD).copy()
    new["kind"] %= events.LAST_KIND + 2
    if len(records):
        new["t"] = numbers.choice(records["t"], len(new))
    return np.concatenate([records, new])


def _marks(records: Records, rng: random.Random, numbers: np.random.Generator) -> Records:
    """Add epochs, steps and phases with extreme values, in any order."""
    marks = _copies(records, 500)
    marks["kind"] = numbers.choice([events.MARK, events.PHASE_BEGIN, events.PHASE_END], len(marks))
    marks["a"] = numbers.choice(_ids(), len(marks))
    marks["flags"] = numbers.integers(0, 64, len(marks))
    values = np.concatenate([np.array(EXTREMES), np.array(VALUES).view(np.int64), _ids()])
    marks["b"] = numbers.choice(values, len(marks))
    return np.concatenate([records, marks])


def _many_of_one_kind(
    records: Records, rng: random.Random, numbers: np.random.Generator
) -> Records:
    """Add many records that readers compare, count or show one by one."""
    many = _copies(records, MANY)
    many["kind"] = rng.randint(1, events.LAST_KIND)
    many["number"] = rng.choice((1, np.arange(MANY)))
    many["a"] = rng.choice((events.name_id("epoch"), np.arange(MANY), 10**9))
    many["b"] = rng.choice((1, np.arange(MANY)))
    many["flags"] = rng.choice((0, 1, 2, 3, 17, 33))
    return np.concatenate([records, many])


def _many_epochs(records: Records, rng: random.Random, numbers: np.random.Generator) -> Records:
    """Add short epochs, each with a loader of its own or all with the same one."""
    many = _copies(records, MANY // 3)
    kinds = (events.LOADER_BEGIN, events.BATCH, events.BATCH, events.STEP, events.LOADER_END)
    for place, kind in enumerate(kinds):
        many["kind"][place :: len(kinds)] = kind
    many["number"] = rng.choice((1, np.arange(len(many)) // len(kinds)))
    many["b"] = rng.choice((-1, 2, 2**63 - 1))
    return np.concatenate([records, many])


def _bad_names(records: Records, rng: random.Random, numbers: np.random.Generator) -> Records:
    names = np.flatnonzero(records["kind"] == events.NAME)
    records["number"][names] = numbers.choice([0, 1, 17, 2000, 2**32 - 1], len(names))
    records["flags"][names] = numbers.choice([0, 1, 2, 65535], len(names))
    return records


def _copies(records: Records, count: int) -> Records:
    """Return records with times of the run."""
    copies = np.zeros(count, RECORD)
    if len(records):
        first, last = int(records["t"].min()), int(records["t"].max())
        copies["t"] = np.linspace(first, last, count).astype(np.int64)
    return copies


_ACTIONS = (
    _random_fields,
    _random_kinds,
    _random_records,
    _marks,
    _many_of_one_kind,
    _many_epochs,
    _bad_names,
)


def hostile_steps(path: Path, rng: random.Random) -> str:
    """Put extreme values into the steps of a rank."""
    data = path.read_bytes()
    steps = np.frombuffer(data, "<i8", len(data) // 8).copy()
    numbers = np.random.default_rng(rng.getrandbits(32))
    chosen = numbers.random(len(steps)) < rng.choice((0.01, 0.2, 1.0))
    steps[chosen] = numbers.choice(np.array(EXTREMES), chosen.sum())
    if rng.random() < 0.3:  # in order, so that all are read
        steps.reshape(-1, 6)[:, :2] = np.sort(steps.reshape(-1, 6)[:, :2], axis=0)
    path.write_bytes(steps.tobytes())
    return "hostile steps"
