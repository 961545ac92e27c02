"""The content of the live view, from the last seconds of a run. `screen` draws it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.progress import LiveThroughput, ReportedProgress
from stepscope.analysis.run.series import SeriesTable
from stepscope.metrics import BY_KEY
from stepscope.records import ExitStatus, Gpu
from stepscope.records.codec import to_json
from stepscope.report.kit.format import (
    allowed_text,
    bytes_text,
    count_text,
    is_known,
    plural,
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
    prioritized,
    trace,
)
from stepscope.report.run.panels import network, roles_in_order
from stepscope.runs.tracking import tracking_text

_OVERHEAD_S = 10.0  # the monitoring overhead is a mean over this time
_THROTTLING = ("gpu_throttled_power", "gpu_throttled_thermal", "gpu_throttled_other")
_THROTTLING_S = 10.0  # throttling is a mean over this time


@dataclass(frozen=True)
class Frame:
    """A run at one moment. Texts are unescaped."""

    name: str
    command: str
    exit_status: ExitStatus
    outcome: str
    tone: Tone
    seconds: float
    progress: ReportedProgress
    throughput: LiveThroughput
    allocators: SeriesTable  # GPU memory as reported by PyTorch
    hint: str  # the hook message, which explains missing epochs
    monitor: float | None  # cores used by the monitor
    end_ns: int  # right edge of the sparklines
    run: Block
    gpus: tuple[Block, ...]


def frame_of(
    data: RunData,
    allocators: SeriesTable,
    progress: ReportedProgress,
    throughput: LiveThroughput,
    now_ns: int,
) -> Frame:
    """Return the content for a screen of any size."""
    data = replace(data, series={**data.series, **allocators})
    facts, exit_status = data.facts, data.exit_status
    assert exit_status is not None
    label, tone = OUTCOMES[exit_status.outcome]
    return Frame(
        name=facts.name,
        command=shlex.join(facts.command),
        exit_status=exit_status,
        outcome=label,
        tone=tone,
        seconds=max(0.0, (now_ns - data.begin_ns) / 1e9),
        progress=progress,
        throughput=throughput,
        allocators=allocators,
        hint=tracking_text(facts.hook),
        monitor=mean(data.of("monitor_cpu", "monitor"), _OVERHEAD_S),
        end_ns=data.end_ns,
        run=Block("", "", prioritized(_run_rows(data))),
        gpus=_gpu_blocks(data),
    )


def frame_dict(frame: Frame) -> dict[str, Any]:
    """Return the frame as JSON."""
    epoch = frame.progress.epoch
    rows = [row for block in (frame.run, *frame.gpus) for row in block.rows]
    readings = [(t.metric, t.entity, t.now, t.full_scale) for row in rows for t in row.traces]
    readings += [(*key, last(series), None) for key, series in frame.allocators.items()]
    return {
        "format": 1,  # schema version
        "name": frame.name,  # name of the run
        "command": frame.command,  # the monitored command
        "outcome": frame.exit_status.outcome.value,
        "reason": frame.exit_status.reason,
        "seconds": frame.seconds,  # seconds since the start of the run
        "epoch": to_json(epoch),  # current epoch; null if unknown
        "steps": frame.progress.steps,  # optimizer steps so far
        **to_json(frame.throughput),
        "monitor_cores": frame.monitor,  # CPU usage of the monitor, in cores
        "readings": [  # one object per metric and entity
            {
                "metric": metric,  # key of the metric
                "entity": entity,  # role, process, cgroup, network namespace or GPU
                "unit": BY_KEY[metric].unit,  # unit of the metric
                "now": now,  # latest value
                "full_scale": full_scale,  # upper end of the scale; null if there is none
            }
            for metric, entity, now, full_scale in readings
        ],
    }


def _run_rows(data: RunData) -> Iterator[Row]:
    """Yield the rows of the run, then those of the machine."""
    since = data.end_ns - SECONDS_BACK * 10**9
    roles = [role for role in roles_in_order(data) if (data.of("cpu", role).t > since).any()]
    parts = list(enumerate(roles)) if len(roles) > 1 else []
    allowed = data.cpu_allowed
    cpu = trace(data, "cpu", "tree", full_scale=allowed, detail=_of_cores(allowed))
    yield Row("CPU", (cpu,), 0)
    for position, role in parts:
        cpu = trace(data, "cpu", role, full_scale=allowed)
        yield Row(role, (cpu,), ESSENTIAL + position, indented=True)
    # RSS counts shared memory once per process. PSS does not, but is read rarely.
    pss = last(data.of("pss"))
    detail = "" if pss is None else f"PSS {bytes_text(pss)}"
    yield Row("memory RSS", (trace(data, "rss", "tree", detail=detail),), 1)
    for position, role in parts:
        yield Row(role, (trace(data, "rss", role),), DETAILS + 20 + position, indented=True)
    limit = last(data.of("cgroup_memory_limit", "cgroup"))
    if limit:
        cgroup = trace(data, "cgroup_memory", "cgroup", full_scale=limit, detail=_of_bytes(limit))
        yield Row("cgroup", (cgroup,), 2)
    read = trace(data, "read", "tree", name="read")
    yield Row("disk", (read, trace(data, "write", "tree", name="write")), 10)
    directions = (("net_received", "in"), ("net_sent", "out"))
    both = [trace(data, m, "net", name=n, series=network(data, m)) for m, n in directions]
    yield Row("network", tuple(both), 12)
    machine, shm_size = data.facts.environment, last(data.of("shm_size", "shm"))
    cores, total = machine.cpu.logical, machine.memory.total_bytes
    host_rows = (
        ("host CPU", "host_cpu", "host", cores, _of_cores(cores)),
        ("host memory", "host_memory", "host", total, _of_bytes(total)),
        ("/dev/shm", "shm_used", "shm", shm_size, _of_bytes(shm_size)),
        ("page cache", "page_cache", "host", total, _of_bytes(total)),
    )
    for position, (label, metric, entity, full_scale, detail) in enumerate(host_rows):
        measured = trace(data, metric, entity, full_scale=full_scale, detail=detail)
        yield Row(label, (measured,), DETAILS + position)


def _of_cores(cores: float | None) -> str:
    return f"of {allowed_text(cores)} cores" if cores else "cores"


def _of_bytes(total: float | None) -> str:
    return f"of {bytes_text(total)}" if total else ""


def _gpu_blocks(data: RunData) -> tuple[Block, ...]:
    """Return a block for each GPU with samples, those that the run uses first."""
    read = [each.gpu for each in data.all_gpus if each.series]
    used = {each.gpu.uuid for each in data.used_gpus} or {gpu.uuid for gpu in read}
    blocks = [_gpu_block(data, gpu, gpu.uuid in used) for gpu in read]
    return tuple(sorted(blocks, key=lambda block: not block.used))


def _gpu_block(data: RunData, gpu: Gpu, used: bool) -> Block:
    def of(metric: str, full: float | None = None, detail: str = "", name: str = "") -> LiveTrace:
        return trace(data, metric, gpu.uuid, full_scale=full, detail=detail, name=name)

    limit = gpu.power_limit_watts
    details = [f"of {bytes_text(gpu.memory_bytes)}"] if gpu.memory_bytes else []
    own = of("gpu_memory_run")
    if is_known(own.now):
        about = "~" if "gpu_memory_run" in data.facts.sensors.estimated else ""
        details.append(f"run {about}{own.text}")
    sm, utilization = of("gpu_sm", 1.0), of("gpu_utilization", 1.0)
    memory = of("gpu_memory", gpu.memory_bytes, ", ".join(details))
    power = of("gpu_power", limit, f"of {value_text(limit, 'W')}" if limit else "")
    rows = [
        Row("SM activity", (sm,), 3),
        Row("tensor", (of("gpu_tensor", 1.0),), 6),
        Row("DRAM", (of("gpu_dram", 1.0),), 7),
        Row("utilization", (utilization,), 5),
        Row("memory", (memory,), 4),
        Row("power", (power,), 8),
        Row("PCIe", (of("gpu_pcie_received", name="in"), of("gpu_pcie_sent", name="out")), 9),
    ]
    keys = ("allocated", "allocated_peak", "reserved", "alloc_retries", "alloc_ooms")
    allocated, peak, reserved, retries, ooms = (last(data.of(f"gpu_{k}", gpu.uuid)) for k in keys)
    if reserved is not None:  # PyTorch reported its memory
        parts = [f"{bytes_text(allocated)} allocated", f"peak {bytes_text(peak)}"]
        parts.append(f"{bytes_text(reserved)} reserved")
        if retries:
            parts.append(f"{count_text(retries)} {plural(retries, 'retry', 'retries')}")
        if ooms:
            parts.append(f"{count_text(ooms)} failed")
        rows.append(Row("allocator", (), 11, ", ".join(parts)))
    links = of("gpu_nvlink_received", name="in"), of("gpu_nvlink_sent", name="out")
    if any(link.series.value.any() for link in links):
        rows.append(Row("NVLink", links, DETAILS + 5))
    rows.append(Row("SM clock", (of("gpu_sm_clock"),), DETAILS + 6))
    # Metrics that a GPU does not support, such as SM activity before Hopper, have no row.
    shown = [row for row in rows if not row.traces or any(len(t.series) for t in row.traces)]
    temperature = of("gpu_temperature")
    shares = {m: mean(data.of(m, gpu.uuid), _THROTTLING_S) for m in _THROTTLING}
    throttling = [f"{BY_KEY[m].label} {share_text(share)}" for m, share in shares.items() if share]
    status = [temperature.text, *throttling] if is_known(temperature.now) else throttling
    activity = sm if len(sm.series) else utilization
    label = "SM" if activity is sm else "util"
    values = [f"{label} {activity.text:>5}", f"{memory.text:>8}", f"{power.text:>5}"]
    short_name, priority = gpu.label.replace(" slice ", "/"), 3 if used else DETAILS - 1
    return Block(
        title=f"{gpu.label}  {gpu.model}".rstrip(),
        detail=", ".join(status),
        rows=tuple(shown),
        brief=Row(short_name, (activity,), priority, "  ".join([*values, *status])),
        used=used,
        throttled=bool(throttling),
    )
