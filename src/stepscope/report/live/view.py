"""What the live view shows, made from the last seconds of a run; `screen` only draws it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.progress import LiveThroughput, ReportedProgress
from stepscope.analysis.run.series import SeriesTable
from stepscope.metrics import BY_KEY
from stepscope.records import Ending, Gpu
from stepscope.records.codec import to_json
from stepscope.report.kit.format import (
    allowed_text,
    bytes_text,
    count_text,
    is_known,
    share_text,
    value_text,
)
from stepscope.report.kit.outcomes import OUTCOMES, Tone
from stepscope.report.live.traces import (
    DETAILS,
    ESSENTIAL,
    SECONDS_BACK,
    Block,
    LiveTrace,
    Row,
    last,
    mean,
    ranked,
    trace,
)
from stepscope.report.run.panels import network, roles_in_order

_COST_S = 10.0  # what watching costs is a mean over so many seconds
_SLOWED = ("gpu_slowed_power", "gpu_slowed_heat", "gpu_slowed_other")
_SLOWED_S = 10.0  # whether something held a GPU back is told over so many seconds


@dataclass(frozen=True)
class Frame:
    """A run at one moment. Texts are as they were recorded: whoever draws makes them safe."""

    name: str
    command: str
    ending: Ending
    outcome: str
    tone: Tone
    seconds: float
    progress: ReportedProgress
    throughput: LiveThroughput
    allocators: SeriesTable  # what PyTorch said of its GPU memory
    hint: str  # what is known of the hook: it tells why there may be no epochs
    watcher: float | None  # cores that watching costs
    end_ns: int  # the right edge of the sparklines
    run: Block
    gpus: tuple[Block, ...]


def frame_of(
    data: RunData,
    allocators: SeriesTable,
    progress: ReportedProgress,
    throughput: LiveThroughput,
    now_ns: int,
) -> Frame:
    """All that can be shown, whatever the size of the screen."""
    data = replace(data, series={**data.series, **allocators})
    facts, ending = data.facts, data.ending
    assert ending is not None
    label, tone = OUTCOMES[ending.outcome]
    return Frame(
        name=facts.name,
        command=shlex.join(facts.command),
        ending=ending,
        outcome=label,
        tone=tone,
        seconds=max(0.0, (now_ns - data.begin_ns) / 1e9),
        progress=progress,
        throughput=throughput,
        allocators=allocators,
        hint=facts.hook.message,
        watcher=mean(data.of("watcher_cpu", "watcher"), _COST_S),
        end_ns=data.end_ns,
        run=Block("", "", ranked(_run_rows(data))),
        gpus=_gpu_blocks(data),
    )


def frame_dict(frame: Frame) -> dict[str, Any]:
    """The frame for programs: what can be shown, as numbers."""
    epoch = frame.progress.epoch
    rows = [row for block in (frame.run, *frame.gpus) for row in block.rows]
    readings = [(t.metric, t.entity, t.now, t.whole) for row in rows for t in row.traces]
    readings += [(*key, last(series), None) for key, series in frame.allocators.items()]
    return {
        "format": 1,
        "name": frame.name,
        "command": frame.command,
        "outcome": frame.ending.outcome.value,
        "reason": frame.ending.reason,
        "seconds": frame.seconds,
        "epoch": to_json(epoch),
        "steps": frame.progress.steps,
        **to_json(frame.throughput),
        "watcher_cores": frame.watcher,
        "readings": [
            {"metric": key, "entity": entity, "unit": BY_KEY[key].unit, "now": now, "of": whole}
            for key, entity, now, whole in readings
        ],
    }


def _run_rows(data: RunData) -> Iterator[Row]:
    """What the processes use, and the machine where there is room for it."""
    since = data.end_ns - SECONDS_BACK * 10**9
    roles = [role for role in roles_in_order(data) if (data.of("cpu", role).t > since).any()]
    parts = list(enumerate(roles)) if len(roles) > 1 else []
    allowed = data.cpu_allowed
    cpu = trace(data, "cpu", "tree", whole=allowed, detail=_of_cores(allowed))
    yield Row("CPU", (cpu,), 0)
    for place, role in parts:
        yield Row(role, (trace(data, "cpu", role, whole=allowed),), ESSENTIAL + place, part=True)
    # RSS counts what is shared once for each process; PSS, which is read seldom, does not.
    pss = last(data.of("pss"))
    unshared = "" if pss is None else f"PSS {bytes_text(pss)}"
    yield Row("RSS", (trace(data, "rss", "tree", detail=unshared),), 1)
    for place, role in parts:
        yield Row(role, (trace(data, "rss", role),), DETAILS + 20 + place, part=True)
    limit = last(data.of("cgroup_memory_limit", "cgroup"))
    if limit:
        charged = trace(data, "cgroup_memory", "cgroup", whole=limit, detail=_of_bytes(limit))
        yield Row("cgroup", (charged,), 2)
    read = trace(data, "read", "tree", name="read")
    yield Row("disk", (read, trace(data, "write", "tree", name="written")), 10)
    ways = (("net_received", "in"), ("net_sent", "out"))
    both = [trace(data, m, "net", name=n, series=network(data, m)) for m, n in ways]
    yield Row("network", tuple(both), 12)
    machine, shared = data.facts.environment, last(data.of("shm_size", "shm"))
    cores, total = machine.cpu.logical, machine.memory.total_bytes
    around = (
        ("host CPU", "host_cpu", "host", cores, _of_cores(cores)),
        ("host memory", "host_memory", "host", total, _of_bytes(total)),
        ("/dev/shm", "shm_used", "shm", shared, _of_bytes(shared)),
        ("page cache", "page_cache", "host", total, _of_bytes(total)),
    )
    for place, (label, metric, entity, whole, detail) in enumerate(around):
        measured = trace(data, metric, entity, whole=whole, detail=detail)
        yield Row(label, (measured,), DETAILS + place)


def _of_cores(cores: float | None) -> str:
    return f"of {allowed_text(cores)} cores" if cores else "cores"


def _of_bytes(whole: float | None) -> str:
    return f"of {bytes_text(whole)}" if whole else ""


def _gpu_blocks(data: RunData) -> tuple[Block, ...]:
    """A block for every GPU of which anything was read, those that the run uses first."""
    read = [each.gpu for each in data.all_gpus if each.series]
    used = {each.gpu.uuid for each in data.used_gpus} or {gpu.uuid for gpu in read}
    blocks = [_gpu_block(data, gpu, gpu.uuid in used) for gpu in read]
    return tuple(sorted(blocks, key=lambda block: not block.used))


def _gpu_block(data: RunData, gpu: Gpu, used: bool) -> Block:
    def of(metric: str, whole: float | None = None, detail: str = "", name: str = "") -> LiveTrace:
        return trace(data, metric, gpu.uuid, whole=whole, detail=detail, name=name)

    limit = gpu.power_limit_watts
    of_total = [f"of {bytes_text(gpu.memory_bytes)}"] if gpu.memory_bytes else []
    own = of("gpu_memory_tree")
    if is_known(own.now):
        about = "~" if "gpu_memory_tree" in data.facts.sensors.estimated else ""
        of_total.append(f"run {about}{own.text}")
    sm, utilisation = of("gpu_sm", 1.0), of("gpu_utilization", 1.0)
    memory = of("gpu_memory", gpu.memory_bytes, ", ".join(of_total))
    power = of("gpu_power", limit, f"of {value_text(limit, 'W')}" if limit else "")
    rows = [
        Row("SM activity", (sm,), 3),
        Row("tensor", (of("gpu_tensor", 1.0),), 6),
        Row("DRAM", (of("gpu_dram", 1.0),), 7),
        Row("utilisation", (utilisation,), 5),
        Row("memory", (memory,), 4),
        Row("power", (power,), 8),
        Row("PCIe", (of("gpu_pcie_received", name="to"), of("gpu_pcie_sent", name="from")), 9),
    ]
    known = ("allocated", "allocated_peak", "reserved", "alloc_retries", "alloc_ooms")
    tensors, peak, reserved, retries, failed = (last(data.of(f"gpu_{m}", gpu.uuid)) for m in known)
    if reserved is not None:  # PyTorch told of its memory
        parts = [f"{bytes_text(tensors)} in tensors", f"peak {bytes_text(peak)}"]
        parts.append(f"{bytes_text(reserved)} reserved")
        if retries:
            parts.append(f"{count_text(retries)} retries")
        if failed:
            parts.append(f"{count_text(failed)} failed")
        rows.append(Row("allocator", (), 11, ", ".join(parts)))
    links = of("gpu_nvlink_received", name="to"), of("gpu_nvlink_sent", name="from")
    if any(link.series.value.any() for link in links):
        rows.append(Row("NVLink", links, DETAILS + 5))
    rows.append(Row("SM clock", (of("gpu_sm_clock"),), DETAILS + 6))
    # A GPU before Hopper tells no SM activity: what it does not tell at all has no row.
    shown = [row for row in rows if not row.traces or any(len(t.series) for t in row.traces)]
    heat = of("gpu_temperature")
    held_back = {m: mean(data.of(m, gpu.uuid), _SLOWED_S) for m in _SLOWED}
    slowed = [f"{BY_KEY[m].label} {share_text(part)}" for m, part in held_back.items() if part]
    remarks = [heat.text, *slowed] if is_known(heat.now) else slowed
    busy = sm if len(sm.series) else utilisation
    word = "SM" if busy is sm else "utilised"
    brief = "  ".join([f"{word} {busy.text:>5}", f"{memory.text:>7}", f"{power.text:>5}", *remarks])
    short_name, rank = gpu.label.replace(" slice ", "/"), 3 if used else DETAILS - 1
    return Block(
        title=f"{gpu.label}  {gpu.model}".rstrip(),
        remark=", ".join(remarks),
        rows=tuple(shown),
        brief=Row(short_name, (busy,), rank, brief),
        used=used,
        slowed=bool(slowed),
    )
