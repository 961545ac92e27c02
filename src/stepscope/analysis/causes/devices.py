"""GPUs: whether they are kept busy, and if so with what; if not, what keeps them waiting."""

from __future__ import annotations

import math

from stepscope.analysis.causes.account import Account
from stepscope.analysis.causes.case import Case, finding, number, pct
from stepscope.analysis.causes.thresholds import limit
from stepscope.records import Advice, Confidence, Evidence, Finding

_LAUNCHING = ("forward", "backward", "optimizer", "other")
_NO_COUNTERS = "this GPU does not tell what its units do (GPM needs Hopper or later)"


def device_findings(case: Case) -> list[Finding]:
    """What the GPUs are busy with, or what they wait for besides data."""
    account = case.lead
    if not case.on_gpu or account is None or case.device.busy is None:
        return []
    found = [_interference(case), _heat(case)]
    if is_bound(case):
        found += [_bound(case, account), _power(case)]
    else:
        found.append(_waits(case, account))
    return [each for each in found if each is not None]


def is_bound(case: Case) -> bool:
    """Whether it is the GPU that decides how long a step takes."""
    device = case.device
    ahead = device.ahead is not None and device.ahead >= limit("host_ahead")
    return ahead or (device.busy or 0.0) >= limit("gpu_busy")


def _ran(case: Case) -> Evidence | None:
    source = "GPM" if case.device.active is not None else "NVML"
    return number("kernels ran", case.device.busy, "share", "gpu_busy", source)


def _queued(case: Case) -> Evidence | None:
    return number("steps queued before the GPU began them", case.device.ahead, "share",
                  "host_ahead", "CUDA events")  # fmt: skip


def _interference(case: Case) -> Finding | None:
    others = case.device.others
    if others is None or others < limit("others_gpu"):
        return None
    busy_others = others >= limit("others_busy")
    ceiling = limit("takes_turns") if busy_others else 1.0 / (1.0 - others)
    return finding(
        "interference.gpu",
        f"Another process computes on the same GPU {pct(others)} of the time; the two take turns.",
        "high" if others >= 2 * limit("others_gpu") else "medium",
        "the driver samples which process's kernels run", ceiling,
        [
            number("kernels of other processes ran", others, "share", "others_gpu", "NVML"),
            _ran(case),
        ],
        [
            Advice("nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv",
                   "tells who it is: stop it, or set CUDA_VISIBLE_DEVICES to another GPU"),
            Advice("nvidia-smi -c EXCLUSIVE_PROCESS", "lets one process at a time on the GPU"),
        ],
    )  # fmt: skip


def _bound(case: Case, account: Account) -> Finding:
    device = case.device
    if device.sm is None:
        return _unknown_units(case)
    filled = device.sm / max(device.busy or 1.0, 1e-3)
    if device.dram is not None and device.dram >= limit("dram_bound"):
        return _bandwidth(case)
    if (device.fp32 or 0.0) >= limit("fp32_busy") and (device.tensor or 0.0) < limit("tensor_idle"):
        return _precision(case, account)
    if filled < limit("gpu_filled"):
        return _underfilled(case, account, filled)
    return _compute(case)


def _compute(case: Case) -> Finding:
    device = case.device
    return finding(
        "gpu.compute",
        f"The GPU is the limit, as it should be: kernels run {pct(device.busy)} of the time on "
        f"{pct(device.sm)} of its multiprocessors, tensor cores {pct(device.tensor)}.",
        "high", "the GPU's own counters, and the host is never late", None,
        [_ran(case), _queued(case),
         number("multiprocessors with work", device.sm, "share", "gpu_filled", "GPM"),
         number("tensor cores", device.tensor, "share", source="GPM"),
         number("memory bandwidth", device.dram, "share", "dram_bound", "GPM")],
        [Advice("model = torch.compile(model)", "what is left to gain is inside the kernels: "
                "fused, they move less memory")],
    )  # fmt: skip


def _bandwidth(case: Case) -> Finding:
    device = case.device
    return finding(
        "gpu.bandwidth",
        f"The GPU is the limit, by its memory bandwidth: {pct(device.dram)} of the peak, while "
        f"kernels run {pct(device.busy)} of the time.",
        "high", "the GPU's own counters, and the host is never late", None,
        [_ran(case), _queued(case),
         number("memory bandwidth", device.dram, "share", "dram_bound", "GPM"),
         number("tensor cores", device.tensor, "share", source="GPM")],
        [Advice("model = torch.compile(model)", "fused kernels read and write memory once instead "
                "of once for each operation"),
         Advice("torch.autocast('cuda', dtype=torch.bfloat16)", "half as many bytes")],
    )  # fmt: skip


