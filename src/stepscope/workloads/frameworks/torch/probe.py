"""Probes with PyTorch: one process holds model and samples, forked ones train a batch for a moment.

The holder imports PyTorch and builds everything on the CPU, with a single thread: neither CUDA nor
a pool of threads survives a fork. Its children inherit all of it and change only copies, so that no
probe sees what another has done.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stepscope.analysis.memory.model import Parts
from stepscope.errors import BadWorkload
from stepscope.runs.paths import replace_atomically
from stepscope.workloads import probing
from stepscope.workloads.frameworks.contract import failure_kind
from stepscope.workloads.frameworks.torch.adapter import TorchFramework
from stepscope.workloads.frameworks.torch.batches import Samples, bytes_in, mover, samples_for
from stepscope.workloads.frameworks.torch.device import gpu_count, set_precision, versions
from stepscope.workloads.frameworks.torch.meters import GpuMeter, HostMeter
from stepscope.workloads.frameworks.torch.models import Built, build_model, parameters_of, shape_of
from stepscope.workloads.frameworks.torch.stepper import Phase, Stepper, rest_of_cycle
from stepscope.workloads.frameworks.torch.user import load_own
from stepscope.workloads.own import explain
from stepscope.workloads.probing import Layer, ProbeRequest, ProbeResult
from stepscope.workloads.spec import Workload

_LONGEST = 500
_PATIENCE_S = 30.0
_BUSY = "busy or unavailable"
"""What CUDA says where one process at a time may use a GPU."""
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = rf"([\d.]+) ({'|'.join(_UNITS)})"
_WANTED = re.compile(f"Tried to allocate {_SIZE}")
_IN_USE = re.compile(f"allocated memory {_SIZE} is allocated by PyTorch")
_UNUSED = re.compile(f"{_SIZE} is reserved by PyTorch but unallocated")
_FREE = re.compile(f"of which {_SIZE} is free")


@dataclass(frozen=True)
class HeldWorkload:
    """What is probed, in the process that children are forked from."""

    workload: Workload
    built: Built
    samples: Samples
    device: torch.device

    @property
    def subject(self) -> probing.Subject:
        own = self.built.own
        return probing.Subject(
            device=self.device.type,
            device_name=self.device.type,
            parameters=parameters_of(self.built.model),
            sample_bytes=self.samples.sample_bytes,
            samples=self.samples.of,
            layers=len(_leaves(self.built.model)),
            varies=self.samples.varies,
            own_optimizer=own is not None and own.optimizer is not None,
            optimizer=self.workload.optimizer,
            versions=versions(starts_cuda=False),
            notes=own.notes if own else (),
        )

    def probe(
        self,
        request: ProbeRequest,
        tell: Callable[[ProbeResult], None],
        trace: Path,
        beside: Sequence[int] = (),
    ) -> None:
        _Probe(self, request, tell, trace, beside).run()


def warm_up() -> bool:
    """Import what every probe would: optimizers take all of the compiler with them. Whether forks
    of this process can still start CUDA."""
    importlib.import_module("torch._dynamo")
    return _forks_can_start_cuda()


def hold(workload: Workload) -> HeldWorkload:
    """Build the model and take some samples; BadWorkload where that is not possible."""
    torch.set_num_threads(1)
    torch.manual_seed(workload.seed)
    device = torch.device("cuda", 0) if gpu_count(workload) else torch.device("cpu")
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
    return HeldWorkload(workload, built, samples, device)


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


@dataclass
class _Probe:
    held: HeldWorkload
    request: ProbeRequest
    tell: Callable[[ProbeResult], None]
    trace: Path
    beside: Sequence[int] = ()
    notes: list[str] = field(default_factory=list)
    layers: tuple[Layer, ...] = ()

    def run(self) -> None:
        request, device = self.request, self.held.device
        if request.layers:
            with suppress(Exception):  # not every model can do without its device
                self.layers = layers_of(self.held.built, self.held.samples.on_host(2), 2)
        self.meter = GpuMeter(device) if device.type == "cuda" else HostMeter()
        try:
            self.meter.begin(request)
            self.stepper = self._make_stepper()
        except Exception as error:
            moved = ProbeResult(request.batches[0], "ok", "the move to the device")
            self._tell_failure(moved, error)
            return
        finally:
            self._file(probing.READY).touch()
        # Those that are asked at once get ready together: to start CUDA disturbs who is timed.
        until = time.monotonic() + _PATIENCE_S
        others = [self.trace.with_name(f"{number}.{probing.READY}") for number in self.beside]
        while request.turn and time.monotonic() < until:
            if all(file.exists() for file in others):
                break
            time.sleep(0.01)
        with probing.taking_turns(request.turn, self._file(probing.WAITS)):
            for batch in request.batches:
                self.meter.forget_peaks()
                if not self._train(batch):
                    return
        if request.trace and (events := self.meter.events()):
            replace_atomically(self.trace, json.dumps(events))

    def _file(self, ending: str) -> Path:
        return self.trace.with_suffix(f".{ending}")

    def _make_stepper(self) -> Stepper:
        workload, device = self.held.workload, self.held.device
        if workload.ranks > 1:
            # A group of one: what a rank of many holds beside its model, the buckets of gradients,
            # it holds here too.
            backend = "nccl" if device.type == "cuda" else "gloo"
            store = f"file://{self.trace.with_suffix('.group').resolve()}"
            dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        precision = set_precision(workload.precision, device)
        if workload.precision == "fp16":  # a large scale skips the first steps, and their memory
            scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
            precision = replace(precision, scaler=scaler)
        return Stepper(workload, self.held.built, device, precision)

    def _train(self, batch: int) -> bool:
        request, result = self.request, ProbeResult(batch, "ok")
        cycle: list[tuple[Phase, int]] = [(Phase.AGAIN, batch)] * request.steps
        if request.cycle:
            cycle += rest_of_cycle(batch, request.again)
        try:
            for phase, size in cycle:
                result = replace(result, phase=phase.value)
                if phase is Phase.EVALUATION:
                    if note := self.stepper.evaluate(self._make_batch(size)):
                        self.notes.append(note)
                elif phase is Phase.SMALLER_BATCH:
                    self._step(size)
                else:
                    result = replace(result, phase=f"step {len(result.step_s) + 1}")
                    seconds, parts = self._step(size)
                    result = replace(
                        result,
                        parts=parts,
                        step_s=(*result.step_s, seconds),
                        kept=(*result.kept, self.meter.allocated()),
                        reserved=(*result.reserved, self.meter.reserved()),
                    )
                self._file(probing.BEAT).touch()
        except Exception as error:
            self._tell_failure(result, error)
            return False
        parts = replace(result.parts, outside=self.meter.outside())
        self._tell(replace(result, phase="", parts=parts, layers=self.layers))
        return True

    def _step(self, size: int) -> tuple[float, Parts]:
        """One whole step, as the loop of a trial takes it: what a batch was is gone after it."""
        stepper, meter = self.stepper, self.meter
        seconds, activations, inputs, gradients = 0.0, 0, 0, 0
        for part in range(self.held.workload.accumulate, 0, -1):
            batch = self._make_batch(size)
            inputs = bytes_in(batch)
            with meter.after_forward(stepper) as forward, meter.timed() as took:
                stepper.batch(batch, last=part == 1)
                if part == 1:  # not all that is trained has a gradient in every step
                    grads = [parameter.grad for parameter in stepper.forward.parameters()]
                    gradients = sum(grad.nbytes for grad in grads if grad is not None)
                    del grads
                    stepper.step()
            seconds += took()
            activations = forward()
            del batch
        state = {**stepper.state_bytes(), "gradients": gradients}
        return seconds, Parts(**state, inputs=inputs, activations=activations)

    def _make_batch(self, size: int) -> Any:
        workload, device = self.held.workload, self.held.device
        move = mover(device, workload.channels_last)
        return self.held.samples.on_device(size, device, workload.channels_last, move)

    def _tell_failure(self, result: ProbeResult, error: Exception) -> None:
        text = str(error)
        kind: probing.Kind = failure_kind(TorchFramework(), error)
        if kind == "error" and _BUSY in text:
            kind = "gpu_busy"
        # What of the allocation there was not, by what PyTorch says about its memory.
        wanted, in_use, unused = (_size(each, text) for each in (_WANTED, _IN_USE, _UNUSED))
        missing = None
        if wanted is not None and in_use is not None and unused is not None:
            cap, free = self.request.cap, _size(_FREE, text) or 0
            missing = max(0, wanted - max(0, free if cap is None else cap - in_use - unused))
        message, hint = explain(error, self.held.workload)
        message = message.strip().partition("\n")[0][:_LONGEST]
        failed = replace(result, kind=kind, wanted=wanted, missing=missing)
        self._tell(replace(failed, message=message, hint=hint))

    def _tell(self, result: ProbeResult) -> None:
        stats = dataclasses.asdict(self.meter.stats())
        self.tell(replace(result, **stats, notes=tuple(dict.fromkeys(self.notes))))


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def _leaves(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules() if not [*module.children()]}


def layers_of(built: Built, batch: Any, samples: int) -> tuple[Layer, ...]:
    """The layers that hold no others, in the order in which a batch goes through them.

    One that is used several times is counted as often, with its parameters once.
    """
    found: list[Layer] = []
    seen: set[nn.Module] = set()
    leaves = _leaves(built.model)

    def note(module: nn.Module, _: Any, output: Any) -> None:
        own = 0 if module in seen else sum(p.nbytes for p in module.parameters())
        seen.add(module)
        found.append(Layer(leaves[module], type(module).__name__, own, bytes_in(output) // samples))

    hooks = [module.register_forward_hook(note) for module in leaves]
    try:
        built.model.eval()
        with torch.no_grad():
            built.loss(built.model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(found)
