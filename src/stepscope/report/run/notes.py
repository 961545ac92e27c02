"""Notes on a run: what was missing, lost or omitted, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.gpus import RecordedGpu
from stepscope.metrics import BY_KEY, SCOPES, of_scope
from stepscope.report.kit.format import count_text, plural, seconds_text, share_text
from stepscope.report.run.panels import MAX_GPUS, drawn_roles, roles_in_order
from stepscope.report.run.thinning import MAX_POINTS, bucket_seconds
from stepscope.runs.tracking import tracking_text

_EXPECTED_MISSING = {"cgroup_memory_limit"}
"""Missing on most machines, where there is no limit."""
_SCOPE_NAMES = {"process": "Process", "host": "Host", "gpu": "GPU"}
_MAX_GAPS = 4
_GPU_METRICS = frozenset(metric.key for metric in of_scope("gpu"))
_HIGH_UTILIZATION, _LOW_SM = 0.5, 0.1
_ENERGY_TOLERANCE = 0.05
"""Usual difference between the power readings and the energy counter of a GPU."""


def notes_of(recorded: RunData, seconds: float) -> Iterator[str]:
    """Yield the notes on a run, one sentence each."""
    sensors, hook = recorded.facts.sensors, recorded.facts.hook
    if tracking := tracking_text(hook):
        yield tracking
    if not recorded.series:
        yield "No samples were recorded: the run ended before the first one, or they were lost"
    read = {metric for metric, _ in recorded.series} | _EXPECTED_MISSING
    missing = {m: why for m, why in sensors.missing.items() if m not in read}
    if not read & _GPU_METRICS:
        reasons = sorted({str(missing.pop(metric)) for metric in _GPU_METRICS & set(missing)})
        if reasons and recorded.gpus:  # else the machine has no GPU
            yield f"GPUs were not monitored ({'; '.join(reasons)})"
    yield from _by_reason("Not available", missing)
    yield from _by_reason("Estimated", sensors.estimated)
    yield from warnings_of(recorded)
    yield from _omitted(recorded, seconds)


def warnings_of(recorded: RunData) -> Iterator[str]:
    """Yield the notes that matter most: what went wrong, and what is unusual about the GPUs."""
    sensors, hook = recorded.facts.sensors, recorded.facts.hook
    yield from sensors.notes
    yield from gpu_notes(recorded, trains=bool(hook.frameworks or recorded.step_groups))
    for problem, count in recorded.facts.problems.items():
        yield f"{problem} ({count_text(count)} times)" if count > 1 else problem
    if sensors.rows_dropped:
        rows = count_text(sensors.rows_dropped)
        yield f"{rows} rows of samples were lost because they could not be written"
    yield from _missing_samples(recorded)
    if recorded.events_outside:
        yield (
            f"{count_text(recorded.events_outside)} events of the monitored processes are ignored "
            "because their times lie outside the run: the command ran in another time namespace, "
            "or its event files are damaged"
        )
    if recorded.events_dropped:
        events = count_text(recorded.events_dropped)
        yield f"{events} events of the monitored processes could not be written"


def _missing_samples(recorded: RunData) -> Iterator[str]:
    """Yield a note for each scope with gaps."""
    for scope in SCOPES:
        gaps = [gap for gap in recorded.gaps if gap.scope == scope]
        spans = [
            " to ".join(
                seconds_text(max(0.0, (edge - recorded.begin_ns) / 1e9))
                for edge in (gap.begin_ns, gap.end_ns)
            )
            for gap in gaps[:_MAX_GAPS]
        ]
        more = f" and {len(gaps) - _MAX_GAPS} more gaps" if len(gaps) > _MAX_GAPS else ""
        if spans:
            yield (
                f"{_SCOPE_NAMES[scope]} samples are missing (time since the start: "
                f"{', '.join(spans)}{more}): a file in the run folder is damaged or missing"
            )


def _by_reason(what: str, reasons: Mapping[str, str]) -> Iterator[str]:
    """Yield one note for all metrics with the same reason."""
    by_reason: dict[str, list[str]] = {}
    for metric, reason in reasons.items():
        label = BY_KEY[metric].label if metric in BY_KEY else metric
        by_reason.setdefault(str(reason), []).append(label)
    return (f"{what}: {', '.join(labels)} ({why})" for why, labels in by_reason.items())


def _omitted(recorded: RunData, seconds: float) -> Iterator[str]:
    if any(len(series) > MAX_POINTS for series in recorded.series.values()):
        width = seconds_text(bucket_seconds(seconds))
        yield (
            f"In long charts, each point is the mean over {width}, and the band spans the lowest "
            "to the highest value; the tables use all samples"
        )
    roles, drawn = roles_in_order(recorded), drawn_roles(recorded)
    if drawn and len(drawn) < len(roles):
        yield f"The charts show {len(drawn)} of {len(roles)} roles"
    if len(recorded.used_gpus) > MAX_GPUS:
        count = len(recorded.used_gpus)
        yield f"The charts show lines for {MAX_GPUS} of {count} GPUs; means and sums include all"


def gpu_notes(recorded: RunData, trains: bool) -> Iterator[str]:
    """Yield the notes on GPUs; `trains` is whether the run could have used one."""
    used = recorded.used_gpus
    yield from _unused(recorded, trains)
    gpu = recorded.gpu_use.overall
    # Most tools show utilization, which can be high while the GPU computes almost nothing.
    utilization, sm = gpu.gpu_utilization or 0.0, gpu.gpu_sm
    if sm is not None and sm < _LOW_SM and utilization > _HIGH_UTILIZATION:
        subject = "the GPU mostly runs" if len(used) == 1 else "the GPUs mostly run"
        yield (
            f"GPU utilization is {share_text(utilization)}, but SM activity is only "
            f"{share_text(sm)}: {subject} copies or tiny kernels"
        )
    retries = _counted(used, "gpu_alloc_retries")
    if retries:
        yield (
            f"The allocator had to free its cache {_times(retries)}: the batch size is at the "
            "limit of GPU memory"
        )
    ooms = _counted(used, "gpu_alloc_ooms")
    if ooms:
        yield f"GPU memory allocation failed {_times(ooms)}"
    # If the two energy sources disagree, name the one that is used.
    difference = max((gpu.counter_over_readings - 1 for gpu in used), key=abs, default=0.0)
    if abs(difference) > _ENERGY_TOLERANCE:
        yield (
            f"Energy is taken from the energy counters; it is up to {share_text(abs(difference))} "
            f"{'higher' if difference > 0 else 'lower'} than the energy computed from the power "
            "readings"
        )
    for each in used:
        values = each.of("gpu_ecc_uncorrected").value
        count = values[-1] - values[0] if len(values) else 0
        if count > 0:
            errors = f"{count_text(count)} uncorrectable ECC {plural(count, 'error')}"
            yield f"{errors} occurred on {each.gpu.label} during the run"


def _unused(recorded: RunData, trains: bool) -> Iterator[str]:
    """Yield notes on GPUs that the run could have used but did not."""
    used = {each.gpu.uuid for each in recorded.used_gpus}
    idle = [
        each.gpu.label for each in recorded.all_gpus if each.series and each.gpu.uuid not in used
    ]
    if not idle or not (used or trains):
        return
    listed = f"{idle[0]} and {len(idle) - 1} other GPUs" if len(idle) > 2 else " and ".join(idle)
    if used:
        was, is_ = ("was", "is") if len(idle) == 1 else ("were", "are")
        yield f"{listed} {was} not used by the run and {is_} excluded from its means and sums"
        return
    busy = (
        f". According to the driver, {row.gpu.label} was busy with other processes (SM activity "
        f"{share_text(row.figures.gpu_sm)})"
        for row in recorded.gpu_use.each
        if row.figures.gpu_sm is not None and row.figures.gpu_sm > _LOW_SM
    )
    yield f"The run used no GPU: its processes were not seen on {listed}{''.join(busy)}"


def _counted(gpus: Sequence[RecordedGpu], metric: str) -> float:
    return sum(float(gpu.of(metric).value[-1]) for gpu in gpus if len(gpu.of(metric)))


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count_text(count)} times"
