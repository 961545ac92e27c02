"""The GPU and the memory that a fit may use."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stepscope.analysis.memory.model import (
    host_batches_in_flight,
    max_host_batch,
    max_host_batch_2019,
)
from stepscope.errors import TrialError
from stepscope.fit.request import FitRequest
from stepscope.fit.result import ChosenGpu, Device, LoaderMemory, MemoryBudget, OtherProcess
from stepscope.fit.thresholds import HOST_FREE_SHARE
from stepscope.sensors import procfs
from stepscope.sensors.gpu.nvml import Nvml, NvmlGpu, NvmlUnavailable, Unreadable, open_nvml
from stepscope.sensors.gpu.selection import select_gpus
from stepscope.trials.limits.spec import MachineResources, size_text
from stepscope.workloads.spec import Workload


def choose_gpu(
    names: tuple[str, ...] | None, environment: Mapping[str, str], ranks: int = 1
) -> ChosenGpu | None:
    """Return the GPU that the framework would use, or the first one of `names`; None without a GPU.

    With several ranks, return the GPU with the least free memory: its answer holds for all.
    """
    try:
        nvml = open_nvml()
    except NvmlUnavailable:
        if names:
            raise TrialError(
                f"`--gpus {','.join(names)}` is not available: no NVIDIA driver", "Remove --gpus"
            ) from None
        return None
    with nvml:
        selection = select_gpus(nvml.gpus, environment, names)
        if not selection.is_certain:
            value = environment.get("CUDA_VISIBLE_DEVICES")
            raise TrialError(
                f"CUDA_VISIBLE_DEVICES={value} is ambiguous, because the GPUs are different models",
                "Pass --gpus, or set CUDA_DEVICE_ORDER=PCI_BUS_ID",
            )
        gpus = selection.gpus
        partitioned = {gpu.facts.mig_of for gpu in nvml.gpus if gpu.facts.mig_of}
        for gpu in gpus[:ranks]:
            if gpu.facts.mig_of or gpu.facts.uuid in partitioned:
                raise TrialError(
                    f"{gpu.facts.label} is partitioned (MIG), which `fit` does not support",
                    "Select another GPU with --gpus, or use `stepscope trial`",
                )
        if gpus and len(gpus) < ranks:
            raise TrialError(
                f"{ranks} ranks need {ranks} GPUs, but only {len(gpus)} can be used",
                f"Pass --ranks {len(gpus)} or --device cpu",
            )
        chosen = [_describe(nvml, gpu) for gpu in gpus[:ranks]]
        return min(chosen, key=lambda gpu: gpu.free_bytes, default=None)


def _describe(nvml: Nvml, gpu: NvmlGpu) -> ChosenGpu:
    total = int(gpu.facts.memory_bytes or 0)
    try:
        total_used = int(gpu.memory_used())
    except Unreadable:
        total_used = 0
    try:
        others = tuple(
            OtherProcess(pid, procfs.name(pid), None if used is None else int(used))
            for pid, used in gpu.processes()
        )
    except Unreadable:
        others = ()
    facts = gpu.facts
    return ChosenGpu(
        uuid=facts.uuid,
        name=facts.model,
        total_bytes=total,
        free_bytes=total - total_used,
        other_processes=others,
        driver=nvml.driver,
    )


def budget_for(request: FitRequest, gpu: ChosenGpu | None) -> MemoryBudget:
    """Return the memory budget.

    On a GPU it is for batches; the CUDA context is subtracted once a probe has measured it. On the
    host it is for the whole training.
    """
    if gpu is None:
        total, free = MachineResources.here().memory, host_memory_free()
        requested = request.limits.memory
        available = requested if requested is not None else int(HOST_FREE_SHARE * free)
    else:
        total, free, requested = gpu.total_bytes, gpu.free_bytes, request.limits.gpu_memory
        if requested is not None and requested > total:
            raise TrialError(
                f"`--gpu-memory {size_text(requested)}` is more than the GPU has "
                f"({size_text(total)})",
                "Use --predict-for to predict the batch size on a larger GPU",
            )
        available = free if requested is None else min(requested, free)
    headroom = request.headroom or int(request.headroom_share * available)
    if headroom >= available:
        raise TrialError(
            f"`--headroom {size_text(headroom)}` leaves none of the {size_text(available)} of "
            "available memory",
            "Pass a smaller headroom",
        )
    others = gpu.other_processes if gpu else ()
    device: Device = "gpu" if gpu else "host"
    return MemoryBudget(
        device=device,
        limit_bytes=available - headroom,
        total_bytes=total,
        free_bytes=free,
        requested_bytes=requested,
        headroom_bytes=headroom,
        other_processes=others,
    )


def loader_memory(workload: Workload, sample_bytes: int, memory: int | None) -> LoaderMemory:
    """Return the host memory of the data loader for training on a GPU."""
    free = host_memory_free()
    free = min(free, memory) if memory is not None else free
    shm = _shm_free()
    pinned = workload.pin is not False
    max_batch, limited_by = max_host_batch(
        sample_bytes, workload.workers, workload.prefetch, pinned, free, shm
    )
    return LoaderMemory(
        workers=workload.workers,
        prefetch=workload.prefetch,
        pinned=pinned,
        sample_bytes=sample_bytes,
        batches_in_flight=host_batches_in_flight(workload.workers, workload.prefetch, pinned),
        memory_free_bytes=free,
        shm_free_bytes=shm,
        max_batch=max_batch,
        limited_by=limited_by,
        max_batch_2019=max_host_batch_2019(
            procfs.meminfo().total or 0, workload.workers, sample_bytes
        ),
    )


def host_memory_free() -> int:
    machine = MachineResources.here().memory
    return min(machine, procfs.meminfo().available or machine)


def _shm_free() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None
