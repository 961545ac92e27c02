"""Memory: at its edge, or growing without end; and steps that get slower and slower."""

from __future__ import annotations

import math

import numpy as np

from stepscope.analysis.causes.account import Account, Stretch, reading_in
from stepscope.analysis.causes.case import Case, finding, number, pct
from stepscope.analysis.causes.thresholds import limit
from stepscope.analysis.series import Series
from stepscope.analysis.steady import drift_of, trend
from stepscope.records import Advice, Confidence, Finding

_BUCKETS = 24
_LEAST_BUCKETS = 8
_SURE = 3.3
"""Standard deviations of Mann and Kendall's count: chance does it once in a thousand."""
_FIRST_STEPS = 5
"""They allocate, compile and autotune: no step is like them."""


def memory_findings(case: Case) -> list[Finding]:
    found = [
        _host_leak(case), _device_leak(case), _drift(case), _retries(case), _device_full(case),
        _host_full(case), _shm_full(case),
    ]  # fmt: skip
    return [each for each in found if each is not None]


def growth(series: Series, stretch: Stretch) -> tuple[float, float] | None:
    """Bytes a second, and bytes at the beginning, of a gauge that grows without end; else None.

    The least of each bucket of time is taken: what is freed after every step or epoch is no leak.
    How low that is, is known no better than the gauge moves from one reading to the next: readings
    in step with an epoch come a little later in it each time.
    """
    inside = series.between(stretch.begin_ns, stretch.end_ns)
    if len(inside) < _LEAST_BUCKETS:
        return None
    edges = np.linspace(stretch.begin_ns, stretch.end_ns, _BUCKETS + 1)
    places = np.clip(np.searchsorted(edges, inside.t, side="right") - 1, 0, _BUCKETS - 1)
    least = np.full(_BUCKETS, np.inf)
    np.minimum.at(least, places, inside.value)
    known = np.flatnonzero(np.isfinite(least))
    if len(known) < _LEAST_BUCKETS:
        return None
    values, seconds = least[known], known * stretch.seconds / _BUCKETS
    sureness, _ = trend(values)
    half = len(values) // 2
    first, second = values[half] - values[0], values[-1] - values[half]
    total = float(values[-1] - values[0])
    moves = float(np.median(np.abs(np.diff(inside.value))))
    enough = total >= max(limit("growth_bytes"), limit("growth_share") * float(values[0]), moves)
    if sureness < _SURE or not enough or second < limit("goes_on") * max(first, 0.0) or second <= 0:
        return None
    pairs = np.triu_indices(len(values), 1)
    slopes = (values[pairs[1]] - values[pairs[0]]) / (seconds[pairs[1]] - seconds[pairs[0]])
    return float(np.median(slopes)), float(values[0])


def pace(rate: float) -> str:
    """Bytes a second in a unit that shows them."""
    return f"{rate / 1e6:.1f} MB/s" if rate >= 1e5 else f"{rate * 3600 / 1e6:.1f} MB an hour"


def sure(left: float | None, rate: float) -> Confidence:
    """Growth that takes a week to matter is told, but is not what holds a run back."""
    soon = left is None or left < rate * limit("leak_horizon")
    return "high" if soon else "low"


def until(left: float | None, rate: float) -> str:
    """When memory that grows will be gone, in words."""
    if left is None or rate <= 0:
        return "until it is gone"
    seconds = max(0.0, left) / rate
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"and is gone in about {seconds / length:.0f} {unit}"
    return f"and is gone in about {seconds:.0f} s"


def _host_leak(case: Case) -> Finding | None:
    found = growth(case.recorded.of("memory"), case.stretch)
    if found is None:
        return None
    rate, began = found
    if not _is_lost(case, rate):
        return None
    roles = [role for metric, role in case.recorded.series if metric == "memory" and role != "tree"]
    rates = {role: growth(case.recorded.of("memory", role), case.stretch) for role in roles}
    guilty = max((r for r in roles if rates[r]), key=lambda r: (rates[r] or (0.0,))[0], default="")
    left = _left_on_host(case)
    who = {"worker": "the loader workers", "main": "the training process"}.get(guilty, guilty)
    loader = case.lead.loader if case.lead else None
    return finding(
        "leak.host",
        f"Host memory grows by {pace(rate)}{f' in {who}' if who else ''} {until(left, rate)}.",
        sure(left, rate),
        "it grew in every part of the run, in the second half as in the first", 1.0,
        [
            number("grows by", rate, "bytes/s", source="/proc"),
            number("grew in all", rate * case.stretch.seconds, "bytes", "growth_bytes", "/proc"),
            number("at the beginning", began, "bytes", source="/proc"),
            number("left", left, "bytes", source="/proc"),
        ],
        [
            Advice("look in the data set for a list or dict that grows in __getitem__",
                   "workers are copies of it: each keeps its own",
                   loader.where if loader else None, loader.line if loader else None)
            if guilty == "worker"
            else Advice("look for a list that keeps tensors, losses or samples of every step",
                        "keep loss.item() or loss.detach(), not loss"),
        ],
    )  # fmt: skip


