"""From the run folder of a trial to its line in the ledger."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stepscope.analysis.gpus import figures
from stepscope.analysis.interference import disturbances
from stepscope.analysis.series import amount_of
from stepscope.analysis.summary import Recorded
from stepscope.analysis.trial import Measurement, TrialRecord, host_cpus, measure, number
from stepscope.errors import StepscopeError
from stepscope.records import Ending, Outcome
from stepscope.runs.reader import Run, open_run
from stepscope.runs.trial import known_spread, read_trial
from stepscope.studies.result import Result

_AROUND = re.compile(
    r"address already in use|connection (refused|reset|closed)|no route to host|stale file handle"
    r"|input/output error|no space left on device|transport endpoint"
    r"|CUDA[^\n]*(busy or unavailable|unknown error|initialization error|ECC error"
    r"|driver shutting down|system not yet initialized)|GPU is lost|has fallen off the bus"
    r"|NCCL error[^\n]*(system error|remote process|internal error)|nccl.*unhandled system error",
    re.IGNORECASE,
)
"""How disks, networks, drivers and neighbours make a trial fail that would have run."""
_SIGNALS_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGBUS")


def result_of(folder: Path, blank: Result) -> Result:
    """What a trial that is over has measured; `blank` is what is known of it without its folder."""
    run = open_run(folder)
    record = read_trial(run)
    about = record.trial.get("study") or {}
    ending = run.ending
    known = replace(
        blank,
        settings=about.get("settings") or blank.settings,
        block=int(number(about, "block") or 0),
        outcome=ending.outcome,
        reason="" if ending.outcome is Outcome.OK else ending.reason,
        infrastructure=is_infrastructure(ending),
        began=run.facts["clock"]["wall_ns"] / 1e9,
        seconds=_seconds(record),
    )
    if ending.outcome in (Outcome.INTERRUPTED, Outcome.LOST):
        return known
    return _measured(run, record, known)


def is_infrastructure(ending: Ending) -> bool:
    """Whether it was not the trial that failed, but something around it: it may be tried again."""
    if ending.outcome is not Outcome.CRASHED:
        return False
    said = " ".join((ending.reason, str(ending.evidence.get("message") or "")))
    if ending.evidence.get("disk_is_full") or ending.reason.startswith("its runner failed"):
        return True
    return ending.signal in _SIGNALS_FROM_OUTSIDE or _AROUND.search(said) is not None


def _seconds(record: TrialRecord) -> float:
    began, cleaned = number(record.trial, "started_ns"), number(record.trial, "cleaned_ns")
    return (cleaned - began) / 1e9 if began is not None and cleaned is not None else 0.0


def _measured(run: Run, record: TrialRecord, known: Result) -> Result:
    recorded = run.recorded()
    cpus = host_cpus(run.facts.get("environment"))
    measured = measure(record, recorded, known_spread(record), cpus)
    told = _values(record, measured, recorded)
    return replace(
        known,
        values={k: float(v) for k, v in told.items() if v is not None and math.isfinite(v)},
        low=measured.interval.low if measured.interval else None,
        high=measured.interval.high if measured.interval else None,
        steady=measured.steady.steady,
        noise=disturbances(measured, recorded),
        cause=_cause(run) if known.outcome is Outcome.OK else "",
    )


def _values(
    record: TrialRecord, measured: Measurement, recorded: Recorded
) -> Mapping[str, float | None]:
    begin, end = measured.begin_ns or 0, measured.end_ns or 0
    gpu = figures(recorded.used_gpus, begin, end)
    memory = measured.device_memory
    cores = amount_of(recorded.of("cpu"), begin, end)
    used = cores.total / cores.seconds if cores else None
    allowed = number(record.limits, "cpus", "asked") or recorded.cpu_allowed
    energy = measured.samples_per_joule
    return {
        "samples_per_second": measured.rate.per_second if measured.rate else None,
        "step_seconds": measured.step.median if measured.step else None,
        "epoch_seconds": measured.epoch_seconds,
        "data_wait_share": measured.data_wait_share,
        "cpu_cores": used,
        "cpu_share": used / allowed if used is not None and allowed else None,
        "gpu_utilization": gpu.gpu_utilization,
        "gpu_sm": gpu.gpu_sm,
        "host_memory_peak": measured.host_memory_peak,
        "gpu_memory_peak": memory.device or memory.reserved or memory.allocated,
        "gpu_reserved_peak": memory.reserved,
        "gpu_retries": memory.retries,
        "joules_per_sample": 1 / energy if energy else None,
        "overhead_seconds": measured.overhead.total,
        "spread_cv": measured.spread.cv if measured.spread else None,
        "spread_dof": measured.spread.dof if measured.spread else None,
    }


def _cause(run: Run) -> str:
    """What held it back, by its title; nothing where too little was seen to tell."""
    try:
        first = run.explained().first
    except StepscopeError:
        return ""
    return first.title
