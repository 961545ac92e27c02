"""The panels of a run on one clock: memory, transfers, CPU use, and those of its GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.gpus import RecordedGpu, side_by_side
from stepscope.analysis.run.series import EMPTY, Series, held_at
from stepscope.report.kit.document import LineStyle, Panel, PlotLine
from stepscope.report.kit.format import allowed_text, bytes_text, value_text
from stepscope.report.run.thinning import drawn_points

NETWORK = "net:"
"""What the entity of every network namespace begins with."""

_COLOURS = ("blue", "orange", "green", "purple", "sky", "olive")
_ROLE_COLOURS = {"main": "blue", "worker": "orange", "other": "grey"}
_ROLE_PLACES = {"main": 0, "worker": 2, "other": 4}
_GPU_COLOURS = (*_COLOURS, "grey", "ink")
MOST_ROLES = 10
MOST_GPUS = len(_GPU_COLOURS)
"""So many get lines of their own."""
_FLATTENS = 3.0
"""A line of the surroundings this many times higher than the run's own starts hidden."""
_GB, _MB, _PERCENT = 1e-9, 1e-6, 100.0


def panels_of(recorded: RunData, end: float) -> tuple[Panel, ...]:
    """All panels of a run, their lines thinned out for drawing from 0 to `end` seconds."""
    draw = _LineMaker(recorded, end)
    roles = drawn_roles(recorded)
    panels = [_memory(draw, roles), _transfers(draw), _cpu(draw, roles)]
    if gpus := recorded.used_gpus:
        of_gpus = (_gpu_use, _gpu_memory, _gpu_transfers, _gpu_power)
        panels += [panel for make in of_gpus if (panel := make(draw, gpus)).lines]
    return tuple(
        replace(panel, lines=tuple(_thinned(line, end) for line in panel.lines)) for panel in panels
    )


def roles_in_order(recorded: RunData) -> list[str]:
    """main, rank0, rank1, …, worker, other: the parts of the tree."""

    def place(role: str) -> tuple[int, int, str]:
        rank = re.fullmatch(r"rank(\d+)", role)
        return (1, int(rank[1]), role) if rank else (_ROLE_PLACES.get(role, 3), 0, role)

    return sorted(
        {e for (m, e) in recorded.series if m in ("cpu", "rss") and e != "tree"}, key=place
    )


def drawn_roles(recorded: RunData) -> list[str]:
    """The roles that get a line of their own: none where the tree is one role."""
    roles = roles_in_order(recorded)
    return roles[:MOST_ROLES] if len(roles) > 1 else []


def network(recorded: RunData, metric: str) -> Series:
    """A metric summed over all network namespaces, which are read together."""
    parts = [s for (m, e), s in recorded.series.items() if m == metric and e.startswith(NETWORK)]
    if not parts:
        return EMPTY
    t, place = np.unique(np.concatenate([part.t for part in parts]), return_inverse=True)
    value, window = np.zeros(len(t)), np.zeros(len(t))
    np.add.at(value, place, np.concatenate([part.value for part in parts]))
    window[place] = np.concatenate([part.window for part in parts])
    return Series(t, window, value)


@dataclass(frozen=True)
class _LineMaker:
    """Lines of one run, on its clock."""

    recorded: RunData
    end: float

    def line(
        self,
        series: Series,
        label: str,
        colour: str,
        style: LineStyle = "thin",
        scale: float = 1.0,
    ) -> list[PlotLine]:
        """The line of a series, or none where nothing was read."""
        if not len(series):
            return []
        # A sample right after another one has no rate that could be compared with the rest.
        keep = series.window >= np.median(series.window) / 2
        x = (series.t[keep] - self.recorded.begin_ns) / 1e9
        y = series.value[keep] * scale
        return [PlotLine(label, colour, x=x, y=y, style=style)]

    def level(self, label: str, height: float) -> PlotLine:
        """A straight line at a height that means something."""
        x, y = np.array([0.0, self.end]), np.full(2, float(height))
        return PlotLine(label, "ink", x=x, y=y, style="level")

    def each(
        self, gpus: Sequence[RecordedGpu], metric: str, what: str, scale: float = 1.0
    ) -> list[PlotLine]:
        """A line for each of several GPUs, hidden until somebody wants to compare them."""
        lines: list[PlotLine] = []
        for gpu, colour in zip(gpus, _GPU_COLOURS, strict=False):
            lines += self.line(gpu.of(metric), f"{gpu.gpu.label} {what}", colour, scale=scale)
        return _hidden(lines) if len(gpus) > 1 else []