def _is_lost(case: Case, rate: float) -> bool:
    """Whether the machine loses what the run takes: pages of files that are read through a map
    count as the run's, and are given back when anybody needs them."""
    available = case.recorded.of("host_available", "host")
    inside = available.between(case.stretch.begin_ns, case.stretch.end_ns)
    if len(inside) < _LEAST_BUCKETS:
        return True
    third = max(1, len(inside) // 3)
    lost = float(np.median(inside.value[:third]) - np.median(inside.value[-third:]))
    return lost >= limit("most_of_it") * rate * case.stretch.seconds * 2 / 3


def _left_on_host(case: Case) -> float | None:
    """Bytes until the lowest limit that applies, at the end of the stretch."""

    def last(metric: str, entity: str) -> float | None:
        return reading_in(case.recorded.of(metric, entity), case.stretch, lambda v: float(v[-1]))

    lefts = [last("host_available", "host")]
    top, used = last("cgroup_memory_limit", "cgroup"), last("cgroup_memory", "cgroup")
    if top is not None and used is not None:
        lefts.append(top - used)
    known = [left for left in lefts if left is not None]
    return min(known) if known else None


def _device_leak(case: Case) -> Finding | None:
    for gpu in case.recorded.used_gpus:
        found = growth(gpu.of("gpu_allocated"), case.stretch)
        if found is None:
            continue
        rate, began = found
        held = reading_in(gpu.memory, case.stretch, lambda v: float(v[-1]))
        size = gpu.gpu.memory_bytes
        left = size - held if size is not None and held is not None else None
        return finding(
            "leak.gpu",
            f"Memory of {gpu.gpu.label} grows by {pace(rate)} {until(left, rate)}.",
            sure(left, rate),
            "tensors held at the ends of steps grew in every part of the run", 1.0,
            [
                number("grows by", rate, "bytes/s", source="allocator"),
                number("grew in all", rate * case.stretch.seconds, "bytes", "growth_bytes",
                       "allocator"),
                number("at the beginning", began, "bytes", source="allocator"),
                number("left", left, "bytes", source="NVML"),
            ],
            [
                Advice("keep loss.detach() or loss.item(), not loss",
                       "a loss that is kept keeps its whole graph"),
                Advice("look for a list or dict that outputs are appended to in the loop, and "
                       "move what is kept to the host: outputs.detach().cpu()"),
            ],
        )  # fmt: skip
    return None


def _drift(case: Case) -> Finding | None:
    account = case.lead
    if account is None:
        return None
    lengths = np.concatenate([account.before, account.own])[_FIRST_STEPS:]
    drift = drift_of(lengths)
    long = account.seconds >= limit("drift_seconds")
    if drift is None or drift < limit("drift") or not long:
        return None
    tenth = max(1, len(lengths) // 10)
    first, last = float(np.median(lengths[:tenth])), float(np.median(lengths[-tenth:]))
    if last < (1 + limit("drift")) * first or not first:
        return None
    rate = (last / first - 1) / max(account.seconds, 1e-9)
    line = max(account.spent.values(), key=lambda spent: spent.seconds, default=None)
    return finding(
        "drift.steps",
        f"Steps get slower: {first * 1e3:.0f} ms at the beginning, {last * 1e3:.0f} ms at the end; "
        f"at this pace they take twice as long every {_doubling(rate)}.",
        "high", "Mann and Kendall's test is sure of the trend",
        float(account.lengths.mean()) / (first + float((account.lengths - account.own).mean())),
        [
            number("change of the step time", drift, "share", "drift", "steps"),
            number("a step at the beginning", first, "s", source="steps"),
            number("a step at the end", last, "s", source="steps"),
        ],
        [Advice("look for something that is kept from every step and gone through in each: a list "
                "of losses, a running statistic over all of it, a graph that is never freed",
                "the training thread is mostly here" if line else "",
                line.where if line else None, line.line if line else None)],
    )  # fmt: skip


def _doubling(rate: float) -> str:
    seconds = 1.0 / rate if rate > 0 else math.inf
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} s"


def _retries(case: Case) -> Finding | None:
    account = case.lead
    if account is None:
        return None
    for gpu in case.recorded.used_gpus:
        inside = gpu.of("gpu_alloc_retries").between(case.stretch.begin_ns, case.stretch.end_ns)
        count = float(inside.value[-1] - inside.value[0]) if len(inside) > 1 else 0.0
        per_step = count / max(1, account.steps)
        if per_step < limit("retries"):
            continue
        busy = case.device.busy
        return finding(
            "memory.gpu",
            f"{gpu.gpu.label} is out of memory again and again: the allocator had to free its "
            f"cache {count:.0f} times in {account.steps} steps, and everything waits each time.",
            "high", "PyTorch's allocator counts it", 1.0 / busy if busy else None,
            [
                number("allocator retries per step", per_step, "count", "retries", "allocator"),
                number("kernels ran", busy, "share", source="GPM"),
            ],
            [
                Advice(_a_little_less(account.batch_size),
                       "a little less, and nothing has to be freed",
                       account.loader.where if account.loader else None,
                       account.loader.line if account.loader else None),
                Advice("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True python …",
                       "if sizes vary from step to step"),
            ],
        )  # fmt: skip
    return None


def _a_little_less(batch: int | None) -> str:
    return f"batch_size={int(batch * 0.85)}" if batch and batch > 1 else "a smaller batch"


def _device_full(case: Case) -> Finding | None:
    for gpu in case.recorded.used_gpus:
        most = reading_in(gpu.of("gpu_memory"), case.stretch, lambda v: float(v.max()))
        size = gpu.gpu.memory_bytes
        if most is None or not size or most / size < limit("memory_full"):
            continue
        return finding(
            "memory.gpu",
            f"{gpu.gpu.label} has {(size - most) / 1e9:.1f} GB of {size / 1e9:.0f} GB left: a "
            "larger batch, or an evaluation, may not fit.",
            "medium", "what the driver says is in use; the allocator may hold more than it needs",
            1.0,
            [number("in use", most / size, "share", "memory_full", "NVML")],
            [Advice("a smaller batch_size, or torch.utils.checkpoint for the largest layers")],
        )  # fmt: skip
    return None


def _host_full(case: Case) -> Finding | None:
    total = case.observed.machine.memory_bytes
    left = reading_in(
        case.recorded.of("host_available", "host"), case.stretch, lambda v: float(v.min())
    )
    stalled = case.mean("pressure_memory", "host") or 0.0
    share = 1 - left / total if left is not None and total else 0.0
    account: Account | None = case.lead
    if share < limit("memory_full") and stalled < limit("outside_share"):
        return None
    return finding(
        "memory.host",
        f"The host's memory is {pct(share)} full, and tasks waited for memory {pct(stalled)} of "
        "the time.",
        "high" if stalled >= limit("outside_share") else "medium",
        "the kernel counts how long tasks wait for memory", 1.0 / max(1.0 - stalled, 0.1),
        [
            number("in use", share, "share", "memory_full", "/proc"),
            number("some task waited for memory", stalled, "share", "outside_share", "PSI"),
        ],
        [Advice("num_workers or prefetch_factor lower by half",
                "each worker holds its batches in memory",
                account.loader.where if account and account.loader else None,
                account.loader.line if account and account.loader else None)],
    )  # fmt: skip


def _shm_full(case: Case) -> Finding | None:
    used = reading_in(case.recorded.of("shm_used", "shm"), case.stretch, lambda v: float(v.max()))
    size = case.reading("shm_size", "shm")
    if used is None or not size or used / size < limit("memory_full"):
        return None
    return finding(
        "memory.shm",
        f"/dev/shm is {pct(used / size)} full: loader workers hand batches over through it, and "
        "the next one may end the run.",
        "medium", "read once a second", 1.0,
        [number("in use", used / size, "share", "memory_full", "statvfs")],
        [Advice("docker run --shm-size=8g, or --ipc=host", "batches on their way need "
                "workers × prefetch_factor × batch"),
         Advice("torch.multiprocessing.set_sharing_strategy('file_system')")],
    )  # fmt: skip
