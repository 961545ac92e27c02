"""Trials as JSON: one table of keys, with the attribute of the view and a description.

Keys are never renamed, only added. Times are in seconds, shares are fractions of 1, and missing
values are null.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stepscope.records.codec import to_json
from stepscope.report.trial.view import TrialView, mean_of

FORMAT = 1
_MEAN_KEYS = (
    ("samples_per_second", "mean"),
    ("samples_per_second_low", "interval.low"),
    ("samples_per_second_high", "interval.high"),
    ("confidence", "interval.confidence"),
    ("noise_cv", "noise.cv"),
    ("noise_dof", "noise.dof"),
    ("noise_source", "noise.source"),
)

KEYS: tuple[tuple[str, str, str], ...] = (
    ("name", "name", "Name of the trial"),
    ("folder", "folder", "Run folder"),
    (
        "outcome",
        "exit_status.outcome",
        "Outcome: `ok`, `gpu_oom`, `host_oom`, `shm_full`, `timeout`, …",
    ),
    ("reason", "exit_status.reason", "Reason for the outcome"),
    ("exit_code", "exit_status.exit_code", "Exit code of the main process"),
    ("signal", "exit_status.signal", "Signal that ended the main process"),
    (
        "failure_details",
        "failure_details",
        "Errors of the ranks, progress, counted OOM kills and error output",
    ),
    ("evidence", "exit_status.evidence", "Recorded evidence for the outcome"),
    ("recommendation", "recommendation_text", "Recommended next step"),
    ("workload", "workload", "All settings, with defaults resolved"),
    ("limits", "record.limits", "Requested limits, and what enforced them"),
    ("data", "record.first.data", "Dataset: name, number of samples, source"),
    ("parameters", "record.first.model.parameters", "Number of model parameters"),
    ("device", "record.first.device", "Device of the first rank: `cpu` or `cuda:0`"),
    ("device_name", "record.first.device_name", "Model of the device"),
    ("versions", "record.first.versions", "Versions of the framework"),
    ("repeat", "record.trial.repeat", "Number of this repeat, from 1"),
    ("repeats", "record.trial.repeats", "Number of repeats"),
    ("global_batch", "record.samples_per_step", "Samples per step of all ranks"),
    (
        "samples_per_second",
        "measured.rate.per_second",
        "Throughput of all ranks over the steady steps",
    ),
    ("samples_per_second_low", "measured.interval.low", "Lower bound of the interval"),
    ("samples_per_second_high", "measured.interval.high", "Upper bound of the interval"),
    ("confidence", "measured.interval.confidence", "Confidence level of the interval, such as 0.9"),
    (
        "no_throughput_reason",
        "no_throughput_reason",
        "Reason for a missing throughput; empty if there is one",
    ),
    (
        "step_standard_error",
        "measured.rate.relative_error",
        "Relative standard error of the throughput within this trial",
    ),
    ("noise_cv", "measured.noise.cv", "Coefficient of variation between trials"),
    ("noise_dof", "measured.noise.dof", "Degrees of freedom of `noise_cv`"),
    (
        "noise_source",
        "measured.noise.source",
        "Source of `noise_cv`: `learned` from repeats, `other_workloads` or `assumed`",
    ),
    ("noise_trials", "measured.noise.trials", "Number of trials that `noise_cv` is based on"),
    ("steady", "measured.steady.steady", "Whether the measured steps are steady"),
    ("unsteady_reason", "measured.steady.reason", "Why they are not steady; empty if they are"),
    ("drift", "measured.steady.drift", "Relative change of the step time over the measured steps"),
    ("steps", "measured.steps", "Steps that every rank completed"),
    ("warmup_steps", "warmup_steps", "Warm-up steps, including the first step"),
    ("steady_steps", "measured.steady_steps", "Measured steps"),
    ("samples", "measured.samples", "Samples in all steps of all ranks"),
    ("step_seconds", "measured.step.median", "Median step time"),
    ("step_seconds_p95", "measured.step.p95", "95th percentile of the step time"),
    ("wait_seconds", "measured.wait.median", "Median wait for the next batch per step"),
    ("wait_seconds_p95", "measured.wait.p95", "95th percentile of the wait per step"),
    ("copy_seconds", "measured.copy.median", "Median time of the copy to the device per step"),
    ("copy_seconds_p95", "measured.copy.p95", "95th percentile of the copy time per step"),
    (
        "compute_seconds",
        "measured.compute.median",
        "Median time of forward pass, backward pass and optimizer per step",
    ),
    ("compute_seconds_p95", "measured.compute.p95", "95th percentile of the compute time per step"),
    (
        "data_wait_share",
        "measured.data_wait_share",
        "Share of the time that training waits for data",
    ),
    ("epoch_seconds", "measured.epoch_seconds", "Duration of an epoch"),
    (
        "epoch_measured",
        "measured.epoch_measured",
        "Whether a whole epoch was measured; otherwise `epoch_seconds` is an estimate",
    ),
    (
        "rank_imbalance",
        "measured.imbalance",
        "Step time of the slowest rank divided by that of the fastest rank",
    ),
    (
        "outside_steps_seconds",
        "measured.overhead.total",
        "Time of the trial outside the steady steps",
    ),
    ("start_seconds", "measured.overhead.start", "Time until the processes are started"),
    ("import_seconds", "measured.overhead.imports", "Import time"),
    ("data_seconds", "measured.overhead.data", "Time to generate or open the data"),
    ("build_seconds", "measured.overhead.build", "Time to build the model"),
    ("first_step_seconds", "measured.overhead.first_step", "Time of the first step"),
    ("warmup_seconds", "measured.overhead.warmup", "Time of the other warm-up steps"),
    ("profile_seconds", "measured.overhead.profile", "Time of the steps under the profiler"),
    ("shutdown_seconds", "measured.overhead.closing", "Time from the last step to the exit"),
    (
        "other_seconds",
        "measured.overhead.other",
        "Remaining time: interpreter, launcher and process exit",
    ),
    ("cleanup_seconds", "measured.overhead.cleanup", "Cleanup time after the processes exit"),
    ("host_memory_peak_bytes", "measured.host_memory_peak", "Peak host memory of all processes"),
    (
        "device_memory_peak_bytes",
        "measured.device_memory.device",
        "Peak GPU memory reported by the driver",
    ),
    ("allocated_peak_bytes", "measured.device_memory.allocated", "Peak GPU memory of tensors"),
    (
        "reserved_peak_bytes",
        "measured.device_memory.reserved",
        "Peak GPU memory reserved by the allocator",
    ),
    ("allocator_retries", "measured.device_memory.retries", "Number of allocator retries"),
    ("joules", "measured.joules", "Energy of the GPUs over the steady steps"),
    ("samples_per_joule", "measured.samples_per_joule", "Samples per joule over the steady steps"),
    ("other_cores", "measured.interference.other_cores", "Mean CPUs used by other processes"),
    (
        "interference",
        "measured.has_interference",
        "Whether other processes may have slowed the trial down",
    ),
    ("leftovers", "record.trial.leftovers", "Processes and files that could not be cleaned up"),
)


def trial_dict(view: TrialView) -> dict[str, Any]:
    values = {key: to_json(_attribute(view, path), omit_defaults=True) for key, path, _ in KEYS}
    return {"format": FORMAT, **values}


def trials_dict(views: Sequence[TrialView]) -> dict[str, Any]:
    """Return one trial, or repeats with their mean throughput and its interval."""
    if len(views) == 1:
        return trial_dict(views[0])
    mean = mean_of(views)
    return {
        "format": FORMAT,
        "trials": [trial_dict(view) for view in views],
        "ok": sum(view.is_ok for view in views),
        **{key: _attribute(mean, path) for key, path in _MEAN_KEYS},
    }


def _attribute(value: Any, path: str) -> Any:
    for name in path.split("."):
        if value is None:
            return None
        value = getattr(value, name)
    return value
