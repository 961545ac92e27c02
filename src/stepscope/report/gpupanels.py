"""The panels of the GPUs of a run, on the clock of the others: use, memory, transfers, power."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stepscope.analysis.gpus import RecordedGpu, side_by_side
from stepscope.analysis.series import Series, held_at
from stepscope.analysis.summary import Recorded
from stepscope.report.format import bytes_text, value_text
from stepscope.report.lines import (
    COLOURS,
    Line,
    Panel,
    Style,
    hidden,
    level,
    line_of,
    with_surroundings,
)

_GPU_COLOURS = (*COLOURS, "grey", "ink")
MOST_DRAWN = len(_GPU_COLOURS)
"""GPUs that get lines of their own."""
_GB, _MB, _PERCENT = 1e-9, 1e-6, 100.0


def gpu_panels(recorded: Recorded, end: float) -> tuple[Panel, ...]:
    """Four panels; none where the run used no GPU. One without any line is left out."""
    gpus = recorded.used_gpus
    if not gpus:
        return ()
    panels = (
        _use(recorded, gpus),
        _memory(recorded, gpus, end),
        _transfers(recorded, gpus),
        _power(recorded, gpus, end),
    )
    return tuple(panel for panel in panels if panel.lines)


def _use(recorded: Recorded, gpus: Sequence[RecordedGpu]) -> Panel:
    """What the units did; utilisation, which tells less, takes the place of what is not known."""

    def mean_of(metric: str) -> Series:
        return side_by_side(gpus, metric, np.nanmean)

    detail = f"mean of {len(gpus)} GPUs" if len(gpus) > 1 else ""
    utilisation, sm = mean_of("gpu_utilization"), mean_of("gpu_sm")
    if not len(sm):
        lines = [
            *_percent(recorded, utilisation, "utilisation", "ink", "bold"),
            *_percent(recorded, mean_of("gpu_memory_controller"), "memory controller", "blue"),
            *_of_each(recorded, gpus, "gpu_utilization", "utilisation", _PERCENT),
        ]
        return Panel("GPU use", "%", tuple(lines), detail, top=_PERCENT)
    lines = [
        *_percent(recorded, sm, "SM activity", "ink", "bold"),
        *_percent(recorded, mean_of("gpu_tensor"), "tensor cores", "orange"),
        *_percent(recorded, mean_of("gpu_dram"), "memory bandwidth", "blue"),
        *_percent(recorded, utilisation, "utilisation", "grey", "dashed"),
        *_of_each(recorded, gpus, "gpu_sm", "SM", _PERCENT),
    ]
    told = "utilisation: some kernel or copy ran" if len(utilisation) else ""
    detail = " · ".join(part for part in (detail, told) if part)
    return Panel("GPU use", "%", tuple(lines), detail, top=_PERCENT)


def _memory(recorded: Recorded, gpus: Sequence[RecordedGpu], end: float) -> Panel:
    if len(gpus) == 1:
        own, around = _memory_of_one(recorded, gpus[0])
    else:
        own, around = [], []
        for gpu, colour in _with_colours(gpus):
            own += _gigabytes(recorded, gpu.memory, f"{gpu.gpu.label} memory", colour)
    sizes = {gpu.gpu.memory_bytes for gpu in gpus}
    size = sizes.pop() if len(sizes) == 1 else None
    detail = ""
    if size and own:
        around.append(level("size", size * _GB, end))
        detail = f"{'each ' if len(gpus) > 1 else ''}of {bytes_text(size)}"
    return Panel("GPU memory", "GB", with_surroundings(own, around), detail)


def _memory_of_one(recorded: Recorded, gpu: RecordedGpu) -> tuple[list[Line], list[Line]]:
    """With what PyTorch's allocator keeps, what of that tensors hold, and what others have.

    At the end of a step most tensors are gone again: their peak is what the batch needs.
    """
    allocated, peak = gpu.of("gpu_allocated"), gpu.of("gpu_allocated_peak")  # told when it grows
    peak = Series(allocated.t, allocated.window, held_at(peak, allocated.t))
    own = [
        *_gigabytes(recorded, gpu.memory, f"{gpu.gpu.label} memory", "ink", "bold"),
        *_gigabytes(recorded, gpu.of("gpu_reserved"), "reserved by PyTorch", "orange"),
        *_gigabytes(recorded, peak, "most in tensors so far", "green"),
        *_gigabytes(recorded, allocated, "in tensors at step ends", "blue"),
    ]
    if gpu.memory is gpu.of("gpu_memory"):
        return own, []
    return own, _gigabytes(recorded, gpu.of("gpu_memory"), "whole device", "grey", "dashed")


def _transfers(recorded: Recorded, gpus: Sequence[RecordedGpu]) -> Panel:
    """Over PCIe and NVLink, all GPUs together; a link that nothing went over has no line."""
    found = [
        (side_by_side(gpus, metric, np.nansum), label, colour)
        for metric, label, colour in (
            ("gpu_pcie_received", "PCIe to GPU", "blue"),
            ("gpu_pcie_sent", "PCIe from GPU", "orange"),
            ("gpu_nvlink_received", "NVLink to GPU", "green"),
            ("gpu_nvlink_sent", "NVLink from GPU", "purple"),
        )
    ]
    highest = max(float(series.value.max(initial=0)) for series, _, _ in found)
    unit, scale = ("GB/s", _GB) if highest >= 1e9 else ("MB/s", _MB)
    lines: list[Line] = []
    for series, label, colour in found:
        if label.startswith("PCIe") or series.value.any():
            lines += line_of(recorded, series, label, colour, "thin", scale=scale)
    detail = f"sum of {len(gpus)} GPUs" if len(gpus) > 1 else ""
    return Panel("GPU transfers", unit, tuple(lines), detail)


def _power(recorded: Recorded, gpus: Sequence[RecordedGpu], end: float) -> Panel:
    total = side_by_side(gpus, "gpu_power", np.nansum)
    label = "power" if len(gpus) == 1 else f"all {len(gpus)} GPUs"
    own = line_of(recorded, total, label, "ink", "bold")
    own += _of_each(recorded, gpus, "gpu_power", "power", 1.0)
    limits = [gpu.gpu.power_limit_watts for gpu in gpus]
    known = [limit for limit in limits if limit]
    if len(known) < len(limits) or not own:
        return Panel("GPU power", "W", tuple(own))
    limit = sum(known)
    lines = with_surroundings(own, [level("limit", limit, end)])
    detail = f"on the right % of the limit, {value_text(limit, 'W')}"
    return Panel("GPU power", "W", lines, detail, whole=limit)


def _of_each(
    recorded: Recorded, gpus: Sequence[RecordedGpu], metric: str, what: str, scale: float
) -> list[Line]:
    """A line for each of several GPUs, for those who want to compare them."""
    if len(gpus) < 2:
        return []
    lines: list[Line] = []
    for gpu, colour in _with_colours(gpus):
        label = f"{gpu.gpu.label} {what}"
        lines += line_of(recorded, gpu.of(metric), label, colour, "thin", scale=scale)
    return hidden(lines)


def _with_colours(gpus: Sequence[RecordedGpu]) -> list[tuple[RecordedGpu, str]]:
    return list(zip(gpus, _GPU_COLOURS, strict=False))


def _percent(
    recorded: Recorded, series: Series, label: str, colour: str, style: Style = "thin"
) -> list[Line]:
    return line_of(recorded, series, label, colour, style, scale=_PERCENT)


def _gigabytes(
    recorded: Recorded, series: Series, label: str, colour: str, style: Style = "thin"
) -> list[Line]:
    return line_of(recorded, series, label, colour, style, scale=_GB)
