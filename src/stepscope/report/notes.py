"""What a reader must know to trust the numbers: what was missing, lost or left out, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from stepscope.analysis.summary import Recorded
from stepscope.metrics import BY_KEY, of_scope
from stepscope.report.format import count_text, seconds_text
from stepscope.report.gpunotes import gpu_notes
from stepscope.report.gpupanels import MOST_DRAWN
from stepscope.report.panels import drawn_roles, roles_in_order
from stepscope.report.thinning import MOST_POINTS, bucket_seconds
from stepscope.runs.reader import Run

_NO_NEWS = {"cgroup_memory_limit"}
"""What is missing on most machines and tells a reader nothing by it: there is no limit."""
_OF_GPUS = frozenset(metric.key for metric in of_scope("gpu"))


def notes_of(run: Run, recorded: Recorded, seconds: float) -> tuple[str, ...]:
    """All notes on a run, each a sentence of its own."""
    sensors = run.facts.get("sensors") or {}
    hook = run.facts.get("hook") or {}
    lost = sum(process.dropped for process in run.processes)
    notes = [str(hook["message"])] if hook.get("message") else []
    if not recorded.series:
        notes.append("There are no samples: the run ended before the first, or they were lost")
    read = {metric for metric, _ in recorded.series} | _NO_NEWS
    missing = {m: why for m, why in (sensors.get("missing") or {}).items() if m not in read}
    if not read & _OF_GPUS:
        notes += _no_gpu(recorded, [missing.pop(metric) for metric in _OF_GPUS & set(missing)])
    notes += _by_reason("Not read", missing)
    notes += _by_reason("Estimated", sensors.get("estimated") or {})
    notes += [str(remark) for remark in sensors.get("remarks") or ()]
    trains = bool(hook.get("frameworks") or recorded.step_groups)
    notes += gpu_notes(recorded, trains)
    for trouble, times in (run.facts.get("troubles") or {}).items():
        notes.append(f"{trouble} ({count_text(times)} times)" if times > 1 else str(trouble))
    if sensors.get("rows_dropped"):
        rows = count_text(sensors["rows_dropped"])
        notes.append(f"{rows} rows of samples were lost: they could not be written")
    if lost:
        notes.append(f"{count_text(lost)} events of the watched processes could not be written")
    return (*notes, *_left_out(recorded, seconds))


def _by_reason(what: str, reasons: Mapping[str, str]) -> list[str]:
    """Metrics that have the same reason in one note."""
    by_reason: dict[str, list[str]] = {}
    for metric, reason in reasons.items():
        label = BY_KEY[metric].label if metric in BY_KEY else metric
        by_reason.setdefault(str(reason), []).append(label)
    return [f"{what}: {', '.join(labels)} ({why})" for why, labels in by_reason.items()]


def _no_gpu(recorded: Recorded, reasons: Iterable[str]) -> list[str]:
    """Why nothing was read of GPUs; nothing to say on a machine that has none."""
    told = sorted({str(reason) for reason in reasons})
    return [f"No GPU is watched ({'; '.join(told)})"] if told and recorded.gpus else []


def _left_out(recorded: Recorded, seconds: float) -> list[str]:
    notes = []
    if any(len(series) > MOST_POINTS for series in recorded.series.values()):
        width = seconds_text(bucket_seconds(seconds))
        notes.append(
            f"Long lines show the mean of every {width}, in a band from the lowest to the highest "
            "value; the tables are made of every sample"
        )
    roles, drawn = roles_in_order(recorded), drawn_roles(recorded)
    if drawn and len(drawn) < len(roles):
        notes.append(f"Lines are drawn for {len(drawn)} of {len(roles)} roles")
    if len(recorded.used_gpus) > MOST_DRAWN:
        count = len(recorded.used_gpus)
        notes.append(f"Lines are drawn for {MOST_DRAWN} of {count} GPUs, means are of all")
    return notes
