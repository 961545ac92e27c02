"""GPUs in the live view: a block of rows each, or one row each where there are many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stepscope.analysis.summary import Recorded
from stepscope.metrics import BY_KEY
from stepscope.records import Gpu
from stepscope.report.format import bytes_text, count_text, is_known, share_text, value_text
from stepscope.report.traces import DETAILS, Block, Row, Trace, last, mean, ranked, trace

_SLOWED_S = 10.0
"""Whether something held a GPU back is told over so many seconds."""


def gpu_blocks(recorded: Recorded, facts: Mapping[str, Any]) -> tuple[Block, ...]:
    """A block for every GPU of which anything was read, those that the run uses first."""
    estimated = (facts.get("sensors") or {}).get("estimated") or {}
    read = [each.gpu for each in recorded.all_gpus if each.series]
    used = {each.gpu.uuid for each in recorded.used_gpus} or {gpu.uuid for gpu in read}
    blocks = [_block(recorded, gpu, gpu.uuid in used, estimated) for gpu in read]
    return tuple(sorted(blocks, key=lambda block: not block.used))


def _block(recorded: Recorded, gpu: Gpu, used: bool, estimated: Mapping[str, str]) -> Block:
    def of(metric: str, whole: float | None = None, detail: str = "", name: str = "") -> Trace:
        return trace(recorded, metric, gpu.uuid, whole=whole, detail=detail, name=name)

    limit = gpu.power_limit_watts
    of_limit = f"of {value_text(limit, 'W')}" if limit else ""
    about = "~" if "gpu_memory_tree" in estimated else ""
    sm, utilisation = of("gpu_sm", 1.0), of("gpu_utilization", 1.0)
    memory = of("gpu_memory", gpu.memory_bytes, _of_total(gpu, of("gpu_memory_tree"), about))
    power = of("gpu_power", limit, of_limit)
    rows = [
        Row("SM activity", (sm,), 3),
        Row("tensor", (of("gpu_tensor", 1.0),), 6),
        Row("DRAM", (of("gpu_dram", 1.0),), 7),
        Row("utilisation", (utilisation,), 5),
        Row("memory", (memory,), 4),
        Row("power", (power,), 8),
        Row("PCIe", (of("gpu_pcie_received", name="to"), of("gpu_pcie_sent", name="from")), 9),
        *_allocator(recorded, gpu),
        *_links(of("gpu_nvlink_received", name="to"), of("gpu_nvlink_sent", name="from")),
        Row("SM clock", (of("gpu_sm_clock"),), DETAILS + 6),
    ]
    remarks = list(_remarks(recorded, gpu, of("gpu_temperature")))
    busy = sm if len(sm.series) else utilisation
    word = "SM" if busy is sm else "utilised"
    brief = [f"{word} {busy.text:>5}", f"{memory.text:>7}", f"{power.text:>5}", *remarks]
    return Block(
        f"{gpu.label}  {gpu.name}".rstrip(),
        ", ".join(remarks),
        ranked(row for row in rows if not row.traces or _is_told(row)),
        Row(
            gpu.label.replace(" slice ", "/"), (busy,), 3 if used else DETAILS - 1, "  ".join(brief)
        ),
        used,
    )


def _is_told(row: Row) -> bool:
    """Whether the GPU tells it at all: one before Hopper has no SM activity to show."""
    return any(len(trace.series) for trace in row.traces)


def _of_total(gpu: Gpu, own: Trace, about: str) -> str:
    parts = [f"of {bytes_text(gpu.memory_bytes)}"] if gpu.memory_bytes else []
    if is_known(own.now):
        parts.append(f"run {about}{own.text}")
    return ", ".join(parts)


def _allocator(recorded: Recorded, gpu: Gpu) -> Iterator[Row]:
    """What PyTorch last said of its memory; silent where it never did."""
    told = {
        metric: last(recorded.of(f"gpu_{metric}", gpu.uuid))
        for metric in ("allocated", "allocated_peak", "reserved", "alloc_retries", "alloc_ooms")
    }
    if told["reserved"] is None:
        return
    parts = [
        f"{bytes_text(told['allocated'])} in tensors",
        f"peak {bytes_text(told['allocated_peak'])}",
        f"{bytes_text(told['reserved'])} reserved",
    ]
    for metric, name in (("alloc_retries", "retries"), ("alloc_ooms", "failed")):
        if told[metric]:
            parts.append(f"{count_text(told[metric])} {name}")
    yield Row("allocator", (), 11, ", ".join(parts))


def _links(there: Trace, back: Trace) -> Iterator[Row]:
    """NVLink, where anything ever went over it."""
    if there.series.value.any() or back.series.value.any():
        yield Row("NVLink", (there, back), DETAILS + 5)


def _remarks(recorded: Recorded, gpu: Gpu, heat: Trace) -> Iterator[str]:
    """What deserves a word rather than a line."""
    if is_known(heat.now):
        yield heat.text
    for metric in ("gpu_slowed_power", "gpu_slowed_heat", "gpu_slowed_other"):
        slowed = mean(recorded.of(metric, gpu.uuid), _SLOWED_S)
        if slowed:
            yield f"{BY_KEY[metric].label} {share_text(slowed)}"
