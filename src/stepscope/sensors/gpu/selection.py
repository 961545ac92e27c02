"""Selection of the GPUs that a command may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepscope.errors import TrialError
from stepscope.sensors.gpu.nvml import NvmlGpu


@dataclass(frozen=True)
class GpuSelection:
    """The GPUs that a command may use, in CUDA order."""

    gpus: list[NvmlGpu]
    is_certain: bool = True
    """False if CUDA_VISIBLE_DEVICES is ambiguous; then all GPUs are listed."""


def select_gpus(
    gpus: Sequence[NvmlGpu], environment: Mapping[str, str], names: Sequence[str] | None = None
) -> GpuSelection:
    """Return the GPUs selected by `names` (indices as in nvidia-smi, or UUIDs) or by
    CUDA_VISIBLE_DEVICES, which also restricts `names`.

    By default CUDA orders GPUs by speed, while NVML orders them by PCI bus. Indices agree only if
    all GPUs have the same model or CUDA_DEVICE_ORDER=PCI_BUS_ID is set.
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
    by_bus = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    same_order = by_bus or len({gpu.facts.model for gpu in whole}) < 2
    chosen: list[NvmlGpu] = []
    for word in (part.strip() for part in value.split(",")):
        if word.isdigit() and not same_order:
            return GpuSelection(list(gpus), is_certain=False)
        if word.isdigit() and int(word) < len(whole):
            chosen.append(whole[int(word)])
        elif word.startswith(("GPU-", "MIG-")):
            chosen += [gpu for gpu in gpus if gpu.facts.uuid.startswith(word)]
        else:
            break  # CUDA also stops at the first invalid entry
    uuids = {gpu.facts.uuid for gpu in chosen}
    chosen += [gpu for gpu in gpus if gpu.facts.mig_of in uuids]  # CUDA uses one of the slices
    return GpuSelection(list(dict.fromkeys(chosen)))


def _named(name: str, gpus: Sequence[NvmlGpu]) -> NvmlGpu:
    for gpu in gpus:
        facts = gpu.facts
        by_index = name.isdigit() and facts.index == int(name) and facts.mig_of is None
        if by_index or facts.uuid.startswith(name):
            return gpu
    listed = ", ".join(gpu.facts.label for gpu in gpus) or "none"
    raise TrialError(f"Unknown GPU '{name}'", f"Available to this process: {listed}")
