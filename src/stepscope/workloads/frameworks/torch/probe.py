"""Probes with PyTorch: one process holds model and samples, forked ones train a batch for a moment.

The holder imports PyTorch and builds everything on the CPU, with a single thread: neither CUDA nor
a pool of threads survives a fork. Its children inherit all of it and change only copies, so that no
probe sees what another has done.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from stepscope.errors import BadWorkload
from stepscope.runs.paths import replace_atomically
from stepscope.workloads.frameworks.torch.cycle import parts_of
from stepscope.workloads.frameworks.torch.device import set_numbers, versions
from stepscope.workloads.frameworks.torch.feed import mover
from stepscope.workloads.frameworks.torch.layers import layers_of
from stepscope.workloads.frameworks.torch.loop import Stepper
from stepscope.workloads.frameworks.torch.meters import GpuMeter, HostMeter
from stepscope.workloads.frameworks.torch.models import build_model, parameters_of, shape_of
from stepscope.workloads.frameworks.torch.parts import Built
from stepscope.workloads.frameworks.torch.samples import Samples, bytes_in, samples_for
from stepscope.workloads.frameworks.torch.user import load_own
from stepscope.workloads.own import find_own, hint_for, where_in
from stepscope.workloads.probing import (
    BEAT,
    READY,
    WAITS,
    Ask,
    Layer,
    Parts,
    Subject,
    Told,
    taking_turns,
)
from stepscope.workloads.reporting import Place, failure_kind
from stepscope.workloads.spec import Workload

_PART = 2, 5
"""The last batch of an epoch, as a part of the others: any will do."""
_LEAST_PART = 2
"""One sample alone is refused by batch normalisation, which is no matter of memory."""
_LONGEST = 500
_PATIENCE_S = 30.0
_WANTED = re.compile(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB|TiB)")
_IN_USE = re.compile(r"allocated memory ([\d.]+) (bytes|KiB|MiB|GiB|TiB) is allocated by PyTorch")
_UNUSED = re.compile(r"([\d.]+) (bytes|KiB|MiB|GiB|TiB) is reserved by PyTorch but unallocated")
_FREE = re.compile(r"of which ([\d.]+) (bytes|KiB|MiB|GiB|TiB) is free")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True)
class Held:
    """What is probed, in the process that children are forked from."""

    workload: Workload
    built: Built
    samples: Samples
    device: torch.device

    @property
    def subject(self) -> Subject:
        own = self.built.own
        return Subject(
            device="cuda" if self.device.type == "cuda" else "cpu",
            device_name=self.device.type,
            parameters=parameters_of(self.built.model),
            sample_bytes=self.samples.sample_bytes,
            samples=self.samples.of,
            layers=sum(not any(True for _ in m.children()) for m in self.built.model.modules()),
            varies=self.samples.varies,
            own_optimizer=own is not None and own.optimizer is not None,
            optimizer=self.workload.optimizer,
            versions=versions(starts_cuda=False),
            notes=own.notes if own else (),
        )

    def probe(
        self, ask: Ask, tell: Callable[[Told], None], trace: Path, beside: Sequence[int] = ()
    ) -> None:
        """In a child: train each batch, and tell how it went. A batch that fails is the last.
        `beside` are the numbers of those that were asked at the same time."""
        _Probe(self, ask, tell, trace, beside).run()

    def layers(self) -> list[Layer]:
        """In a child too: one sample goes through the model."""
        return layers_of(self.built, self.samples.on_host(2), 2)


def warm_up() -> bool:
    """Import what every probe would: optimizers take all of the compiler with them. Whether forks
    of this process can still start CUDA."""
    importlib.import_module("torch._dynamo")
    return _forks_can_start_cuda()


def hold(workload: Workload) -> Held:
    """Build the model and take some samples; BadWorkload where that is not possible."""
    torch.set_num_threads(1)
    torch.manual_seed(workload.seed)
    device = _device(workload)
    if workload.is_own:
        built, shape = load_own(workload), None
    else:
        shape = shape_of(workload)
        built = build_model(replace(workload, batch_size=max(2, workload.batch_size)), shape)
    samples = samples_for(workload, built, shape)
    if device.type == "cuda" and not _forks_can_start_cuda():
        raise BadWorkload(
            f"{workload.model} starts CUDA while it is built, and then no probe can use it",
            "Leave model and data on the CPU, and ask no GPU for its name or memory: they are "
            "moved to the device when they are trained",
        )
    return Held(workload, built, samples, device)


def _forks_can_start_cuda() -> bool:
    """PyTorch knows, in a fork, whether CUDA was started before it."""
    is_bad = getattr(torch._C, "_cuda_isInBadFork", None)
    if is_bad is None:
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of NumPy's, which sleep
        pid = os.fork()
    if pid == 0:
        os._exit(int(is_bad()))
    return os.waitpid(pid, 0)[1] == 0


def _device(workload: Workload) -> torch.device:
    """Which kind, without starting CUDA: PyTorch asks NVML for the number of GPUs."""
    count = torch.cuda.device_count() if workload.device != "cpu" else 0
    if workload.device == "cuda" and count == 0:
        raise BadWorkload(
            "There is no GPU that PyTorch can use here",
            "Leave --device out, or see: stepscope doctor",
        )
    return torch.device("cuda", 0) if count else torch.device("cpu")


@dataclass
class _Probe:
    """The life of a child."""

    held: Held
    ask: Ask
    tell: Callable[[Told], None]
    trace: Path
    beside: Sequence[int] = ()
    notes: list[str] = field(default_factory=list)

    def run(self) -> None:
        ask, device = self.ask, self.held.device
        meter = GpuMeter(device) if device.type == "cuda" else HostMeter()
        try:
            meter.begin(ask)
            stepper = self._stepper(meter)
        except Exception as error:
            where = "the move to the device"
            self._failed(ask.batches[0], where, error, meter, Parts(), _Course())
            return
        finally:
            self._file(READY).touch()
        self._wait_for_others()
        with taking_turns(ask.turn, self._file(WAITS)):
            for batch in ask.batches:
                meter.forget_peaks()
                if not self._one(batch, stepper, meter):
                    return
        if ask.trace and (events := meter.events()):
            replace_atomically(self.trace, json.dumps(events))

    def _file(self, ending: str) -> Path:
        return self.trace.with_suffix(f".{ending}")

    def _wait_for_others(self) -> None:
        """Those that are asked at once get ready together: to start CUDA disturbs who is timed."""
        until = time.monotonic() + _PATIENCE_S
        others = [self.trace.with_name(f"{number}.{READY}") for number in self.beside]
        while self.ask.turn and time.monotonic() < until:
            if all(file.exists() for file in others):
                break
            time.sleep(0.01)

    def _stepper(self, meter: HostMeter) -> Stepper:
        workload = self.held.workload
        place = Place(Path(), Path(), Path(), Path(), ranks=workload.ranks)
        if workload.ranks > 1:
            self._join_alone()
        numbers = set_numbers(workload.precision, self.held.device)
        if workload.precision == "fp16":  # a large scale skips the first steps, and their memory
            scaler = torch.amp.GradScaler(self.held.device.type, init_scale=1.0)
            numbers = replace(numbers, scaler=scaler)
        return Stepper(workload, place, self.held.built, self.held.device, numbers)

    def _join_alone(self) -> None:
        """A group of one: what a rank of many holds beside its model, the buckets of gradients,
        it holds here too."""
        backend = "nccl" if self.held.device.type == "cuda" else "gloo"
        store = f"file://{self.trace.with_suffix('.group').resolve()}"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)

    def _one(self, batch: int, stepper: Stepper, meter: HostMeter) -> bool:
        course = _Course()
        parts = Parts()
        try:
            for phase, size in self._phases(batch):
                course.phase = phase
                parts = self._do(phase, size, batch, stepper, meter, course) or parts
                self._file(BEAT).touch()
        except Exception as error:
            self._failed(batch, course.phase, error, meter, parts, course)
            return False
        parts = replace(parts, outside=meter.outside())
        self.tell(self._told(batch, "ok", "", meter, parts, course))
        return True

    def _phases(self, batch: int) -> Iterator[tuple[str, int]]:
        ask = self.ask
        for number in range(ask.steps):
            yield f"step {number + 1}", batch
        if not ask.cycle:
            return
        part = max(_LEAST_PART, round(batch * _PART[0] / _PART[1]))
        if part < batch:
            yield "a smaller batch", part
        yield "evaluation", batch
        for number in range(ask.again):
            yield f"step {ask.steps + number + 1}", batch

    def _do(
        self, phase: str, size: int, batch: int, stepper: Stepper, meter: HostMeter, course: _Course
    ) -> Parts | None:
        if phase == "evaluation":
            self._evaluate(self._batch(size), stepper, meter)
            return None
        parts = self._step(size, stepper, meter, course, counts=size == batch)
        return parts if size == batch else None

    def _step(
        self, size: int, stepper: Stepper, meter: HostMeter, course: _Course, counts: bool
    ) -> Parts:
        """One whole step, as the loop of a trial takes it: what a batch was is gone after it."""
        seconds, kept, inputs = 0.0, 0, 0
        for part in range(self.held.workload.accumulate, 0, -1):
            batch = self._batch(size)
            inputs = bytes_in(batch)
            with meter.after_forward(stepper) as forward, meter.timed() as took:
                stepper.batch(batch, last=part == 1)
                if part == 1:
                    gradients = _gradients(stepper)
                    stepper.step()
            seconds += took()
            kept = forward()
            del batch
        if counts:
            course.step_s.append(seconds)
            course.kept.append(meter.allocated())
            course.reserved.append(meter.reserved())
        parts = {**parts_of(stepper.forward, stepper.optimizer), "gradients": gradients}
        return Parts(**parts, inputs=inputs, activations=kept)

    def _evaluate(self, batch: Any, stepper: Stepper, meter: HostMeter) -> None:
        """A step of a user's may not be made for evaluation: that is no matter of memory."""
        try:
            stepper.evaluate(batch)
        except Exception as error:
            if failure_kind(error, meter.counts()[1]) != "error":
                raise
            said = str(error).strip().splitlines() or [type(error).__name__]
            self.notes.append(f"evaluation was not probed: {said[0]}")

    def _batch(self, size: int) -> Any:
        workload, device = self.held.workload, self.held.device
        move = mover(device, workload.channels_last)
        return self.held.samples.on_device(size, device, workload.channels_last, move)

    def _failed(
        self,
        batch: int,
        phase: str,
        error: Exception,
        meter: HostMeter,
        parts: Parts,
        course: _Course,
    ) -> None:
        text = str(error)
        kind = failure_kind(error, meter.counts()[1])
        if isinstance(error, BadWorkload):
            kind, text = "workload", error.message
        told = self._told(batch, kind, phase, meter, parts, course)
        wanted = _size(_WANTED, text)
        self.tell(
            replace(
                told,
                wanted=wanted,
                missing=_missing(text, wanted, self.ask.cap),
                message=self._message(error, text),
                hint=getattr(error, "hint", "") or hint_for(error),
            )
        )

    def _message(self, error: Exception, text: str) -> str:
        """In one line, with that of the user's file where it happened."""
        first = text.strip().splitlines()[0][:_LONGEST] if text.strip() else ""
        if isinstance(error, BadWorkload):
            return first
        said = f"{type(error).__name__}: {first}" if first else type(error).__name__
        workload = self.held.workload
        where = where_in(error, find_own(workload.model).file) if workload.is_own else None
        return f"{where}: {said}" if where else said

    def _told(
        self, batch: int, kind: Any, phase: str, meter: HostMeter, parts: Parts, course: _Course
    ) -> Told:
        retries, ooms = meter.counts()
        allocated, reserved = meter.peaks()
        return Told(
            batch,
            kind,
            phase,
            allocated,
            reserved,
            retries,
            ooms,
            tuple(course.step_s),
            tuple(course.kept),
            tuple(course.reserved),
            parts=parts,
            notes=tuple(dict.fromkeys(self.notes)),
        )


@dataclass
class _Course:
    """What was read on the way through one batch."""

    phase: str = ""
    step_s: list[float] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)


def _gradients(stepper: Stepper) -> int:
    """Those that there are: not all that is trained has one in every step."""
    grads = (parameter.grad for parameter in stepper.forward.parameters())
    return sum(grad.nbytes for grad in grads if grad is not None)


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def _missing(text: str, wanted: int | None, cap: int | None) -> int | None:
    """What of a failed allocation there was not, by what PyTorch says about its memory."""
    in_use, unused = _size(_IN_USE, text), _size(_UNUSED, text)
    if wanted is None or in_use is None or unused is None:
        return None
    free = cap - in_use - unused if cap is not None else _size(_FREE, text) or 0
    return max(0, wanted - max(0, free))
