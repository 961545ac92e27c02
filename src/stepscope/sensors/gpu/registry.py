"""All the sensors that read GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.sensors.gpu.nvml import NvmlGpu
from stepscope.sensors.gpu.pcie import PcieSensor
from stepscope.sensors.gpu.processes import OthersSensor, ProcessesSensor, ProcessOwnership
from stepscope.sensors.gpu.sensors import (
    ActivitySensor,
    EnergySensor,
    ErrorsSensor,
    GpuMemorySensor,
    GpuSensor,
    MonitoredProcesses,
    PowerSensor,
    StateSensor,
    UtilisationSensor,
    WatchedGpu,
)


def gpu_sensors(
    gpus: Sequence[NvmlGpu], processes: MonitoredProcesses | None = None
) -> list[GpuSensor]:
    """All sensors of some GPUs, for the monitored processes."""
    watched = [WatchedGpu(gpu) for gpu in gpus]
    activity = ActivitySensor(watched)
    ownership = ProcessOwnership(watched, processes or MonitoredProcesses())
    sensors: list[GpuSensor] = [
        activity,
        PowerSensor(watched),
        GpuMemorySensor(watched),
        UtilisationSensor(watched),
        ProcessesSensor(watched, ownership),
        OthersSensor(watched, ownership),
        StateSensor(watched),
        EnergySensor(watched),
        ErrorsSensor(watched),
    ]
    others = [each for each in watched if not activity.covers(each) and not each.facts.mig_of]
    if others:
        sensors.append(PcieSensor(others))
    return sensors
