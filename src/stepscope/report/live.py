"""What the live view shows, made from the last seconds of a run; `livescreen` only draws it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stepscope.analysis.summary import Recorded
from stepscope.metrics import BY_KEY
from stepscope.records import Ending
from stepscope.report.format import allowed_text, bytes_text
from stepscope.report.livegpus import gpu_blocks
from stepscope.report.outcomes import OUTCOMES, Tone
from stepscope.report.panels import network, roles_in_order
from stepscope.report.progress import Pace, Told
from stepscope.report.traces import (
    DETAILS,
    ESSENTIAL,
    SECONDS_BACK,
    Block,
    Row,
    last,
    mean,
    ranked,
    trace,
)

_COST_S = 10.0
"""What watching costs is a mean over so many seconds."""


@dataclass(frozen=True)
class Frame:
    """A run at one moment. Texts are as they were recorded: whoever draws makes them safe."""

    name: str
    command: str
    ending: Ending
    outcome: str
    tone: Tone
    seconds: float
    told: Told
    pace: Pace
    hint: str
    """What is known of the hook: it tells why there may be no epochs."""
    watcher: float | None
    """Cores that watching costs."""
    end_ns: int
    """The right edge of the sparklines."""
    run: Block
    gpus: tuple[Block, ...]


def frame_of(
    facts: Mapping[str, Any],
    ending: Ending,
    recorded: Recorded,
    told: Told,
    pace: Pace,
    now_ns: int,
) -> Frame:
    """All that can be shown, whatever the size of the screen."""
    recorded = replace(recorded, series={**recorded.series, **told.allocators})
    label, tone = OUTCOMES[ending.outcome]
    return Frame(
        name=str(facts.get("name", "")),
        command=shlex.join(str(word) for word in facts.get("command") or []),
        ending=ending,
        outcome=label,
        tone=tone,
        seconds=max(0.0, (now_ns - recorded.begin_ns) / 1e9),
        told=told,
        pace=pace,
        hint=str((facts.get("hook") or {}).get("message") or ""),
        watcher=mean(recorded.of("watcher_cpu", "watcher"), _COST_S),
        end_ns=recorded.end_ns,
        run=Block("", "", ranked(_run_rows(recorded, facts))),
        gpus=gpu_blocks(recorded, facts),
    )


def frame_dict(frame: Frame) -> dict[str, Any]:
    """The frame for programs: what can be shown, as numbers."""
    epoch = frame.told.epoch
    rows = [row for block in (frame.run, *frame.gpus) for row in block.rows]
    readings = [(t.metric, t.entity, t.now, t.whole) for row in rows for t in row.traces]
    readings += [(*key, last(series), None) for key, series in frame.told.allocators.items()]
    return {
        "format": 1,
        "name": frame.name,
        "command": frame.command,
        "outcome": frame.ending.outcome.value,
        "reason": frame.ending.reason,
        "seconds": frame.seconds,
        "epoch": None if epoch is None else vars(epoch),
        "steps": frame.told.steps,
        **vars(frame.pace),
        "watcher_cores": frame.watcher,
        "readings": [
            {"metric": key, "entity": entity, "unit": BY_KEY[key].unit, "now": now, "of": whole}
            for key, entity, now, whole in readings
        ],
    }


def _run_rows(recorded: Recorded, facts: Mapping[str, Any]) -> Iterator[Row]:
    """What the processes use, and the machine where there is room for it."""
    allowed, roles = recorded.cpu_allowed, _roles(recorded)
    cpu = trace(recorded, "cpu", "tree", whole=allowed, detail=_of_cores(allowed))
    yield Row("CPU", (cpu,), 0)
    for place, role in enumerate(roles):
        yield Row(
            role, (trace(recorded, "cpu", role, whole=allowed),), ESSENTIAL + place, part=True
        )
    yield Row("RSS", (trace(recorded, "rss", "tree", detail=_unshared(recorded)),), 1)
    for place, role in enumerate(roles):
        yield Row(role, (trace(recorded, "rss", role),), DETAILS + 20 + place, part=True)
    limit = last(recorded.of("cgroup_memory_limit", "cgroup"))
    if limit:
        detail = _of_bytes(limit)
        yield Row(
            "cgroup", (trace(recorded, "cgroup_memory", "cgroup", whole=limit, detail=detail),), 2
        )
    read = trace(recorded, "read", "tree", name="read")
    yield Row("disk", (read, trace(recorded, "write", "tree", name="written")), 10)
    ways = (("net_received", "in"), ("net_sent", "out"))
    both = [trace(recorded, m, "net", name=n, series=network(recorded, m)) for m, n in ways]
    yield Row("network", tuple(both), 12)
    yield from _machine_rows(recorded, facts.get("environment") or {})


def _machine_rows(recorded: Recorded, machine: Mapping[str, Any]) -> Iterator[Row]:
    cores = (machine.get("cpu") or {}).get("logical")
    total = (machine.get("memory") or {}).get("total_bytes")
    shared = last(recorded.of("shm_size", "shm"))
    for place, (label, metric, entity, whole, detail) in enumerate(
        (
            ("host CPU", "host_cpu", "host", cores, _of_cores(cores)),
            ("host memory", "host_memory", "host", total, _of_bytes(total)),
            ("/dev/shm", "shm_used", "shm", shared, _of_bytes(shared)),
            ("page cache", "page_cache", "host", total, _of_bytes(total)),
        )
    ):
        yield Row(
            label, (trace(recorded, metric, entity, whole=whole, detail=detail),), DETAILS + place
        )


def _roles(recorded: Recorded) -> list[str]:
    """The parts of the tree that are in sight; none where it is all one role."""
    since = recorded.end_ns - SECONDS_BACK * 10**9
    roles = [r for r in roles_in_order(recorded) if (recorded.of("cpu", r).t > since).any()]
    return roles if len(roles) > 1 else []


def _unshared(recorded: Recorded) -> str:
    """RSS counts what is shared once for each process; PSS, which is read seldom, does not."""
    pss = last(recorded.of("pss"))
    return "" if pss is None else f"PSS {bytes_text(pss)}"


def _of_cores(cores: float | None) -> str:
    return f"of {allowed_text(cores)} cores" if cores else "cores"


def _of_bytes(whole: float | None) -> str:
    return f"of {bytes_text(whole)}" if whole else ""
