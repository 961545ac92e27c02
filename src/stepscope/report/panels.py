"""The three panels of a run on one clock: memory, transfers, CPU use."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from stepscope.analysis.series import EMPTY, Floats, Series
from stepscope.analysis.summary import Recorded
from stepscope.report.format import allowed_text, bytes_text
from stepscope.report.thinning import drawn_points

Style = Literal["bold", "thin", "dashed", "level"]

NETWORK = "net:"
"""What the entity of every network namespace begins with."""

_ROLE_COLOURS = {"main": "blue", "worker": "orange", "other": "grey"}
_RANK_COLOURS = ("blue", "orange", "green", "purple", "sky", "olive")
_MOST_ROLES = 10
_GB, _MB = 1e-9, 1e-6
_DWARFS = 3.0
"""A line of the surroundings this many times higher than the run's own would flatten them: it
starts hidden."""


@dataclass(frozen=True)
class Line:
    """One line: `x` in seconds since the run began, `y` in the panel's unit, NaN for a break.

    A point of a long run stands for some time: `y` is the mean then, `low` and `high` the range.
    """

    label: str
    colour: str
    """A name of the palette: ink, blue, orange, green, purple, sky, olive, grey."""
    x: Floats
    y: Floats
    style: Style
    low: Floats | None = None
    high: Floats | None = None
    shown: bool = True
    """Whether it is drawn before anybody clicks on it."""


@dataclass(frozen=True)
class Panel:
    """Lines that share a unit."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    detail: str = ""
    """What bounds it, in a few words: "limit 4.00 GB"."""
    whole: float | None = None
    """What 100 % is, where the panel has a scale of shares."""


def panels_of(recorded: Recorded, end: float) -> tuple[Panel, ...]:
    """All panels of a run, their lines thinned out for drawing from 0 to `end` seconds."""
    roles = drawn_roles(recorded)
    return tuple(
        replace(panel, lines=tuple(_thinned(line, end) for line in panel.lines))
        for panel in (
            _memory(recorded, roles, end),
            _transfers(recorded),
            _cpu(recorded, roles, end),
        )
    )


def roles_in_order(recorded: Recorded) -> list[str]:
    """main, rank0, rank1, …, worker, other: the parts of the tree."""
    found = {e for (m, e) in recorded.series if m in ("cpu", "rss") and e != "tree"}
    return sorted(found, key=_role_place)


def drawn_roles(recorded: Recorded) -> list[str]:
    """The roles that get a line of their own: none where the tree is one role."""
    roles = roles_in_order(recorded)
    return roles[:_MOST_ROLES] if len(roles) > 1 else []


def network(recorded: Recorded, metric: str) -> Series:
    """A metric summed over all network namespaces, which are read together."""
    parts = [s for (m, e), s in recorded.series.items() if m == metric and e.startswith(NETWORK)]
    if not parts:
        return EMPTY
    t, place = np.unique(np.concatenate([part.t for part in parts]), return_inverse=True)
    value, window = np.zeros(len(t)), np.zeros(len(t))
    np.add.at(value, place, np.concatenate([part.value for part in parts]))
    window[place] = np.concatenate([part.window for part in parts])
    return Series(t, window, value)


def _role_place(role: str) -> tuple[int, int, str]:
    rank = re.fullmatch(r"rank(\d+)", role)
    places = {"main": 0, "worker": 2, "other": 4}
    return (1, int(rank[1]), role) if rank else (places.get(role, 3), 0, role)


def _role_colour(role: str) -> str:
    rank = re.fullmatch(r"rank(\d+)", role)
    if rank:
        return _RANK_COLOURS[int(rank[1]) % len(_RANK_COLOURS)]
    return _ROLE_COLOURS.get(role, "olive")


def _memory(recorded: Recorded, roles: Sequence[str], end: float) -> Panel:
    own = _line(recorded, recorded.of("memory"), "memory", "ink", "bold", scale=_GB)
    for role in roles:
        rss = recorded.of("rss", role)
        own += _line(recorded, rss, f"{role} RSS", _role_colour(role), "thin", scale=_GB)
    shared = recorded.of("shm_used", "shm")
    around = _line(recorded, shared, "/dev/shm", "olive", "thin", scale=_GB)
    limit = recorded.of("cgroup_memory_limit", "cgroup")
    detail = ""
    if len(limit):
        lowest = float(limit.value.min())
        charged = recorded.of("cgroup_memory", "cgroup")
        around += _line(recorded, charged, "cgroup memory", "sky", "thin", scale=_GB)
        around.append(_level("limit", lowest * _GB, end))
        detail = f"limit {bytes_text(lowest)}"
    return Panel("Memory", "GB", _with_surroundings(own, around), detail)


def _transfers(recorded: Recorded) -> Panel:
    received, sent = network(recorded, "net_received"), network(recorded, "net_sent")
    # What the page cache serves is a transfer too, but one that dwarfs those of the disk.
    calls = _line(recorded, recorded.of("read_calls"), "read by calls", "grey", "dashed", scale=_MB)
    lines = [
        *_line(recorded, recorded.of("read"), "disk read", "blue", "thin", scale=_MB),
        *_line(recorded, recorded.of("write"), "disk written", "orange", "thin", scale=_MB),
        *_line(recorded, received, "network in", "green", "thin", scale=_MB),
        *_line(recorded, sent, "network out", "purple", "thin", scale=_MB),
        *(replace(line, shown=False) for line in calls),
    ]
    return Panel("Transfers", "MB/s", tuple(lines))


def _cpu(recorded: Recorded, roles: Sequence[str], end: float) -> Panel:
    own = _line(recorded, recorded.of("cpu"), "all processes", "ink", "bold")
    for role in roles:
        own += _line(recorded, recorded.of("cpu", role), role, _role_colour(role), "thin")
    around = _line(recorded, recorded.of("host_cpu", "host"), "host", "grey", "dashed")
    allowed = recorded.cpu_allowed
    if allowed and own:
        around.append(_level("allowed", allowed, end))
    detail = f"on the right % of the {allowed_text(allowed)} allowed" if allowed else ""
    return Panel("CPU use", "cores", _with_surroundings(own, around), detail, allowed)


def _line(
    recorded: Recorded, series: Series, label: str, colour: str, style: Style, *, scale: float = 1
) -> list[Line]:
    """The line of a series, or none where nothing was read."""
    if not len(series):
        return []
    series = _without_slivers(series)
    x = (series.t - recorded.begin_ns) / 1e9
    return [Line(label, colour, x, series.value * scale, style)]


def _without_slivers(series: Series) -> Series:
    """A sample right after another one has no rate that could be compared with the rest."""
    keep = series.window >= np.median(series.window) / 2
    return Series(series.t[keep], series.window[keep], series.value[keep])


def _level(label: str, height: float, end: float) -> Line:
    return Line(label, "ink", np.array([0.0, end]), np.full(2, float(height)), "level")


def _with_surroundings(own: list[Line], around: list[Line]) -> tuple[Line, ...]:
    """The run's own lines, then those around it; one that would flatten them starts hidden."""
    highest = max((float(line.y.max()) for line in own), default=np.inf)
    return (
        *own,
        *(replace(line, shown=float(line.y.max()) <= _DWARFS * highest) for line in around),
    )


def _thinned(line: Line, end: float) -> Line:
    points = drawn_points(line.x, line.y, end)
    return replace(line, x=points.x, y=points.y, low=points.low, high=points.high)
