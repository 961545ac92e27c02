"""Trials for programs: one table of keys, with where each stands in the view and what it means.

Keys are never renamed, only added. Times are in seconds, shares are parts of 1, missing is null.
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
    ("between_processes", "noise.cv"),
    ("between_dof", "noise.dof"),
    ("between_source", "noise.source"),
)

KEYS: tuple[tuple[str, str, str], ...] = (
    ("name", "name", "what the trial is called"),
    ("folder", "folder", "its run folder"),
    ("outcome", "ending.outcome", "how it ended: ok, gpu_oom, host_oom, shm_full, timeout, …"),
    ("reason", "ending.reason", "the outcome in words"),
    ("exit_code", "ending.exit_code", "of its main process"),
    ("signal", "ending.signal", "that ended its main process"),
    ("cause", "cause", "texts: what its ranks said, what was counted, what was printed last"),
    ("evidence", "ending.evidence", "the same as it was recorded"),
    ("advice", "advice", "what to do next"),
    ("workload", "workload", "all settings, as they were resolved"),
    ("limits", "record.limits", "what was asked for, and by what it was enforced"),
    ("data", "record.first.data", "the data set: name, samples, where it is from"),
    ("parameters", "record.first.model.parameters", "of the model"),
    ("device", "record.first.device", "cpu, or cuda:0 of the first rank"),
    ("device_name", "record.first.device_name", "what the device is"),
    ("versions", "record.first.versions", "of the framework"),
    ("repeat", "record.trial.repeat", "which of the repeats this is, from 1"),
    ("repeats", "record.trial.repeats", "how many repeats there are"),
    ("global_batch", "record.samples_per_step", "samples in a step of all ranks"),
    ("samples_per_second", "measured.rate.per_second", "of all ranks, over the steady steps"),
    ("samples_per_second_low", "measured.interval.low", "lower end of the interval"),
    ("samples_per_second_high", "measured.interval.high", "upper end of the interval"),
    ("confidence", "measured.interval.confidence", "of the interval, as a share"),
    ("why_no_rate", "why_no_rate", "empty where there is one"),
    ("within_process", "measured.rate.within", "relative standard error from its own steps"),
    ("between_processes", "measured.noise.cv", "coefficient of variation between trials"),
    ("between_dof", "measured.noise.dof", "degrees of freedom of the one before"),
    ("between_source", "measured.noise.source", "learnt, of others here, or assumed"),
    ("between_trials", "measured.noise.trials", "from how many trials it was learnt"),
    ("steady", "measured.steady.steady", "whether the measured steps are steady"),
    ("why_not_steady", "measured.steady.reason", "empty where they are"),
    ("drift", "measured.steady.drift", "change of the step time over the measured steps"),
    ("steps", "measured.steps", "that every rank took"),
    ("warmup_steps", "warmup_steps", "cut off, the first one included"),
    ("steady_steps", "measured.steady_steps", "that were measured"),
    ("samples", "measured.samples", "in all steps of all ranks"),
    ("step_seconds", "measured.step.median", "median length of a step"),
    ("step_seconds_p95", "measured.step.p95", ""),
    ("wait_seconds", "measured.wait.median", "median wait of the host for the data of a step"),
    ("wait_seconds_p95", "measured.wait.p95", ""),
    ("copy_seconds", "measured.copy.median", "median copy to the device"),
    ("copy_seconds_p95", "measured.copy.p95", ""),
    ("compute_seconds", "measured.compute.median", "median forward, backward and optimizer"),
    ("compute_seconds_p95", "measured.compute.p95", ""),
    ("data_wait_share", "measured.data_wait_share", "of the time, held up by missing data"),
    ("epoch_seconds", "measured.epoch_seconds", "of one epoch"),
    ("epoch_measured", "measured.epoch_measured", "whether a whole one was run; else projected"),
    ("imbalance", "measured.imbalance", "step time of the slowest rank over the fastest"),
    ("overhead_seconds", "measured.overhead.total", "of the whole trial beyond its steady steps"),
    ("start_seconds", "measured.overhead.start", "until its processes were started"),
    ("import_seconds", "measured.overhead.imports", "imports"),
    ("data_seconds", "measured.overhead.data", "making or finding the data"),
    ("build_seconds", "measured.overhead.build", "building the model"),
    ("first_step_seconds", "measured.overhead.first_step", "the first step"),
    ("warmup_seconds", "measured.overhead.warmup", "the other steps of the warm-up"),
    ("profile_seconds", "measured.overhead.profile", "more steps, under the profiler"),
    ("closing_seconds", "measured.overhead.closing", "after the last step"),
    ("other_seconds", "measured.overhead.other", "interpreter, launcher, leaving"),
    ("cleanup_seconds", "measured.overhead.cleanup", "until nothing of it was left"),
    ("host_memory_peak_bytes", "measured.host_memory_peak", "of all its processes"),
    ("device_memory_peak_bytes", "measured.device_memory.device", "as the driver sees it"),
    ("allocated_peak_bytes", "measured.device_memory.allocated", "tensors on the device"),
    ("reserved_peak_bytes", "measured.device_memory.reserved", "held by the allocator for them"),
    ("allocator_retries", "measured.device_memory.retries", "after freeing what it kept"),
    ("joules", "measured.joules", "of its GPUs, over the steady steps"),
    ("samples_per_joule", "measured.samples_per_joule", "over the steady steps"),
    ("others_cores", "measured.interference.other_cores", "CPUs that others used meanwhile"),
    ("disturbed", "measured.is_disturbed", "whether others may have slowed it down"),
    ("left", "record.trial.left", "what could not be cleaned up"),
)


def trial_dict(view: TrialView) -> dict[str, Any]:
    found = {key: to_json(_follow(view, path), omit_defaults=True) for key, path, _ in KEYS}
    return {"format": FORMAT, **found}


def trials_dict(views: Sequence[TrialView]) -> dict[str, Any]:
    """A trial; or its repeats, with their mean throughput and its interval beside them."""
    if len(views) == 1:
        return trial_dict(views[0])
    mean = mean_of(views)
    return {
        "format": FORMAT,
        "trials": [trial_dict(view) for view in views],
        "ok": sum(view.is_ok for view in views),
        **{key: _follow(mean, path) for key, path in _MEAN_KEYS},
    }


def _follow(value: Any, path: str) -> Any:
    for name in path.split("."):
        if value is None:
            return None
        value = getattr(value, name)
    return value