def _precision(case: Case, account: Account) -> Finding:
    device = case.device
    share = min(1.0, (device.fp32 or 0.0) / limit("fp32_in_products"))
    left = 1.0 - share + share / limit("tf32_gain")
    precision = account.trainer.settings.get("matmul_precision")
    return finding(
        "gpu.precision",
        f"The GPU computes in float32 on its ordinary units ({pct(device.fp32)} busy) while the "
        f"tensor cores are idle ({pct(device.tensor)}).",
        "high", "the GPU's own counters", 1.0 / left,
        [number("float32 units busy", device.fp32, "share", "fp32_busy", "GPM"),
         number("tensor cores", device.tensor, "share", "tensor_idle", "GPM"), _ran(case)],
        [
            Advice('torch.set_float32_matmul_precision("high")',
                   "TF32 on the tensor cores; 10 bits of mantissa in products"
                   + (f', now it is "{precision}"' if precision else "")),
            Advice("with torch.autocast('cuda', dtype=torch.bfloat16):",
                   "around the forward pass and the loss: twice the rate of TF32, half the memory"),
        ],
    )  # fmt: skip


def _underfilled(case: Case, account: Account, filled: float) -> Finding:
    device, batch = case.device, account.batch_size
    times = _room(1.0 / max(filled, 0.01))
    return finding(
        "gpu.underfilled",
        f"Kernels run {pct(device.busy)} of the time, but only on {pct(filled)} of the "
        "multiprocessors: there is too little to do at once.",
        "medium", "how far a larger batch fills them depends on the model", 1.0 / max(filled, 0.01),
        [number("multiprocessors with work, while kernels run", filled, "share", "gpu_filled",
                "GPM"), _ran(case)],
        [_batch_advice(account, batch, times)],
    )  # fmt: skip


def _unknown_units(case: Case) -> Finding:
    device = case.device
    return finding(
        "gpu.compute",
        f"The GPU is the limit: something ran on it {pct(device.busy)} of the time.",
        "low" if device.ahead is None else "medium", _NO_COUNTERS, None,
        [_ran(case), _queued(case)],
        [Advice("model = torch.compile(model)", "fewer and larger kernels")],
    )  # fmt: skip


def _waits(case: Case, account: Account) -> Finding | None:
    """The GPU is idle for a part of the time: for what, besides data?"""
    busy = case.device.busy or 0.0
    idle = 1.0 - busy
    copies, syncs = account.share("copy"), account.share("sync")
    moved = case.device.received or 0.0
    part = limit("explains_idle") * idle
    if copies >= max(limit("copy_share"), part) and moved >= limit("copy_rate"):
        return _transfer(case, account, copies)
    if syncs >= max(limit("sync_share"), part):
        return _sync(case, account, syncs)
    return _launch(case, account)


def _transfer(case: Case, account: Account, copies: float) -> Finding:
    device, loader, spent = case.device, account.loader, account.spent["copy"]
    pinned = bool(loader and loader.pins)
    left = max(device.busy or 0.0, 1.0 - copies)
    return finding(
        "transfer",
        f"The GPU waits {pct(1 - (device.busy or 0))} of the time, most of it for batches to be "
        f"copied: {(device.received or 0) * account.step_seconds / 1e6:.0f} MB a step"
        f"{'' if pinned else ' from memory that is not pinned'}.",
        "high", "stack samples of the training thread, and bytes over PCIe", 1.0 / max(left, 0.01),
        [
            number("copying to the GPU", copies, "share", "copy_share", "stack samples"),
            number("over PCIe to the GPU", device.received, "bytes/s", "copy_rate", "GPM"),
            _ran(case),
        ],
        [
            None if pinned else Advice(
                "pin_memory=True", "copies from pinned memory need no second copy and do not block",
                loader.where if loader else None, loader.line if loader else None),
            Advice(".to(device, non_blocking=True), one batch ahead on a stream of its own",
                   "the copy then runs beside the computation", spent.where, spent.line),
            Advice("copy uint8 or bfloat16 and convert on the GPU", "a quarter or half of the "
                   "bytes"),
        ],
    )  # fmt: skip


def _sync(case: Case, account: Account, syncs: float) -> Finding:
    device, spent = case.device, account.spent["sync"]
    left = max(device.busy or 0.0, 1.0 - syncs)
    where = f" at {spent.where}" if spent.where else ""
    return finding(
        "sync",
        f"The GPU waits {pct(1 - (device.busy or 0))} of the time for a host that waits for it: "
        f"{pct(syncs)} of the training thread's time goes to reading results back{where}.",
        "high", "stack samples of the training thread, and the host is never ahead of the GPU",
        1.0 / max(left, 0.01),
        [
            number("reading results back", syncs, "share", "sync_share", "stack samples"),
            _queued(case), _ran(case),
        ],
        [Advice("add it up on the GPU (total += loss.detach()) and read it every 100 steps",
                "each .item(), .cpu(), print of a tensor waits until the GPU has done all its work",
                spent.where, spent.line)],
    )  # fmt: skip


