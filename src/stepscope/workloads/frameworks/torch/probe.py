"""Probes with PyTorch: one process builds the model and the samples, its forks train them briefly.

The parent imports PyTorch and builds everything on the CPU with a single thread, because neither
CUDA nor a thread pool survives a fork. Its forks inherit everything copy-on-write, so no probe
affects another one.
"""

from __future__ import annotations

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
from stepscope.errors import WorkloadError
from stepscope.runs.files import replace_atomically
from stepscope.workloads import probing
from stepscope.workloads.custom import describe_error
from stepscope.workloads.frameworks.contract import failure_kind
from stepscope.workloads.frameworks.torch.adapter import TorchFramework
from stepscope.workloads.frameworks.torch.batches import Samples, bytes_in, mover, samples_for
from stepscope.workloads.frameworks.torch.custom import load_custom
from stepscope.workloads.frameworks.torch.device import gpu_count, set_precision, versions
from stepscope.workloads.frameworks.torch.meters import GpuMeter, HostMeter
from stepscope.workloads.frameworks.torch.models import Built, build_model, parameters_of, shape_of
from stepscope.workloads.frameworks.torch.stepper import Phase, Stepper, rest_of_cycle
from stepscope.workloads.probing import Layer, ProbeRequest, ProbeResult
from stepscope.workloads.spec import Workload

_MAX_MESSAGE = 500
_READY_TIMEOUT_S = 30.0
_BUSY = "busy or unavailable"
"""CUDA's error if the GPU is in exclusive-process mode and in use."""
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_SIZE = rf"([\d.]+) ({'|'.join(_UNITS)})"
_REQUESTED = re.compile(f"Tried to allocate {_SIZE}")
_IN_USE = re.compile(f"allocated memory {_SIZE} is allocated by PyTorch")
_UNUSED = re.compile(f"{_SIZE} is reserved by PyTorch but unallocated")
_FREE = re.compile(f"of which {_SIZE} is free")


@dataclass(frozen=True)
class LoadedWorkload:
    """A built workload in the process that probes are forked from."""

    workload: Workload
    built: Built
    samples: Samples
    device: torch.device

    @property
    def subject(self) -> probing.Subject:
        custom = self.built.custom
        return probing.Subject(
            device=self.device.type,
            device_name=self.device.type,
            parameters=parameters_of(self.built.model),
            sample_bytes=self.samples.sample_bytes,
            samples=self.samples.of,
            layers=len(_leaves(self.built.model)),
            variable_size=self.samples.varies,
            custom_optimizer=custom is not None and custom.optimizer is not None,
            optimizer=self.workload.optimizer,
            versions=versions(starts_cuda=False),
            notes=custom.notes if custom else (),
        )

    def probe(
        self,
        request: ProbeRequest,
        notify: Callable[[ProbeResult], None],
        trace: Path,
        beside: Sequence[int] = (),
    ) -> None:
        _Probe(self, request, notify, trace, beside).run()


def warm_up() -> bool:
    """Import what every probe needs, and return whether forks can still initialize CUDA.

    Optimizers import all of torch.compile, which takes seconds.
    """
    importlib.import_module("torch._dynamo")
    return _forks_can_use_cuda()


def load_workload(workload: Workload) -> LoadedWorkload:
    """Build the model and load some samples. Raise WorkloadError if that is not possible."""
    torch.set_num_threads(1)
    torch.manual_seed(workload.seed)
    device = torch.device("cuda", 0) if gpu_count(workload) else torch.device("cpu")
    if workload.is_custom:
        built, shape = load_custom(workload), None
    else:
        shape = shape_of(workload)
        built = build_model(replace(workload, batch_size=max(2, workload.batch_size)), shape)
    samples = samples_for(workload, built, shape)
    if device.type == "cuda" and not _forks_can_use_cuda():
        raise WorkloadError(
            f"{workload.model} initializes CUDA while it is built, so no probe can use the GPU",
            "Keep model and data on the CPU and do not query the GPU: stepscope moves them to the "
            "device for training",
        )
    return LoadedWorkload(workload, built, samples, device)


def _forks_can_use_cuda() -> bool:
    """Fork once: the child knows whether CUDA was initialized before the fork."""
    is_bad_fork = getattr(torch._C, "_cuda_isInBadFork", None)
    if is_bad_fork is None:
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's threads are idle
        pid = os.fork()
    if pid == 0:
        os._exit(int(is_bad_fork()))
    return os.waitpid(pid, 0)[1] == 0