def _hidden(lines: Sequence[PlotLine]) -> list[PlotLine]:
    return [replace(line, shown=False) for line in lines]


def _with_surroundings(own: Sequence[PlotLine], around: Sequence[PlotLine]) -> tuple[PlotLine, ...]:
    """The run's own lines, then those around it; one that would flatten them starts hidden."""
    highest = max((float(line.y.max()) for line in own), default=np.inf)
    shown = (replace(line, shown=float(line.y.max()) <= _FLATTENS * highest) for line in around)
    return (*own, *shown)


def _thinned(line: PlotLine, end: float) -> PlotLine:
    """Fewer points; the range of each only for what is looked at first, to keep the page small."""
    x, y, low, high = drawn_points(line.x, line.y, end)
    if line.style == "dashed" or not line.shown:
        return replace(line, x=x, y=y)
    return replace(line, x=x, y=y, low=low, high=high)


def _role_colour(role: str) -> str:
    rank = re.fullmatch(r"rank(\d+)", role)
    return _COLOURS[int(rank[1]) % len(_COLOURS)] if rank else _ROLE_COLOURS.get(role, "olive")


def _memory(draw: _LineMaker, roles: Sequence[str]) -> Panel:
    of = draw.recorded.of
    own = draw.line(of("memory"), "memory", "ink", "bold", _GB)
    for role in roles:
        own += draw.line(of("rss", role), f"{role} RSS", _role_colour(role), scale=_GB)
    around = draw.line(of("shm_used", "shm"), "/dev/shm", "olive", scale=_GB)
    limit = of("cgroup_memory_limit", "cgroup")
    detail = ""
    if len(limit):
        lowest = float(limit.value.min())
        around += draw.line(of("cgroup_memory", "cgroup"), "cgroup memory", "sky", scale=_GB)
        around.append(draw.level("limit", lowest * _GB))
        detail = f"limit {bytes_text(lowest)}"
    return Panel("Memory", "GB", _with_surroundings(own, around), detail)


def _transfers(draw: _LineMaker) -> Panel:
    recorded, of = draw.recorded, draw.recorded.of
    lines = [
        *draw.line(of("read"), "disk read", "blue", scale=_MB),
        *draw.line(of("write"), "disk written", "orange", scale=_MB),
        *draw.line(network(recorded, "net_received"), "network in", "green", scale=_MB),
        *draw.line(network(recorded, "net_sent"), "network out", "purple", scale=_MB),
        # What the page cache serves is a transfer too, but one that dwarfs those of the disk.
        *_hidden(draw.line(of("read_calls"), "read by calls", "grey", "dashed", _MB)),
    ]
    return Panel("Transfers", "MB/s", tuple(lines))


def _cpu(draw: _LineMaker, roles: Sequence[str]) -> Panel:
    of, allowed = draw.recorded.of, draw.recorded.cpu_allowed
    own = draw.line(of("cpu"), "all processes", "ink", "bold")
    for role in roles:
        own += draw.line(of("cpu", role), role, _role_colour(role))
    around = draw.line(of("host_cpu", "host"), "host", "grey", "dashed")
    if allowed and own:
        around.append(draw.level("allowed", allowed))
    detail = f"on the right % of the {allowed_text(allowed)} allowed" if allowed else ""
    return Panel("CPU use", "cores", _with_surroundings(own, around), detail, allowed)


def _gpu_use(draw: _LineMaker, gpus: Sequence[RecordedGpu]) -> Panel:
    """What the units did; utilisation, which tells less, takes the place of what is not known."""

    def mean(metric: str, label: str, colour: str, style: LineStyle = "thin") -> list[PlotLine]:
        series = side_by_side(gpus, metric, np.nanmean)
        return draw.line(series, label, colour, style, _PERCENT)

    detail = [f"mean of {len(gpus)} GPUs"] if len(gpus) > 1 else []
    units = mean("gpu_sm", "SM activity", "ink", "bold")
    if units:
        utilisation = mean("gpu_utilization", "utilisation", "grey", "dashed")
        lines = [
            *units,
            *mean("gpu_tensor", "tensor cores", "orange"),
            *mean("gpu_dram", "memory bandwidth", "blue"),
            *utilisation,
            *draw.each(gpus, "gpu_sm", "SM", _PERCENT),
        ]
        if utilisation:
            detail.append("utilisation: some kernel or copy ran")
    else:
        lines = [
            *mean("gpu_utilization", "utilisation", "ink", "bold"),
            *mean("gpu_memory_controller", "memory controller", "blue"),
            *draw.each(gpus, "gpu_utilization", "utilisation", _PERCENT),
        ]
    return Panel("GPU use", "%", tuple(lines), " · ".join(detail), top=_PERCENT)


