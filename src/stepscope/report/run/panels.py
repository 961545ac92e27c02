"""The chart panels of a run: memory, disk and network, CPU, and GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.gpus import RecordedGpu, combined_metric
from stepscope.analysis.run.series import EMPTY, Series, held_at
from stepscope.report.kit.document import LineStyle, Panel, PlotLine
from stepscope.report.kit.format import allowed_text, bytes_text, value_text
from stepscope.report.run.thinning import drawn_points

NETWORK = "net:"
"""Prefix of the entities of network namespaces."""

_COLORS = ("blue", "orange", "green", "purple", "sky", "olive")
_ROLE_COLORS = {"main": "blue", "worker": "orange", "other": "gray"}
_ROLE_ORDER = {"main": 0, "worker": 2, "other": 4}
_GPU_COLORS = (*_COLORS, "gray", "ink")
MAX_ROLES = 10
MAX_GPUS = len(_GPU_COLORS)
"""Largest number of roles and GPUs with their own lines."""
_TOO_HIGH = 3.0
"""A context line this many times higher than the lines of the run is hidden initially."""
_GIB, _MIB, _PERCENT = 2.0**-30, 2.0**-20, 100.0


def panels_of(recorded: RunData, end: float) -> tuple[Panel, ...]:
    """Return all panels of a run, with lines thinned for a time axis from 0 to `end` seconds."""
    draw = _LineMaker(recorded, end)
    roles = drawn_roles(recorded)
    panels = [_memory(draw, roles), _disk_and_network(draw), _cpu(draw, roles)]
    if gpus := recorded.used_gpus:
        makers = (_gpu_activity, _gpu_memory, _gpu_transfers, _gpu_power)
        panels += [panel for make in makers if (panel := make(draw, gpus)).lines]
    return tuple(
        replace(panel, lines=tuple(_thinned(line, end) for line in panel.lines)) for panel in panels
    )


def roles_in_order(recorded: RunData) -> list[str]:
    """Return the roles of the process tree: main, rank0, rank1, …, worker, other."""

    def position(role: str) -> tuple[int, int, str]:
        rank = re.fullmatch(r"rank(\d+)", role)
        return (1, int(rank[1]), role) if rank else (_ROLE_ORDER.get(role, 3), 0, role)

    return sorted(
        {e for (m, e) in recorded.series if m in ("cpu", "rss") and e != "tree"}, key=position
    )


def drawn_roles(recorded: RunData) -> list[str]:
    """Return the roles that have their own line: none if there is only one role."""
    roles = roles_in_order(recorded)
    return roles[:MAX_ROLES] if len(roles) > 1 else []


def network(recorded: RunData, metric: str) -> Series:
    """Sum a metric over all network namespaces, which are read at the same times."""
    parts = [s for (m, e), s in recorded.series.items() if m == metric and e.startswith(NETWORK)]
    if not parts:
        return EMPTY
    t, index = np.unique(np.concatenate([part.t for part in parts]), return_inverse=True)
    value, window = np.zeros(len(t)), np.zeros(len(t))
    np.add.at(value, index, np.concatenate([part.value for part in parts]))
    window[index] = np.concatenate([part.window for part in parts])
    return Series(t, window, value)


@dataclass(frozen=True)
class _LineMaker:
    """Makes lines on the time axis of a run."""

    recorded: RunData
    end: float

    def line(
        self,
        series: Series,
        label: str,
        color: str,
        style: LineStyle = "thin",
        scale: float = 1.0,
    ) -> list[PlotLine]:
        """Return the line of a series; nothing if it is empty."""
        if not len(series):
            return []
        # The rate over a very short window is not comparable with the others.
        keep = series.window >= np.median(series.window) / 2
        x = (series.t[keep] - self.recorded.begin_ns) / 1e9
        y = series.value[keep] * scale
        return [PlotLine(label, color, x=x, y=y, style=style)]

    def level(self, label: str, height: float) -> PlotLine:
        """Return a horizontal line, such as a limit."""
        x, y = np.array([0.0, self.end]), np.full(2, float(height))
        return PlotLine(label, "ink", x=x, y=y, style="level")

    def each(
        self, gpus: Sequence[RecordedGpu], metric: str, what: str, scale: float = 1.0
    ) -> list[PlotLine]:
        """Return one line per GPU, hidden initially; nothing for a single GPU."""
        lines: list[PlotLine] = []
        for gpu, color in zip(gpus, _GPU_COLORS, strict=False):
            lines += self.line(gpu.of(metric), f"{gpu.gpu.label} {what}", color, scale=scale)
        return _hidden(lines) if len(gpus) > 1 else []


def _hidden(lines: Sequence[PlotLine]) -> list[PlotLine]:
    return [replace(line, shown=False) for line in lines]


def _with_context(own: Sequence[PlotLine], context: Sequence[PlotLine]) -> tuple[PlotLine, ...]:
    """Add context lines; those that would flatten the lines of the run are hidden initially."""
    highest = max((float(line.y.max()) for line in own), default=np.inf)
    shown = (replace(line, shown=float(line.y.max()) <= _TOO_HIGH * highest) for line in context)
    return (*own, *shown)


def _thinned(line: PlotLine, end: float) -> PlotLine:
    """Reduce the points of a line. Only visible lines get a band, to keep the page small."""
    x, y, low, high = drawn_points(line.x, line.y, end)
    if line.style == "dashed" or not line.shown:
        return replace(line, x=x, y=y)
    return replace(line, x=x, y=y, low=low, high=high)


def _role_color(role: str) -> str:
    rank = re.fullmatch(r"rank(\d+)", role)
    return _COLORS[int(rank[1]) % len(_COLORS)] if rank else _ROLE_COLORS.get(role, "olive")


def _memory(draw: _LineMaker, roles: Sequence[str]) -> Panel:
    of = draw.recorded.of
    own = draw.line(of("memory"), "memory", "ink", "bold", _GIB)
    for role in roles:
        own += draw.line(of("rss", role), f"{role} RSS", _role_color(role), scale=_GIB)
    context = draw.line(of("shm_used", "shm"), "/dev/shm", "olive", scale=_GIB)
    limit = of("cgroup_memory_limit", "cgroup")
    detail = ""
    if len(limit):
        lowest = float(limit.value.min())
        context += draw.line(of("cgroup_memory", "cgroup"), "cgroup memory", "sky", scale=_GIB)
        context.append(draw.level("limit", lowest * _GIB))
        detail = f"limit {bytes_text(lowest)}"
    return Panel("Memory", "GiB", _with_context(own, context), detail)


def _disk_and_network(draw: _LineMaker) -> Panel:
    recorded, of = draw.recorded, draw.recorded.of
    lines = [
        *draw.line(of("read"), "disk read", "blue", scale=_MIB),
        *draw.line(of("write"), "disk write", "orange", scale=_MIB),
        *draw.line(network(recorded, "net_received"), "network in", "green", scale=_MIB),
        *draw.line(network(recorded, "net_sent"), "network out", "purple", scale=_MIB),
        # Includes reads from the page cache, which can be much faster than the disk.
        *_hidden(draw.line(of("read_calls"), "read calls", "gray", "dashed", _MIB)),
    ]
    return Panel("Disk and network", "MiB/s", tuple(lines))


def _cpu(draw: _LineMaker, roles: Sequence[str]) -> Panel:
    of, allowed = draw.recorded.of, draw.recorded.cpu_allowed
    own = draw.line(of("cpu"), "all processes", "ink", "bold")
    for role in roles:
        own += draw.line(of("cpu", role), role, _role_color(role))
    context = draw.line(of("host_cpu", "host"), "host", "gray", "dashed")
    if allowed and own:
        context.append(draw.level("allowed", allowed))
    detail = f"right axis: % of the {allowed_text(allowed)} allowed cores" if allowed else ""
    return Panel("CPU usage", "cores", _with_context(own, context), detail, allowed)


def _gpu_activity(draw: _LineMaker, gpus: Sequence[RecordedGpu]) -> Panel:
    """SM activity and the like; without performance counters only utilization."""

    def mean(metric: str, label: str, color: str, style: LineStyle = "thin") -> list[PlotLine]:
        series = combined_metric(gpus, metric, np.nanmean)
        return draw.line(series, label, color, style, _PERCENT)

    detail = [f"mean of {len(gpus)} GPUs"] if len(gpus) > 1 else []
    sm = mean("gpu_sm", "SM activity", "ink", "bold")
    if sm:
        utilization = mean("gpu_utilization", "utilization", "gray", "dashed")
        lines = [
            *sm,
            *mean("gpu_tensor", "tensor core activity", "orange"),
            *mean("gpu_dram", "memory bandwidth", "blue"),
            *utilization,
            *draw.each(gpus, "gpu_sm", "SM activity", _PERCENT),
        ]
        if utilization:
            detail.append("utilization: time with any kernel or copy")
    else:
        lines = [
            *mean("gpu_utilization", "utilization", "ink", "bold"),
            *mean("gpu_memory_controller", "memory controller", "blue"),
            *draw.each(gpus, "gpu_utilization", "utilization", _PERCENT),
        ]
    return Panel("GPU activity", "%", tuple(lines), " · ".join(detail), top=_PERCENT)


def _gpu_memory(draw: _LineMaker, gpus: Sequence[RecordedGpu]) -> Panel:
    """Memory of each GPU; for a single one also that of PyTorch and of other processes."""
    own: list[PlotLine] = []
    context: list[PlotLine] = []
    if len(gpus) == 1:
        gpu = gpus[0]
        allocated = gpu.of("gpu_allocated")
        # Most tensors are freed by the end of a step: the peak shows what the batch needs. It is
        # reported only when it grows.
        peak = held_at(gpu.of("gpu_allocated_peak"), allocated.t)
        peaks = Series(allocated.t, allocated.window, peak)
        own += draw.line(gpu.memory, f"{gpu.gpu.label} memory", "ink", "bold", _GIB)
        own += draw.line(gpu.of("gpu_reserved"), "reserved by PyTorch", "orange", scale=_GIB)
        own += draw.line(peaks, "peak allocated", "green", scale=_GIB)
        own += draw.line(allocated, "allocated at the end of a step", "blue", scale=_GIB)
        if gpu.memory is not gpu.of("gpu_memory"):
            context += draw.line(gpu.of("gpu_memory"), "all processes", "gray", "dashed", _GIB)
    else:
        for gpu, color in zip(gpus, _GPU_COLORS, strict=False):
            own += draw.line(gpu.memory, f"{gpu.gpu.label} memory", color, scale=_GIB)
    sizes = {gpu.gpu.memory_bytes for gpu in gpus}
    size = sizes.pop() if len(sizes) == 1 else None
    detail = ""
    if size and own:
        context.append(draw.level("capacity", size * _GIB))
        detail = f"capacity {bytes_text(size)}{' each' if len(gpus) > 1 else ''}"
    return Panel("GPU memory", "GiB", _with_context(own, context), detail)


def _gpu_transfers(draw: _LineMaker, gpus: Sequence[RecordedGpu]) -> Panel:
    """PCIe and NVLink traffic of all GPUs; NVLink only if there is any."""
    links = [
        (combined_metric(gpus, metric, np.nansum), label, color, always)
        for metric, label, color, always in (
            ("gpu_pcie_received", "PCIe to GPU", "blue", True),
            ("gpu_pcie_sent", "PCIe from GPU", "orange", True),
            ("gpu_nvlink_received", "NVLink to GPU", "green", False),
            ("gpu_nvlink_sent", "NVLink from GPU", "purple", False),
        )
    ]
    highest = max(float(series.value.max(initial=0)) for series, *_ in links)
    unit, scale = ("GiB/s", _GIB) if highest >= 1 << 30 else ("MiB/s", _MIB)
    lines: list[PlotLine] = []
    for series, label, color, always in links:
        if always or series.value.any():
            lines += draw.line(series, label, color, scale=scale)
    detail = f"sum of {len(gpus)} GPUs" if len(gpus) > 1 else ""
    return Panel("GPU transfers", unit, tuple(lines), detail)


def _gpu_power(draw: _LineMaker, gpus: Sequence[RecordedGpu]) -> Panel:
    total = combined_metric(gpus, "gpu_power", np.nansum)
    label = "power" if len(gpus) == 1 else f"sum of {len(gpus)} GPUs"
    own = [*draw.line(total, label, "ink", "bold"), *draw.each(gpus, "gpu_power", "power")]
    limits = [gpu.gpu.power_limit_watts for gpu in gpus if gpu.gpu.power_limit_watts]
    if len(limits) < len(gpus) or not own:
        return Panel("GPU power", "W", tuple(own))
    limit = sum(limits)
    lines = _with_context(own, [draw.level("limit", limit)])
    detail = f"right axis: % of the {value_text(limit, 'W')} limit"
    return Panel("GPU power", "W", lines, detail, full_scale=limit)
