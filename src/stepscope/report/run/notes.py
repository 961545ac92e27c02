"""What a reader must know to trust the numbers: what was missing, lost or left out, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.gpus import RecordedGpu
from stepscope.metrics import BY_KEY, of_scope
from stepscope.report.kit.format import count_text, seconds_text, share_text
from stepscope.report.run.panels import MOST_GPUS, drawn_roles, roles_in_order
from stepscope.report.run.thinning import MOST_POINTS, bucket_seconds

_NO_NEWS = {"cgroup_memory_limit"}
"""What is missing on most machines and tells a reader nothing by it: there is no limit."""
_OF_GPUS = frozenset(metric.key for metric in of_scope("gpu"))
_COUNTED_BUSY, _WITHOUT_WORK = 0.5, 0.1
_DISAGREE = 0.05
"""Power readings and the energy counter of a GPU differ by less than this in most runs."""


def notes_of(recorded: RunData, seconds: float) -> Iterator[str]:
    """All notes on a run, each a sentence of its own."""
    sensors, hook = recorded.facts.sensors, recorded.facts.hook
    if hook.message:
        yield hook.message
    if not recorded.series:
        yield "There are no samples: the run ended before the first, or they were lost"
    read = {metric for metric, _ in recorded.series} | _NO_NEWS
    missing = {m: why for m, why in sensors.missing.items() if m not in read}
    if not read & _OF_GPUS:
        reasons = sorted({str(missing.pop(metric)) for metric in _OF_GPUS & set(missing)})
        if reasons and recorded.gpus:  # else there is none in the machine
            yield f"No GPU is watched ({'; '.join(reasons)})"
    yield from _by_reason("Not read", missing)
    yield from _by_reason("Estimated", sensors.estimated)
    yield from sensors.remarks
    yield from gpu_notes(recorded, trains=bool(hook.frameworks or recorded.step_groups))
    for trouble, times in recorded.facts.troubles.items():
        yield f"{trouble} ({count_text(times)} times)" if times > 1 else trouble
    if sensors.rows_dropped:
        rows = count_text(sensors.rows_dropped)
        yield f"{rows} rows of samples were lost: they could not be written"
    lost = recorded.events_dropped
    if lost:
        yield f"{count_text(lost)} events of the watched processes could not be written"
    yield from _left_out(recorded, seconds)


def _by_reason(what: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """Metrics that have the same reason in one note."""
    by_reason: dict[str, list[str]] = {}
    for metric, reason in reasons.items():
        label = BY_KEY[metric].label if metric in BY_KEY else metric
        by_reason.setdefault(str(reason), []).append(label)
    return (f"{what}: {', '.join(labels)} ({why})" for why, labels in by_reason.items())


def _left_out(recorded: RunData, seconds: float) -> Iterator[str]:
    if any(len(series) > MOST_POINTS for series in recorded.series.values()):
        width = seconds_text(bucket_seconds(seconds))
        yield (
            f"Long lines show the mean of every {width}, in a band from the lowest to the highest "
            "value; the tables are made of every sample"
        )
    roles, drawn = roles_in_order(recorded), drawn_roles(recorded)
    if drawn and len(drawn) < len(roles):
        yield f"Lines are drawn for {len(drawn)} of {len(roles)} roles"
    if len(recorded.used_gpus) > MOST_GPUS:
        count = len(recorded.used_gpus)
        yield f"Lines are drawn for {MOST_GPUS} of {count} GPUs, means are of all"


def gpu_notes(recorded: RunData, trains: bool) -> Iterator[str]:
    """All notes on GPUs; `trains` says whether the run is one that could have used one."""
    used = recorded.used_gpus
    yield from _unused(recorded, trains)
    gpu = recorded.gpu_use.together
    # Utilisation is what most tools show, and it can be high while nothing is computed.
    counted, worked = gpu.gpu_utilization or 0.0, gpu.gpu_sm
    if worked is not None and worked < _WITHOUT_WORK and counted > _COUNTED_BUSY:
        gpus, its = ("GPU", "its") if len(used) == 1 else ("GPUs", "their")
        yield (
            f"The {gpus} counted as busy {share_text(counted)} of the time while {its} "
            f"multiprocessors had work {share_text(worked)} of the time: copies or tiny kernels"
        )
    retries = _counted(used, "gpu_alloc_retries")
    if retries:
        yield (
            f"The allocator had to free its cache {_times(retries)}: the batch is at the edge of "
            "GPU memory"
        )
    ooms = _counted(used, "gpu_alloc_ooms")
    if ooms:
        yield f"GPU memory could not be allocated {_times(ooms)}"
    # Where the two ways to know the energy disagree, a reader of both must know which it is.
    most = max((gpu.counter_over_readings - 1 for gpu in used), key=abs, default=0.0)
    if abs(most) > _DISAGREE:
        yield (
            f"Energy is that of the energy counters, up to {share_text(abs(most))} "
            f"{'more' if most > 0 else 'less'} than the power readings add up to"
        )
    for each in used:
        errors = each.of("gpu_ecc_uncorrected").value
        came = errors[-1] - errors[0] if len(errors) else 0
        if came > 0:
            what = "An error" if came == 1 else f"{count_text(came)} errors"
            yield f"{what} in the memory of {each.gpu.label} could not be corrected during the run"


def _unused(recorded: RunData, trains: bool) -> Iterator[str]:
    """GPUs that were there, and that the run did not use though it could have."""
    used = {each.gpu.uuid for each in recorded.used_gpus}
    idle = [
        each.gpu.label for each in recorded.all_gpus if each.series and each.gpu.uuid not in used
    ]
    if not idle or not (used or trains):
        return
    listed = f"{idle[0]} and {len(idle) - 1} others" if len(idle) > 2 else " and ".join(idle)
    if used:
        verb = "was" if len(idle) == 1 else "were"
        yield f"{listed} {verb} not used by the run, and in no mean or sum of it"
        return
    busy = (
        f". {row.gpu.label} was busy (SM activity {share_text(row.figures.gpu_sm)}), but for "
        "others, as far as the driver tells"
        for row in recorded.gpu_use.each
        if row.figures.gpu_sm is not None and row.figures.gpu_sm > _WITHOUT_WORK
    )
    yield f"The run used no GPU: nothing of it was seen on {listed}{''.join(busy)}"


def _counted(gpus: Sequence[RecordedGpu], metric: str) -> float:
    return sum(float(gpu.of(metric).value[-1]) for gpu in gpus if len(gpu.of(metric)))


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count_text(count)} times"