def _gpu_memory(draw: _LineMaker, gpus: Sequence[RecordedGpu]) -> Panel:
    """Of one GPU also what PyTorch's allocator keeps, what tensors hold, and what others have."""
    own: list[PlotLine] = []
    around: list[PlotLine] = []
    if len(gpus) == 1:
        gpu = gpus[0]
        allocated = gpu.of("gpu_allocated")
        # At the end of a step most tensors are gone again: their peak is what the batch needs. It
        # is told when it grows.
        peak = held_at(gpu.of("gpu_allocated_peak"), allocated.t)
        peaks = Series(allocated.t, allocated.window, peak)
        own += draw.line(gpu.memory, f"{gpu.gpu.label} memory", "ink", "bold", _GB)
        own += draw.line(gpu.of("gpu_reserved"), "reserved by PyTorch", "orange", scale=_GB)
        own += draw.line(peaks, "most in tensors so far", "green", scale=_GB)
        own += draw.line(allocated, "in tensors at step ends", "blue", scale=_GB)
        if gpu.memory is not gpu.of("gpu_memory"):
            around += draw.line(gpu.of("gpu_memory"), "whole device", "grey", "dashed", _GB)
    else:
        for gpu, colour in zip(gpus, _GPU_COLOURS, strict=False):
            own += draw.line(gpu.memory, f"{gpu.gpu.label} memory", colour, scale=_GB)
    sizes = {gpu.gpu.memory_bytes for gpu in gpus}
    size = sizes.pop() if len(sizes) == 1 else None
    detail = ""
    if size and own:
        around.append(draw.level("size", size * _GB))
        detail = f"{'each ' if len(gpus) > 1 else ''}of {bytes_text(size)}"
    return Panel("GPU memory", "GB", _with_surroundings(own, around), detail)


def _gpu_transfers(draw: _LineMaker, gpus: Sequence[RecordedGpu]) -> Panel:
    """Over PCIe and NVLink, all GPUs together; NVLink only where something went over it."""
    links = [
        (side_by_side(gpus, metric, np.nansum), label, colour, always)
        for metric, label, colour, always in (
            ("gpu_pcie_received", "PCIe to GPU", "blue", True),
            ("gpu_pcie_sent", "PCIe from GPU", "orange", True),
            ("gpu_nvlink_received", "NVLink to GPU", "green", False),
            ("gpu_nvlink_sent", "NVLink from GPU", "purple", False),
        )
    ]
    highest = max(float(series.value.max(initial=0)) for series, *_ in links)
    unit, scale = ("GB/s", _GB) if highest >= 1e9 else ("MB/s", _MB)
    lines: list[PlotLine] = []
    for series, label, colour, always in links:
        if always or series.value.any():
            lines += draw.line(series, label, colour, scale=scale)
    detail = f"sum of {len(gpus)} GPUs" if len(gpus) > 1 else ""
    return Panel("GPU transfers", unit, tuple(lines), detail)


def _gpu_power(draw: _LineMaker, gpus: Sequence[RecordedGpu]) -> Panel:
    total = side_by_side(gpus, "gpu_power", np.nansum)
    label = "power" if len(gpus) == 1 else f"all {len(gpus)} GPUs"
    own = [*draw.line(total, label, "ink", "bold"), *draw.each(gpus, "gpu_power", "power")]
    limits = [gpu.gpu.power_limit_watts for gpu in gpus if gpu.gpu.power_limit_watts]
    if len(limits) < len(gpus) or not own:
        return Panel("GPU power", "W", tuple(own))
    limit = sum(limits)
    lines = _with_surroundings(own, [draw.level("limit", limit)])
    detail = f"on the right % of the limit, {value_text(limit, 'W')}"
    return Panel("GPU power", "W", lines, detail, whole=limit)
