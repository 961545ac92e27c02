"""Which GPUs a command may use, and all the sensors that read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepscope.sensors.gpu import (
    ActivitySensor,
    EnergySensor,
    ErrorsSensor,
    Family,
    GpuMemorySensor,
    GpuSensor,
    PowerSensor,
    StateSensor,
    UtilisationSensor,
    WatchedGpu,
)
from stepscope.sensors.gpuprocesses import OthersSensor, ProcessesSensor, Whose
from stepscope.sensors.nvml import NvmlGpu
from stepscope.sensors.pcie import PcieSensor


def gpu_sensors(gpus: Sequence[NvmlGpu], family: Family | None = None) -> list[GpuSensor]:
    """All sensors of some GPUs, for the processes of a family."""
    watched = [WatchedGpu(gpu) for gpu in gpus]
    activity = ActivitySensor(watched)
    whose = Whose(watched, family or Family())
    sensors: list[GpuSensor] = [
        activity,
        PowerSensor(watched),
        GpuMemorySensor(watched),
        UtilisationSensor(watched),
        ProcessesSensor(watched, whose),
        OthersSensor(watched, whose),
        StateSensor(watched),
        EnergySensor(watched),
        ErrorsSensor(watched),
    ]
    others = [each for each in watched if not activity.covers(each) and not each.facts.mig_of]
    if others:
        sensors.append(PcieSensor(others))
    return sensors


def visible_gpus(gpus: Sequence[NvmlGpu], environment: Mapping[str, str]) -> list[NvmlGpu]:
    """The GPUs that a command may use by its CUDA_VISIBLE_DEVICES; all where that leaves a doubt.

    CUDA counts GPUs by speed unless told otherwise, NVML by their place on the bus: numbers mean
    the same only where all GPUs are alike or CUDA_DEVICE_ORDER says so.
    """
    told = environment.get("CUDA_VISIBLE_DEVICES")
    if told is None:
        return list(gpus)
    whole = [gpu for gpu in gpus if gpu.facts.mig_of is None]
    by_place = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    numbers_mean_the_same = by_place or len({gpu.facts.name for gpu in whole}) < 2
    chosen: list[NvmlGpu] = []
    for word in (part.strip() for part in told.split(",")):
        if word.isdigit() and numbers_mean_the_same and int(word) < len(whole):
            chosen.append(whole[int(word)])
        elif word.isdigit() and not numbers_mean_the_same:
            return list(gpus)
        elif word.startswith(("GPU-", "MIG-")):
            chosen += [gpu for gpu in gpus if gpu.facts.uuid.startswith(word)]
        else:
            break  # CUDA, too, stops at the first word that means nothing
    sliced = {gpu.facts.uuid for gpu in chosen}
    chosen += [gpu for gpu in gpus if gpu.facts.mig_of in sliced]  # CUDA means one of them
    return list(dict.fromkeys(chosen))
