"""Request and result of a probe: a short training at one batch size in a disposable process.

A probe runs a full training cycle, because memory can run out in every part of it: some steps (the
first one creates the optimizer state), the smaller last batch of an epoch, an evaluation, and more
steps. Both ends of the pipe import this module, so it imports no framework.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepscope.analysis.memory.model import Parts
from stepscope.runs.files import UnsafeFile, open_own
from stepscope.state import state_folder

Kind = Literal["ok", "gpu_oom", "gpu_busy", "host_oom", "error", "workload", "timeout", "killed"]
"""How a probe ended. `gpu_busy`: the GPU accepts no second process. `killed`: by SIGKILL, from a
user or from the kernel when host memory runs out; it says nothing about GPU memory."""


@dataclass(frozen=True)
class ProbeRequest:
    batches: tuple[int, ...]
    """Batch sizes to train one after another in the same process, with an empty cache each."""
    cap: int | None = None
    """Bytes that the framework may allocate on the device; None: no limit."""
    steps: int = 3
    """Steps before the smaller batch; without `cycle`, all steps."""
    steps_after: int = 2
    """Steps after the evaluation."""
    cycle: bool = True
    """Whether to run the full training cycle, not only steps."""
    free_before: int | None = None
    """Free bytes on the device before the probe, to compute the size of the CUDA context."""
    exclusive: bool = False
    """Whether no other probe of this user may train at the same time: steps are timed."""
    trace: bool = False
    """Whether to record every allocation of the last batch, for a replay."""
    layers: bool = False
    """Whether to report the layers of the model, if the framework can."""


WAITING, READY, HEARTBEAT = "waiting", "ready", "heartbeat"
"""Suffixes of files that exist while a probe waits for its turn, once it is ready to train, and
that it touches after each part of its cycle."""


@contextmanager
def training_lock(exclusive: bool, waiting: Path | None = None) -> Iterator[None]:
    """Hold the lock that all probes of a user on this machine share.

    A timed probe takes it exclusively, so that two searches do not slow each other down unnoticed.
    `waiting` exists while the lock is awaited. If the lock file is not accessible or not a regular
    file, the probe continues without it.
    """
    # Only this user can write to the folder, which several machines may share.
    path = state_folder() / f"probes-{os.uname().nodename}.lock"
    with ExitStack() as stack:
        with suppress(OSError, UnsafeFile):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = open_own(path, os.O_RDWR)
            stack.callback(os.close, lock)
            if waiting is not None:
                waiting.touch()
            fcntl.flock(lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        if waiting is not None:
            waiting.unlink(missing_ok=True)
        yield


@dataclass(frozen=True)
class Layer:
    """A layer of a model, for equation 4.1 of Tripathi 2019."""

    name: str  # name of the module, such as `layer1.0.conv1`
    kind: str  # class of the module
    parameter_bytes: int  # weights and biases
    output_bytes: int  # output for one sample


@dataclass(frozen=True)
class ProbeResult:
    """How one batch size went in a probe."""

    batch: int  # batch size
    kind: Kind  # `ok`, or how it failed
    phase: str = ""  # where it failed, such as `step 1`, `evaluation` or `smaller batch`
    allocated_peak_bytes: int = 0  # peak bytes in use
    reserved_peak_bytes: int = 0  # peak bytes held by the allocator: in use, cached or fragmented
    retries: int = 0  # allocator retries
    ooms: int = 0  # failed retries; cuDNN then selects an algorithm that needs less memory
    step_s: tuple[float, ...] = ()  # seconds of each training step, on the clock of the device
    allocated_bytes: tuple[int, ...] = ()  # bytes in use after each step; they grow with a leak
    reserved_bytes: tuple[int, ...] = ()  # bytes held by the allocator after each step
    requested_bytes: int | None = None  # size of the allocation that failed
    shortfall_bytes: int | None = None  # lower bound of the missing bytes
    parts: Parts = dataclasses.field(default_factory=Parts)  # what the memory consists of
    message: str = ""  # error message
    hint: str = ""  # what to do about the error
    notes: tuple[str, ...] = ()  # remarks of the probe
    layers: tuple[Layer, ...] = ()  # layers in execution order, if requested and known

    @property
    def is_ok(self) -> bool:
        return self.kind == "ok"

    @property
    def is_oom(self) -> bool:
        """Whether the searched memory ran out, so that memory is what limits the batch."""
        return self.kind in ("gpu_oom", "host_oom")

    @property
    def samples_per_second(self) -> float | None:
        """Throughput of the median step, without the first step, which allocates and tunes."""
        steps = sorted(self.step_s[1:])
        return self.batch / steps[len(steps) // 2] if steps and steps[len(steps) // 2] > 0 else None


@dataclass(frozen=True)
class Subject:
    """The workload that is probed."""

    device: str  # kind of device in the terms of the framework, such as `cpu` or `cuda`
    device_name: str  # product name
    parameters: int  # number of parameters
    sample_bytes: int  # one sample of a batch on the host; the largest that was seen
    samples: int | None  # size of the dataset; null if it is endless or generated
    layers: int = 1  # number of leaf layers
    variable_size: bool = False  # whether samples differ in size; the largest are probed
    custom_optimizer: bool = False  # whether the workload supplies its own optimizer
    optimizer: str = ""  # setting `optimizer`
    versions: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    """Version by package."""
    notes: tuple[str, ...] = ()  # remarks about the workload

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"
