"""How much memory there is for batches, on which GPU, and who else uses it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stepscope.analysis.memory.model import (
    host_batches_in_flight,
    largest_host_batch,
    largest_host_batch_2019,
)
from stepscope.errors import CannotTry
from stepscope.fit.answer import ChosenGpu, Device, LoaderMemory, MemoryBudget, OtherProcess
from stepscope.fit.request import FitRequest
from stepscope.fit.thresholds import FREE_PART
from stepscope.sensors import procfs
from stepscope.sensors.gpu.nvml import Nvml, NvmlGpu, NvmlUnavailable, Unreadable, open_nvml
from stepscope.sensors.gpu.selection import select_gpus
from stepscope.trials.limits.spec import MachineResources, size_text
from stepscope.workloads.spec import Workload


def choose_gpu(
    names: tuple[str, ...] | None, environment: Mapping[str, str], ranks: int = 1
) -> ChosenGpu | None:
    """The GPU that the framework would take, or the first of those named; None where there is none.

    Of several that train together, the one with the least memory free: its answer holds for all.
    """
    try:
        nvml = open_nvml()
    except NvmlUnavailable:
        if names:
            raise CannotTry(
                f"--gpus {','.join(names)} cannot be had: no driver", "Leave --gpus out"
            ) from None
        return None
    with nvml:
        selection = select_gpus(nvml.gpus, environment, names)
        if not selection.is_certain:
            value = environment.get("CUDA_VISIBLE_DEVICES")
            raise CannotTry(
                f"Which GPU CUDA_VISIBLE_DEVICES={value} means is not certain: these are not alike",
                "Give --gpus, or CUDA_DEVICE_ORDER=PCI_BUS_ID",
            )
        gpus = selection.gpus
        divided = {gpu.facts.mig_of for gpu in nvml.gpus if gpu.facts.mig_of}
        for gpu in gpus[:ranks]:
            if gpu.facts.mig_of or gpu.facts.uuid in divided:
                raise CannotTry(
                    f"{gpu.facts.label} is divided into slices (MIG), which cannot be probed yet",
                    "Name a whole GPU with --gpus, or see: stepscope trial",
                )
        if gpus and len(gpus) < ranks:
            there = "is 1" if len(gpus) == 1 else f"are {len(gpus)}"
            raise CannotTry(
                f"{ranks} ranks need as many GPUs, and there {there} here",
                f"Give --ranks {len(gpus)}, or --device cpu",
            )
        described = [_described(nvml, gpu) for gpu in gpus[:ranks]]
        return min(described, key=lambda gpu: gpu.free, default=None)


def _described(nvml: Nvml, gpu: NvmlGpu) -> ChosenGpu:
    total = int(gpu.facts.memory_bytes or 0)
    try:
        used = int(gpu.memory_used())
    except Unreadable:
        used = 0
    try:
        others = tuple(
            OtherProcess(pid, procfs.name(pid), None if held is None else int(held))
            for pid, held in gpu.processes()
        )
    except Unreadable:
        others = ()
    facts = gpu.facts
    return ChosenGpu(
        uuid=facts.uuid,
        name=facts.model,
        total=total,
        free=total - used,
        other_processes=others,
        driver=nvml.driver,
    )


def budget_for(request: FitRequest, gpu: ChosenGpu | None) -> MemoryBudget:
    """What batches may take of a GPU, from which the context is subtracted once a probe has told
    its size; or batches and all else of a training, of this machine."""
    if gpu is None:
        total, free = MachineResources.here().memory, host_memory_free()
        requested = request.limits.memory
        most = requested if requested is not None else int(FREE_PART * free)
    else:
        total, free, requested = gpu.total, gpu.free, request.limits.gpu_memory
        if requested is not None and requested > total:
            raise CannotTry(
                f"--gpu-memory asks for {size_text(requested)} of a GPU that has "
                f"{size_text(total)}",
                "A larger GPU cannot be emulated: --cards predicts what it would take",
            )
        most = free if requested is None else min(requested, free)
    headroom = request.headroom or int(request.headroom_share * most)
    if headroom >= most:
        raise CannotTry(
            f"--headroom {size_text(headroom)} leaves nothing of {size_text(most)}", "Give less"
        )
    others = gpu.other_processes if gpu else ()
    device: Device = "gpu" if gpu else "host"
    return MemoryBudget(
        device=device,
        limit=most - headroom,
        total=total,
        free=free,
        requested=requested,
        headroom=headroom,
        other_processes=others,
    )


def loader_memory(workload: Workload, sample_bytes: int, memory: int | None) -> LoaderMemory:
    """What the loader's batches may take on the host, beside a training on a GPU."""
    free = host_memory_free()
    free = min(free, memory) if memory is not None else free
    shm = _shm_free()
    pinned = workload.pin is not False
    largest, bound_by = largest_host_batch(
        sample_bytes, workload.workers, workload.prefetch, pinned, free, shm
    )
    return LoaderMemory(
        workers=workload.workers,
        prefetch=workload.prefetch,
        pinned=pinned,
        sample_bytes=sample_bytes,
        in_flight=host_batches_in_flight(workload.workers, workload.prefetch, pinned),
        memory_free=free,
        shm_free=shm,
        max_batch=largest,
        bound_by=bound_by,
        by_2019=largest_host_batch_2019(
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
