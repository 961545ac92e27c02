"""GPUs in the live view: a block of rows each, or one row each where there are many."""

from __future__ import annotations

from collections.abc import Iterator

from stepscope.analysis.run.data import RunData
from stepscope.metrics import BY_KEY
from stepscope.records import Gpu
from stepscope.report.kit.format import (
    bytes_text,
    count_text,
    is_known,
    share_text,
    value_text,
)
from stepscope.report.live.traces import (
    DETAILS,
    Block,
    LiveTrace,
    Row,
    last,
    mean,
    ranked,
    trace,
)

_SLOWED_S = 10.0
"""Whether something held a GPU back is told over so many seconds."""


def gpu_blocks(data: RunData) -> tuple[Block, ...]:
    """A block for every GPU of which anything was read, those that the run uses first."""
    read = [each.gpu for each in data.all_gpus if each.series]
    used = {each.gpu.uuid for each in data.used_gpus} or {gpu.uuid for gpu in read}
    blocks = [_block(data, gpu, gpu.uuid in used) for gpu in read]
    return tuple(sorted(blocks, key=lambda block: not block.used))


def _block(data: RunData, gpu: Gpu, used: bool) -> Block:
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
        *_allocator(data, gpu),
        Row("SM clock", (of("gpu_sm_clock"),), DETAILS + 6),
    ]
    links = of("gpu_nvlink_received", name="to"), of("gpu_nvlink_sent", name="from")
    if any(link.series.value.any() for link in links):
        rows.insert(-1, Row("NVLink", links, DETAILS + 5))
    # A GPU before Hopper tells no SM activity: what it does not tell at all has no row.
    told = [row for row in rows if not row.traces or any(len(t.series) for t in row.traces)]
    heat = of("gpu_temperature")
    slowed = list(_slowed(data, gpu))
    remarks = [*([heat.text] if is_known(heat.now) else []), *slowed]
    busy = sm if len(sm.series) else utilisation
    word = "SM" if busy is sm else "utilised"
    brief = "  ".join([f"{word} {busy.text:>5}", f"{memory.text:>7}", f"{power.text:>5}", *remarks])
    short_name, rank = gpu.label.replace(" slice ", "/"), 3 if used else DETAILS - 1
    return Block(
        f"{gpu.label}  {gpu.model}".rstrip(),
        ", ".join(remarks),
        ranked(told),
        Row(short_name, (busy,), rank, brief),
        used,
        bool(slowed),
    )


def _allocator(data: RunData, gpu: Gpu) -> Iterator[Row]:
    """What PyTorch last said of its memory; silent where it never did."""
    told = {
        metric: last(data.of(f"gpu_{metric}", gpu.uuid))
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


def _slowed(data: RunData, gpu: Gpu) -> Iterator[str]:
    """What held the clocks down lately."""
    for metric in ("gpu_slowed_power", "gpu_slowed_heat", "gpu_slowed_other"):
        slowed = mean(data.of(metric, gpu.uuid), _SLOWED_S)
        if slowed:
            yield f"{BY_KEY[metric].label} {share_text(slowed)}"