def _launch(case: Case, account: Account) -> Finding | None:
    """Within its own span of the step the GPU is idle: the host cannot launch fast enough."""
    device = case.device
    if device.span is None or not account.step_seconds:
        share, inside = 1.0, device.busy or 0.0
    else:
        share = min(1.0, device.span / account.step_seconds)
        inside = min(1.0, (device.busy or 0.0) / max(share, 1e-3))
    starved = (case.cores.wait_main or 0.0) >= limit("idle_cores") / 2
    if inside >= limit("gpu_busy") or starved:
        return None
    batch = account.batch_size
    if (
        batch is not None
        and batch <= limit("small_batch")
        and (device.sm or 0.0) < limit("gpu_filled")
    ):
        return _small_batch(case, account, batch)
    left = 1.0 - share * (1.0 - max(inside - limit("launch_overhead") / max(share, 1e-3), 0.02))
    confidence: Confidence = "high" if inside < limit("gpu_filled") else "medium"
    if account.share(*_LAUNCHING) < limit("most_of_it"):
        confidence = "low"
    return finding(
        "launch",
        f"The GPU waits {pct(1 - inside)} of each step for kernels to be launched: the host takes "
        f"{(device.queueing or account.rest) * 1e3:.0f} ms to queue a step that the GPU could do "
        f"in {inside * (device.span or account.rest) * 1e3:.0f} ms.",
        confidence, "CUDA events around steps, and the GPU's own counters", 1.0 / left,
        [
            number("of the step, kernels ran", inside, "share", "gpu_busy", "GPM"), _queued(case),
            number("queueing a step", device.queueing, "s", source="CUDA events"),
            number("training thread launching", account.share(*_LAUNCHING), "share", "most_of_it",
                   "stack samples"),
        ],
        [
            Advice('model = torch.compile(model, mode="reduce-overhead")',
                   "fuses small kernels and replays a step as one CUDA graph"),
            Advice("torch.cuda.make_graphed_callables(model, sample_args)",
                   "where shapes never change"),
            None if account.trainer.settings.get("fused") else Advice(
                "torch.optim.…(params, fused=True)", "one launch instead of one per parameter"),
        ],
    )  # fmt: skip


def _small_batch(case: Case, account: Account, batch: int) -> Finding:
    device = case.device
    times = min(_room(1.0 / max(device.sm or 0.01, 0.002)), int(limit("safe_growth")))
    return finding(
        "batch.small",
        f"A batch of {batch} does not fill the GPU: {pct(device.sm)} of its multiprocessors have "
        f"work, and a step takes {account.step_seconds * 1e3:.0f} ms at any size.",
        "high", "the GPU's own counters, and the host is never ahead of the GPU", float(times),
        [
            number("samples in a batch", batch, "count", "small_batch", "loader"),
            number("multiprocessors with work", device.sm, "share", "gpu_filled", "GPM"),
            _ran(case), _queued(case),
        ],
        [_batch_advice(account, batch, times)],
    )  # fmt: skip


def _room(times: float) -> int:
    """The power of two nearest below."""
    return int(2 ** max(1, math.floor(math.log2(max(times, 2.0) * 1.05))))


def _batch_advice(account: Account, batch: int | None, times: int) -> Advice:
    loader = account.loader
    return Advice(
        f"batch_size={batch * times}" if batch else f"a batch {times} times as large",
        f"up to {times} times as many samples in the time of a step, and more beyond until the GPU "
        "is filled; check the learning rate, and that it fits",
        loader.where if loader else None, loader.line if loader else None,
    )  # fmt: skip


def _power(case: Case) -> Finding | None:
    device = case.device
    if (device.slowed_power or 0.0) < limit("slowed"):
        return None
    gain = _clocks(case)
    return finding(
        "throttle.power",
        f"The power limit holds the GPU's clocks down to {device.clock or 0:.0f} MHz "
        f"({device.power or 0:.0f} W).",
        "medium", "the driver says so; how much a step gains by higher clocks depends on the model",
        gain,
        [number("readings that found it so", device.slowed_power, "share", "slowed", "NVML"),
         number("power", device.power, "W", source="NVML"),
         number("clock", device.clock, "MHz", source="NVML")],
        [Advice("nvidia-smi -q -d POWER", "shows the limit; some cards allow a higher one (-pl)")],
    )  # fmt: skip


def _heat(case: Case) -> Finding | None:
    device = case.device
    if (device.slowed_heat or 0.0) < limit("slowed"):
        return None
    return finding(
        "throttle.heat",
        f"Heat holds the GPU's clocks down to {device.clock or 0:.0f} MHz.",
        "high", "the driver says so", _clocks(case),
        [number("readings that found it so", device.slowed_heat, "share", "slowed", "NVML"),
         number("clock", device.clock, "MHz", source="NVML")],
        [Advice("see to the cooling: fans, air flow, neighbours in the chassis",
                "nvidia-smi -q -d TEMPERATURE shows the limits")],
    )  # fmt: skip


def _clocks(case: Case) -> float | None:
    """How much faster the clocks were at their highest."""
    device = case.device
    if not device.clock or not device.clock_most:
        return None
    return device.clock_most / device.clock
