"""Factory of all GPU sensors."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.sensors.gpu.nvml import NvmlGpu
from stepscope.sensors.gpu.pcie import PcieSensor
from stepscope.sensors.gpu.processes import OtherProcessesSensor, ProcessesSensor, ProcessOwnership
from stepscope.sensors.gpu.sensors import (
    ActivitySensor,
    EnergySensor,
    ErrorsSensor,
    GpuMemorySensor,
    GpuSensor,
    MonitoredGpu,
    MonitoredProcesses,
    PowerSensor,
    StateSensor,
    UtilizationSensor,
)


def gpu_sensors(
    gpus: Sequence[NvmlGpu], processes: MonitoredProcesses | None = None
) -> list[GpuSensor]:
    """Return all sensors of the given GPUs, for the monitored processes."""
    monitored = [MonitoredGpu(gpu) for gpu in gpus]
    activity = ActivitySensor(monitored)
    ownership = ProcessOwnership(monitored, processes or MonitoredProcesses())
    sensors: list[GpuSensor] = [
        activity,
        PowerSensor(monitored),
        GpuMemorySensor(monitored),
        UtilizationSensor(monitored),
        ProcessesSensor(monitored, ownership),
        OtherProcessesSensor(monitored, ownership),
        StateSensor(monitored),
        EnergySensor(monitored),
        ErrorsSensor(monitored),
    ]
    without_gpm = [
        each for each in monitored if not activity.covers(each) and not each.facts.mig_of
    ]
    if without_gpm:
        sensors.append(PcieSensor(without_gpm))
    return sensors