@dataclass
class _Probe:
    loaded: LoadedWorkload
    request: ProbeRequest
    notify: Callable[[ProbeResult], None]
    trace: Path
    group: Sequence[int] = ()
    """Numbers of the probes that were started together."""
    notes: list[str] = field(default_factory=list)
    layers: tuple[Layer, ...] = ()

    def run(self) -> None:
        request, device = self.request, self.loaded.device
        if request.layers:
            with suppress(Exception):  # not every model runs on the CPU
                self.layers = layers_of(self.loaded.built, self.loaded.samples.on_host(2), 2)
        self.meter = GpuMeter(device) if device.type == "cuda" else HostMeter()
        try:
            self.meter.begin(request)
            self.stepper = self._make_stepper()
        except Exception as error:
            result = ProbeResult(request.batches[0], "ok", "move to device")
            self._report_failure(result, error)
            return
        finally:
            self._file(probing.READY).touch()
        # Initializing CUDA would slow down a timed probe, so the whole group gets ready first.
        until = time.monotonic() + _READY_TIMEOUT_S
        others = [self.trace.with_name(f"{number}.{probing.READY}") for number in self.group]
        while request.exclusive and time.monotonic() < until:
            if all(file.exists() for file in others):
                break
            time.sleep(0.01)
        with probing.training_lock(request.exclusive, self._file(probing.WAITING)):
            for batch in request.batches:
                self.meter.reset_peaks()
                if not self._train(batch):
                    return
        if request.trace and (events := self.meter.events()):
            replace_atomically(self.trace, json.dumps(events))

    def _file(self, suffix: str) -> Path:
        return self.trace.with_suffix(f".{suffix}")

    def _make_stepper(self) -> Stepper:
        workload, device = self.loaded.workload, self.loaded.device
        if workload.ranks > 1:
            # A process group of one, so that the gradient buckets of DDP are allocated too.
            backend = "nccl" if device.type == "cuda" else "gloo"
            store = f"file://{self.trace.with_suffix('.group').resolve()}"
            dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        precision = set_precision(workload.precision, device)
        if workload.precision == "fp16":  # a large scale would skip the first steps
            scaler = torch.amp.GradScaler(device.type, init_scale=1.0)
            precision = replace(precision, scaler=scaler)
        return Stepper(workload, self.loaded.built, device, precision)

    def _train(self, batch: int) -> bool:
        request, result = self.request, ProbeResult(batch, "ok")
        cycle: list[tuple[Phase, int]] = [(Phase.STEP, batch)] * request.steps
        if request.cycle:
            cycle += rest_of_cycle(batch, request.steps_after)
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
                        allocated_bytes=(*result.allocated_bytes, self.meter.allocated()),
                        reserved_bytes=(*result.reserved_bytes, self.meter.reserved()),
                    )
                self._file(probing.HEARTBEAT).touch()
        except Exception as error:
            self._report_failure(result, error)
            return False
        parts = replace(result.parts, context_bytes=self.meter.context_bytes())
        self._notify(replace(result, phase="", parts=parts, layers=self.layers))
        return True

    def _step(self, size: int) -> tuple[float, Parts]:
        """Train one step as a trial does, and free its batches."""
        stepper, meter = self.stepper, self.meter
        seconds, activations, inputs, gradients = 0.0, 0, 0, 0
        for part in range(self.loaded.workload.accumulate, 0, -1):
            batch = self._make_batch(size)
            inputs = bytes_in(batch)
            with meter.after_forward(stepper) as kept_bytes, meter.timed() as elapsed:
                stepper.batch(batch, last=part == 1)
                if part == 1:  # parameters may have no gradient in some steps
                    grads = [parameter.grad for parameter in stepper.forward.parameters()]
                    gradients = sum(grad.nbytes for grad in grads if grad is not None)
                    del grads
                    stepper.step()
            seconds += elapsed()
            activations = kept_bytes()
            del batch
        state = {**stepper.state_bytes(), "gradients_bytes": gradients}
        return seconds, Parts(**state, inputs_bytes=inputs, activations_bytes=activations)

    def _make_batch(self, size: int) -> Any:
        workload, device = self.loaded.workload, self.loaded.device
        move = mover(device, workload.channels_last)
        return self.loaded.samples.on_device(size, device, workload.channels_last, move)

    def _report_failure(self, result: ProbeResult, error: Exception) -> None:
        text = str(error)
        kind: probing.Kind = failure_kind(TorchFramework(), error)
        if kind == "error" and _BUSY in text:
            kind = "gpu_busy"
        # PyTorch's message contains the sizes that give the shortfall.
        requested, in_use, unused = (_size(each, text) for each in (_REQUESTED, _IN_USE, _UNUSED))
        shortfall = None
        if requested is not None and in_use is not None and unused is not None:
            cap, free = self.request.cap, _size(_FREE, text) or 0
            shortfall = max(0, requested - max(0, free if cap is None else cap - in_use - unused))
        message, hint = describe_error(error, self.loaded.workload)
        message = message.strip().partition("\n")[0][:_MAX_MESSAGE]
        failed = replace(result, kind=kind, message=message, hint=hint)
        self._notify(replace(failed, requested_bytes=requested, shortfall_bytes=shortfall))

    def _notify(self, result: ProbeResult) -> None:
        stats = self.meter.stats()
        self.notify(
            replace(
                result,
                allocated_peak_bytes=stats.allocated_peak,
                reserved_peak_bytes=stats.reserved_peak,
                retries=stats.retries,
                ooms=stats.ooms,
                notes=tuple(dict.fromkeys(self.notes)),
            )
        )


def _size(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


def _leaves(model: nn.Module) -> dict[nn.Module, str]:
    return {module: name for name, module in model.named_modules() if not [*module.children()]}


def layers_of(built: Built, batch: Any, samples: int) -> tuple[Layer, ...]:
    """Return the layers without sublayers, in execution order.

    A layer that is used several times appears each time, its parameters only once.
    """
    layers: list[Layer] = []
    seen: set[nn.Module] = set()
    leaves = _leaves(built.model)

    def record(module: nn.Module, _: Any, output: Any) -> None:
        parameters = 0 if module in seen else sum(p.nbytes for p in module.parameters())
        seen.add(module)
        layers.append(
            Layer(leaves[module], type(module).__name__, parameters, bytes_in(output) // samples)
        )

    hooks = [module.register_forward_hook(record) for module in leaves]
    try:
        built.model.eval()
        with torch.no_grad():
            built.loss(built.model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(layers)
