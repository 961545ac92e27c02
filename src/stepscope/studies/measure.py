"""From the run folder of a trial to its line in the ledger."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stepscope.analysis.bottleneck.explain import explain
from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.gpus import figures
from stepscope.analysis.run.series import amount_of
from stepscope.analysis.trial.measurement import Measurement, TrialRecord, measure
from stepscope.errors import StepscopeError
from stepscope.records import Ending, Outcome
from stepscope.records.facts import Environment
from stepscope.records.trial import StudyPlace
from stepscope.runs.load import load
from stepscope.runs.reader import open_run
from stepscope.runs.trial import read_trial
from stepscope.studies.results import Result
from stepscope.trials.noise import Device, device_kind

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


@dataclass(frozen=True)
class MeasuredTrial:
    """A finished trial: its line in the ledger, and what it ran on."""

    result: Result
    environment: Environment
    device: Device


def measure_trial(folder: Path, blank: Result) -> MeasuredTrial:
    """Read a run folder, once; `blank` is what is known of the trial without it."""
    run = open_run(folder)
    record = read_trial(run)
    place = record.trial.study or StudyPlace()
    ending = run.ending
    result = replace(
        blank,
        settings=place.settings or blank.settings,
        block=place.block,
        machine=place.machine or blank.machine,
        outcome=ending.outcome,
        reason="" if ending.outcome is Outcome.OK else ending.reason,
        infrastructure=is_infrastructure(ending),
        began=(run.facts.clock.wall_ns or 0) / 1e9,
        seconds=record.trial.seconds or 0.0,
    )
    if ending.outcome not in (Outcome.INTERRUPTED, Outcome.LOST):
        data = load(run)
        measured = measure(record, data)
        values = _values(record, measured, data)
        cause = ""
        if result.is_ok:
            with contextlib.suppress(StepscopeError):  # too little was seen to tell
                cause = explain(data).first.cause
        result = replace(
            result,
            values={k: float(v) for k, v in values.items() if v is not None and math.isfinite(v)},
            low=measured.interval.low if measured.interval else None,
            high=measured.interval.high if measured.interval else None,
            steady=measured.steady.steady,
            noise=measured.interference.reasons(),
            cause=cause,
        )
    return MeasuredTrial(result, run.facts.environment, device_kind(record.first))


def is_infrastructure(ending: Ending) -> bool:
    """Whether it was not the trial that failed, but something around it: it may be tried again."""
    if ending.outcome is not Outcome.CRASHED:
        return False
    if ending.evidence.get("disk_is_full") or ending.evidence.get("runner_failed"):
        return True
    message = str(ending.evidence.get("message") or "")
    return ending.signal in _SIGNALS_FROM_OUTSIDE or _AROUND.search(message) is not None


def _values(
    record: TrialRecord, measured: Measurement, data: RunData
) -> Mapping[str, float | None]:
    begin, end = measured.begin_ns or 0, measured.end_ns or 0
    gpu = figures(data.used_gpus, begin, end)
    memory = measured.device_memory
    cores = amount_of(data.of("cpu"), begin, end)
    used = cores.total / cores.seconds if cores else None
    limit = record.limits.cpus
    allowed = limit.asked if limit else data.cpu_allowed
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
        "gpu_memory_peak": memory.peak,
        "gpu_reserved_peak": memory.reserved,
        "gpu_retries": memory.retries,
        "joules_per_sample": 1 / energy if energy else None,
        "overhead_seconds": measured.overhead.total,
        "spread_cv": measured.noise.cv if measured.noise else None,
        "spread_dof": measured.noise.dof if measured.noise else None,
    }
