"""How much memory there is to fit into, and who else is there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepscope.advice.answer import Room
from stepscope.errors import CannotTry
from stepscope.sensors.gpus import visible_gpus
from stepscope.sensors.nvml import Nvml, NvmlGpu, NvmlUnavailable, Unreadable, open_nvml
from stepscope.trials.limits import size_text


@dataclass(frozen=True)
class GpuHere:
    """The GPU that is fitted into, as its driver shows it now."""

    uuid: str
    name: str
    total: int
    free: int
    tenants: tuple[str, ...]
    driver: str | None = None


def gpu_here(
    names: tuple[str, ...] | None, environment: Mapping[str, str], ranks: int = 1
) -> GpuHere | None:
    """The GPU that PyTorch would take, or the first of those named; None where there is none.

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
    try:
        there = visible_gpus(nvml.gpus, environment)
        if names is None:
            _refuse_doubts(there, environment)
        chosen = there if names is None else [_named(name, there) for name in names]
        _refuse_slices(chosen[:ranks], nvml.gpus)
        if chosen and len(chosen) < ranks:
            raise CannotTry(
                f"{ranks} ranks need as many GPUs, and there {_is_are(len(chosen))} here",
                f"Give --ranks {len(chosen)}, or --device cpu",
            )
        described = [_described(nvml, gpu) for gpu in chosen[:ranks]]
        return min(described, key=lambda gpu: gpu.free, default=None)
    finally:
        nvml.close()


def _refuse_doubts(there: list[NvmlGpu], environment: Mapping[str, str]) -> None:
    """Of unlike GPUs, CUDA's numbers are not the driver's: nobody shall get another than meant."""
    told = environment.get("CUDA_VISIBLE_DEVICES", "")
    by_place = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    unlike = len({gpu.facts.name for gpu in there}) > 1
    if unlike and not by_place and any(part.strip().isdigit() for part in told.split(",")):
        raise CannotTry(
            f"Which GPU CUDA_VISIBLE_DEVICES={told} means is not certain: these are not alike",
            "Give --gpus, or CUDA_DEVICE_ORDER=PCI_BUS_ID",
        )


def _refuse_slices(chosen: list[NvmlGpu], gpus: Sequence[NvmlGpu]) -> None:
    """A slice has memory of its own, and PyTorch must start CUDA to see it."""
    divided = {gpu.facts.mig_of for gpu in gpus if gpu.facts.mig_of}
    for gpu in chosen:
        if gpu.facts.mig_of or gpu.facts.uuid in divided:
            raise CannotTry(
                f"{gpu.facts.label} is divided into slices (MIG), which cannot be probed yet",
                "Name a whole GPU with --gpus, or see: stepscope trial",
            )


def _is_are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


def _named(name: str, there: list[NvmlGpu]) -> NvmlGpu:
    for gpu in there:
        by_number = name.isdigit() and gpu.facts.index == int(name)
        if by_number or gpu.facts.uuid.startswith(name):
            return gpu
    listed = ", ".join(gpu.facts.label for gpu in there) or "none"
    raise CannotTry(f"There is no GPU {name} for this process", f"There is: {listed}")


def _described(nvml: Nvml, gpu: NvmlGpu) -> GpuHere:
    total = int(gpu.facts.memory_bytes or 0)
    try:
        used = int(gpu.memory_used())
    except Unreadable:
        used = 0
    try:
        tenants = tuple(_tenant(pid, held) for pid, held in gpu.processes())
    except Unreadable:
        tenants = ()
    return GpuHere(gpu.facts.uuid, gpu.facts.name, total, total - used, tenants, nvml.driver)


def _tenant(pid: int, held: float | None) -> str:
    """Somebody on the GPU, by name where this process can see it."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        name = "a process"
    size = f" holds {size_text(int(held))}" if held is not None else ""
    return f"{name} (pid {pid}){size}"


def gpu_room(gpu: GpuHere, asked: int | None, headroom: int) -> Room:
    """What batches may take; until a probe has told the size of a context, without knowing it."""
    if asked is not None and asked > gpu.total:
        raise CannotTry(
            f"--gpu-memory asks for {size_text(asked)} of a GPU that has {size_text(gpu.total)}",
            "A larger GPU cannot be emulated: --cards predicts what it would take",
        )
    limit = min(asked if asked is not None else gpu.free, gpu.free) - headroom
    if limit <= 0:
        raise CannotTry(
            f"--headroom {size_text(headroom)} leaves nothing of "
            f"{size_text(min(asked or gpu.free, gpu.free))}",
            "Give less",
        )
    return Room("gpu", limit, gpu.total, gpu.free, asked, headroom, gpu.tenants)


def probe_environment(gpu: GpuHere | None) -> dict[str, str]:
    """That of the probes: they see this one GPU, and nothing else."""
    environment = dict(os.environ)
    if gpu is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpu.uuid
    return environment
