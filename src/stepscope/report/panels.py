"""The panels of a run on one clock: memory, transfers, CPU use, and those of its GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from stepscope.analysis.series import EMPTY, Series
from stepscope.analysis.summary import Recorded
from stepscope.report.format import allowed_text, bytes_text
from stepscope.report.gpupanels import gpu_panels
from stepscope.report.lines import (
    COLOURS,
    Line,
    Panel,
    hidden,
    level,
    line_of,
    with_surroundings,
)
from stepscope.report.thinning import drawn_points

NETWORK = "net:"
"""What the entity of every network namespace begins with."""

_ROLE_COLOURS = {"main": "blue", "worker": "orange", "other": "grey"}
_MOST_ROLES = 10
_GB, _MB = 1e-9, 1e-6


def panels_of(recorded: Recorded, end: float) -> tuple[Panel, ...]:
    """All panels of a run, their lines thinned out for drawing from 0 to `end` seconds."""
    roles = drawn_roles(recorded)
    return tuple(
        replace(panel, lines=tuple(_thinned(line, end) for line in panel.lines))
        for panel in (
            _memory(recorded, roles, end),
            _transfers(recorded),
            _cpu(recorded, roles, end),
            *gpu_panels(recorded, end),
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
        return COLOURS[int(rank[1]) % len(COLOURS)]
    return _ROLE_COLOURS.get(role, "olive")


def _memory(recorded: Recorded, roles: Sequence[str], end: float) -> Panel:
    own = line_of(recorded, recorded.of("memory"), "memory", "ink", "bold", scale=_GB)
    for role in roles:
        rss = recorded.of("rss", role)
        own += line_of(recorded, rss, f"{role} RSS", _role_colour(role), "thin", scale=_GB)
    shared = recorded.of("shm_used", "shm")
    around = line_of(recorded, shared, "/dev/shm", "olive", "thin", scale=_GB)
    limit = recorded.of("cgroup_memory_limit", "cgroup")
    detail = ""
    if len(limit):
        lowest = float(limit.value.min())
        charged = recorded.of("cgroup_memory", "cgroup")
        around += line_of(recorded, charged, "cgroup memory", "sky", "thin", scale=_GB)
        around.append(level("limit", lowest * _GB, end))
        detail = f"limit {bytes_text(lowest)}"
    return Panel("Memory", "GB", with_surroundings(own, around), detail)


def _transfers(recorded: Recorded) -> Panel:
    received, sent = network(recorded, "net_received"), network(recorded, "net_sent")
    # What the page cache serves is a transfer too, but one that dwarfs those of the disk.
    calls = line_of(
        recorded, recorded.of("read_calls"), "read by calls", "grey", "dashed", scale=_MB
    )
    lines = [
        *line_of(recorded, recorded.of("read"), "disk read", "blue", "thin", scale=_MB),
        *line_of(recorded, recorded.of("write"), "disk written", "orange", "thin", scale=_MB),
        *line_of(recorded, received, "network in", "green", "thin", scale=_MB),
        *line_of(recorded, sent, "network out", "purple", "thin", scale=_MB),
        *hidden(calls),
    ]
    return Panel("Transfers", "MB/s", tuple(lines))


def _cpu(recorded: Recorded, roles: Sequence[str], end: float) -> Panel:
    own = line_of(recorded, recorded.of("cpu"), "all processes", "ink", "bold")
    for role in roles:
        own += line_of(recorded, recorded.of("cpu", role), role, _role_colour(role), "thin")
    around = line_of(recorded, recorded.of("host_cpu", "host"), "host", "grey", "dashed")
    allowed = recorded.cpu_allowed
    if allowed and own:
        around.append(level("allowed", allowed, end))
    detail = f"on the right % of the {allowed_text(allowed)} allowed" if allowed else ""
    return Panel("CPU use", "cores", with_surroundings(own, around), detail, allowed)


def _thinned(line: Line, end: float) -> Line:
    """Fewer points; the range of each only for what is looked at first, to keep the page small."""
    points = drawn_points(line.x, line.y, end)
    thinned = replace(line, x=points.x, y=points.y)
    if line.style == "dashed" or not line.shown:
        return thinned
    return replace(thinned, low=points.low, high=points.high)
