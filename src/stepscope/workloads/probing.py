"""What a probe is asked and what it tells: one throw-away process that trains a batch for a moment.

A probe runs the whole cycle of a training, since memory runs out in all of its parts: some steps
(the first makes the optimizer's state), the last and smaller batch of an epoch, an evaluation, and
steps again. Standard library only: both sides of the pipe read it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepscope.analysis.memory.model import Parts

Kind = Literal["ok", "gpu_oom", "gpu_busy", "host_oom", "error", "workload", "timeout", "killed"]
"""`gpu_busy`: this GPU takes no second process. `killed`: by a SIGKILL, of a user or of the kernel
where the host is short of memory. It says nothing of the memory of the device."""


@dataclass(frozen=True)
class ProbeRequest:
    batches: tuple[int, ...]
    """One after the other in the same process, the cache emptied between them."""
    cap: int | None = None
    """Bytes that the framework may allocate on the device; None: what there is."""
    steps: int = 3
    """Before the smaller batch. Without the cycle, these are all."""
    again: int = 2
    """After the evaluation."""
    cycle: bool = True
    free_before: int | None = None
    """Bytes free on the device before the probe: the rest that goes is the context."""
    turn: bool = False
    """Whether to train while no other probe of this user does: its steps are to be timed."""
    trace: bool = False
    """Whether to keep every allocation, for a replay. Of the last batch, which should be alone."""
    layers: bool = False
    """Whether to tell the layers of the model, where the framework can."""


WAITS, READY, BEAT = "waits", "ready", "beat"
"""Endings of files that are there while a probe waits for its turn, once it could train, and after
each thing that it has done."""


@contextmanager
def taking_turns(alone: bool, waits: Path | None = None) -> Iterator[None]:
    """Train while nobody is timed, or be timed while nobody trains: among all probes of a user on
    this machine, so that two who look for a batch at once do not slow each other down unseen.
    Where the lock cannot be had, it goes on without."""
    lock = Path(tempfile.gettempdir()) / f"stepscope-turns-{os.getuid()}"
    with ExitStack() as stack:
        with suppress(OSError):
            file = stack.enter_context(lock.open("ab"))
            if waits is not None:
                waits.touch()
            fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        if waits is not None:
            waits.unlink(missing_ok=True)
        yield


@dataclass(frozen=True)
class Layer:
    """One layer of a model by equation 4.1 of Tripathi 2019: parameters, and outputs twice."""

    name: str
    kind: str
    parameters: int
    """Bytes."""
    output: int
    """Bytes of its output for one sample."""


@dataclass(frozen=True)
class ProbeResult:
    batch: int
    kind: Kind
    phase: str = ""
    """Where it ended, if it did not go well: "step 1", "evaluation", "smaller batch"."""
    allocated_peak: int = 0
    """Bytes in use at once."""
    reserved_peak: int = 0
    """Bytes that the allocator held at once: in use, cached, or lost between."""
    retries: int = 0
    """How often it found no memory, gave back what it had cached, and tried again."""
    ooms: int = 0
    """How often even that did not help: cuDNN then takes an algorithm that needs less."""
    step_s: tuple[float, ...] = ()
    """Each whole training step of this batch, on the clock of the device."""
    kept: tuple[int, ...] = ()
    """Bytes in use after each of these steps: a leak shows here."""
    reserved: tuple[int, ...] = ()
    """Bytes held after each of these steps."""
    wanted: int | None = None
    """The allocation that failed."""
    missing: int | None = None
    """How much of it there was not."""
    parts: Parts = dataclasses.field(default_factory=Parts)
    message: str = ""
    hint: str = ""
    notes: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    """In the order in which a batch goes through them; empty also where they cannot be told."""

    @property
    def is_ok(self) -> bool:
        return self.kind == "ok"

    @property
    def is_oom(self) -> bool:
        """Whether the memory that is fitted into ran out: what bounds a batch by memory."""
        return self.kind in ("gpu_oom", "host_oom")

    @property
    def samples_per_second(self) -> float | None:
        """By the median step, without the first, which builds and tunes."""
        steps = sorted(self.step_s[1:])
        return self.batch / steps[len(steps) // 2] if steps and steps[len(steps) // 2] > 0 else None


@dataclass(frozen=True)
class Subject:
    """What is probed, as the process that holds it knows it."""

    device: str
    """As the framework names its kind: cpu, cuda."""
    device_name: str
    parameters: int
    sample_bytes: int
    """One sample within a batch, on the host: the largest that was seen."""
    samples: int | None
    """How many the data set has; None where it has no end, or is made up by us."""
    layers: int = 1
    """How many the model has, of those that hold no others."""
    varies: bool = False
    """Whether samples differ in size, so that batches are made of the largest."""
    own_optimizer: bool = False
    optimizer: str = ""
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"
