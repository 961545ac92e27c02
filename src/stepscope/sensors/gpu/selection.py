"""Which GPUs a command may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepscope.errors import CannotTry
from stepscope.sensors.gpu.nvml import NvmlGpu


@dataclass(frozen=True)
class GpuSelection:
    """The GPUs that a command may use, in the order in which CUDA counts them."""

    gpus: list[NvmlGpu]
    is_certain: bool = True
    """False where CUDA_VISIBLE_DEVICES may mean other GPUs than these: then these are all."""


def select_gpus(
    gpus: Sequence[NvmlGpu], environment: Mapping[str, str], names: Sequence[str] | None = None
) -> GpuSelection:
    """The GPUs that a user means: by `names` (numbers as nvidia-smi shows them, or UUIDs), else by
    CUDA_VISIBLE_DEVICES, which hides all others from `names` too.

    CUDA counts GPUs by speed unless told otherwise, NVML by their place on the bus: numbers mean
    the same only where all GPUs are alike or CUDA_DEVICE_ORDER says so.
    """
    visible = _visible(gpus, environment)
    if names is None:
        return visible
    return GpuSelection([_named(name, visible.gpus) for name in names])


def _visible(gpus: Sequence[NvmlGpu], environment: Mapping[str, str]) -> GpuSelection:
    value = environment.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return GpuSelection(list(gpus))
    whole = [gpu for gpu in gpus if gpu.facts.mig_of is None]
    by_place = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    numbers_mean_the_same = by_place or len({gpu.facts.model for gpu in whole}) < 2
    chosen: list[NvmlGpu] = []
    for word in (part.strip() for part in value.split(",")):
        if word.isdigit() and not numbers_mean_the_same:
            return GpuSelection(list(gpus), is_certain=False)
        if word.isdigit() and int(word) < len(whole):
            chosen.append(whole[int(word)])
        elif word.startswith(("GPU-", "MIG-")):
            chosen += [gpu for gpu in gpus if gpu.facts.uuid.startswith(word)]
        else:
            break  # CUDA, too, stops at the first word that means nothing
    divided = {gpu.facts.uuid for gpu in chosen}
    chosen += [gpu for gpu in gpus if gpu.facts.mig_of in divided]  # CUDA means one of them
    return GpuSelection(list(dict.fromkeys(chosen)))


def _named(name: str, gpus: Sequence[NvmlGpu]) -> NvmlGpu:
    for gpu in gpus:
        facts = gpu.facts
        by_number = name.isdigit() and facts.index == int(name) and facts.mig_of is None
        if by_number or facts.uuid.startswith(name):
            return gpu
    listed = ", ".join(gpu.facts.label for gpu in gpus) or "none"
    raise CannotTry(f"There is no GPU {name} for this process", f"There is: {listed}")
