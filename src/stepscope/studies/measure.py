"""Turns the run folder of a trial into its ledger line."""

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
from stepscope.records import ExitStatus, Outcome
from stepscope.records.facts import Environment
from stepscope.records.trial import StudyPlace
from stepscope.runs.load import load
from stepscope.runs.reader import open_run
from stepscope.runs.trial import read_trial
from stepscope.studies.results import Result
from stepscope.trials.noise import Device, device_kind

_EXTERNAL_ERRORS = re.compile(
    r"address already in use|connection (refused|reset|closed)|no route to host|stale file handle"
    r"|input/output error|no space left on device|transport endpoint"
    r"|CUDA[^\n]*(busy or unavailable|unknown error|initialization error|ECC error"
    r"|driver shutting down|system not yet initialized)|GPU is lost|has fallen off the bus"
    r"|NCCL error[^\n]*(system error|remote process|internal error)|nccl.*unhandled system error",
    re.IGNORECASE,
)
"""Errors of disks, networks, drivers and other processes that a retry may not see."""
_EXTERNAL_SIGNALS = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT", "SIGBUS")


@dataclass(frozen=True)
class MeasuredTrial:
    """A finished trial: its ledger line, and the machine that it ran on."""

    result: Result
    environment: Environment
    device: Device


def measure_trial(folder: Path, blank: Result) -> MeasuredTrial:
    """Read a run folder; `blank` has the fields that the folder does not contain."""
    run = open_run(folder)
    record = read_trial(run)
    place = record.trial.study or StudyPlace()
    exit_status = run.exit_status
    result = replace(
        blank,
        settings=place.settings or blank.settings,
        block=place.block,
        machine=place.machine or blank.machine,
        outcome=exit_status.outcome,
        reason="" if exit_status.outcome is Outcome.OK else exit_status.reason,
        infrastructure=is_infrastructure(exit_status),
        started=(run.facts.clock.wall_ns or 0) / 1e9,
        seconds=record.trial.seconds or 0.0,
    )
    if exit_status.outcome not in (Outcome.INTERRUPTED, Outcome.LOST):
        data = load(run)
        measured = measure(record, data)
        values = _values(record, measured, data)
        cause = ""
        if result.is_ok:
            with contextlib.suppress(StepscopeError):  # too little data for a finding
                cause = explain(data).first.cause
        result = replace(
            result,
            values={k: float(v) for k, v in values.items() if v is not None and math.isfinite(v)},
            low=measured.interval.low if measured.interval else None,
            high=measured.interval.high if measured.interval else None,
            steady=measured.steady.steady,
            interference=measured.interference.reasons(),
            cause=cause,
        )
    return MeasuredTrial(result, run.facts.environment, device_kind(record.first))


def is_infrastructure(exit_status: ExitStatus) -> bool:
    """Return whether the infrastructure failed rather than the trial, so that it can be retried."""
    if exit_status.outcome is not Outcome.CRASHED:
        return False
    if exit_status.evidence.get("disk_is_full") or exit_status.evidence.get("runner_failed"):
        return True
    message = str(exit_status.evidence.get("message") or "")
    return exit_status.signal in _EXTERNAL_SIGNALS or _EXTERNAL_ERRORS.search(message) is not None


def _values(
    record: TrialRecord, measured: Measurement, data: RunData
) -> Mapping[str, float | None]:
    begin, end = measured.begin_ns or 0, measured.end_ns or 0
    gpu = figures(data.used_gpus, begin, end)
    memory = measured.device_memory
    cores = amount_of(data.of("cpu"), begin, end)
    used = cores.total / cores.seconds if cores else None
    limit = record.limits.cpus
    allowed = limit.requested if limit else data.cpu_allowed
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
        "outside_steps_seconds": measured.overhead.total,
        "noise_cv": measured.noise.cv if measured.noise else None,
        "noise_dof": measured.noise.dof if measured.noise else None,
    }
