"""Probes of host memory: each is a trial of one batch, in fresh processes under the limit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from stepscope.analysis.memory.model import Parts
from stepscope.errors import TrialError
from stepscope.fit.probes.client import probe_folder
from stepscope.fit.probes.contract import HostFacts, ProbeOutcome
from stepscope.fit.thresholds import HIDDEN_PEAK_BYTES
from stepscope.records import Outcome
from stepscope.records.codec import salvage
from stepscope.records.trial import LimitFacts, MemoryLimit, RankError, RankFacts
from stepscope.runs.trial import read_json
from stepscope.trials.heartbeat import Progress
from stepscope.trials.limits.spec import Limits
from stepscope.trials.locks import machine_lock, machine_turn
from stepscope.trials.processes.leftovers import check_clean
from stepscope.trials.request import TrialRequest
from stepscope.trials.runner import CompletedTrial, run_repeats
from stepscope.workloads.probing import Kind, ProbeRequest, ProbeResult, Subject
from stepscope.workloads.spec import Workload

_INTERVAL_S = 0.25
"""Coarse, because the kernel enforces the limit."""
_PAGE_TABLE_SHARE = 1 / 512
"""Page tables that the kernel needs for each byte of a process."""
_KINDS: dict[Outcome, Kind] = {
    Outcome.OK: "ok",
    Outcome.HOST_OOM: "host_oom",
    Outcome.SHM_FULL: "host_oom",
    Outcome.TIMEOUT: "timeout",
}


class TrialProbes:
    """Context manager for probes on the host. It deletes everything but the outcomes.

    Probes take turns with the trials of studies on this machine. `cap` of a request overrides the
    memory limit.
    """

    def __init__(
        self,
        workload: Workload,
        limits: Limits,
        notify: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        self._workload = workload
        self._limits = limits
        self._notify = notify
        self._show = show
        self.subject = Subject("cpu", "CPU", 0, 0, None, optimizer=workload.optimizer)
        """Complete once a probe has passed."""

    def __enter__(self) -> TrialProbes:
        for text in check_clean():  # first: `probe_folder` deletes the runs of killed probes
            self._notify(text)
        self._folder = probe_folder()
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
        return [self._run(request) for request in requests]

    def _run(self, request: ProbeRequest) -> ProbeOutcome:
        (batch,) = request.batches
        workload = replace(
            self._workload, batch_size=batch, steps=request.steps, epochs=None, seconds=None
        )
        limits = replace(self._limits, memory=request.cap or self._limits.memory)
        trial = TrialRequest(workload, limits, interval=_INTERVAL_S, out=self._folder, cycle=True)

        def show(number: int, progress: Progress) -> None:
            self._show(f"batch size {batch:,}: {progress.phase}")

        with machine_turn(self._notify, machine_lock(), "fit"):
            (completed,) = run_repeats(trial, self._notify, show)
        if completed.termination_requested:
            raise KeyboardInterrupt
        if completed.leftovers:
            leftovers = "; ".join(completed.leftovers)
            raise TrialError(
                f"Processes of the probe at batch size {batch:,} are still running: {leftovers}",
                "Stop them, then run `stepscope fit` again",
            )
        outcome, subject = read_trial_probe(completed, workload, request)
        if outcome.last.is_ok and not self.subject.parameters:
            self.subject = subject
        shutil.rmtree(completed.paths.folder, ignore_errors=True)
        return outcome


@dataclass(frozen=True)
class _HostMemory:
    before_bytes: int = 0
    peak_bytes: int = 0
    after_step_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class _ProbedRank(RankFacts):
    parts: Parts = field(default_factory=Parts)
    host_memory: _HostMemory = _HostMemory()
    note: str = ""


def read_trial_probe(
    completed: CompletedTrial, workload: Workload, request: ProbeRequest
) -> tuple[ProbeOutcome, Subject]:
    """Read the outcome of a trial, also of one that failed early."""
    from stepscope.runs.trial import read_steps

    paths, exit_status = completed.paths, completed.exit_status
    ranks = [
        salvage(_ProbedRank, read_json(paths.trial_rank(rank))) for rank in range(workload.ranks)
    ]
    first, is_ok = ranks[0], exit_status.outcome is Outcome.OK
    limit = salvage(LimitFacts, read_json(paths.run_json).get("limits")).memory
    error, data = first.error or RankError(), first.data
    last_phase = first.phase or "start"
    # Duration of each step of the first rank, from the end of the step before.
    steps = read_steps(paths.trial_steps(0))
    durations = steps["wait_ns"] + steps["copy_ns"].clip(0) + steps["compute_ns"].clip(0)
    phase = last_phase
    if exit_status.outcome is Outcome.SHM_FULL:
        phase = "/dev/shm"
    elif last_phase in ("first_step", "training") or (last_phase == "closing" and first.error):
        phase = f"step {len(durations) + 1}"
    place = f" ({error.where})" if error.where else ""
    result = ProbeResult(
        workload.batch_size,
        _KINDS.get(exit_status.outcome, "error"),
        phase="" if is_ok else phase,
        reserved_peak_bytes=_peak(ranks, limit, workload),
        step_s=tuple(float(ns) / 1e9 for ns in durations),
        allocated_bytes=first.host_memory.after_step_bytes,
        parts=first.parts,
        message="" if is_ok else f"{exit_status.reason}{place}",
        hint=error.hint,
        notes=(first.note,) if first.note else (),
    )
    data_bytes = data.bytes or 0 if data.source == "memory" else 0
    host = HostFacts(
        before_bytes=sum(rank.host_memory.before_bytes for rank in ranks),
        data_bytes=data_bytes,
        enforced_by=limit.enforced_by if limit else "",
        last_phase=last_phase,
    )
    # Random data is generated as large as needed.
    is_endless = data_bytes and workload.samples is None
    subject = Subject(
        device="cpu",
        device_name="CPU",
        parameters=first.model.parameters or 0,
        sample_bytes=first.parts.inputs_bytes // workload.batch_size,
        samples=None if is_endless else data.samples,
        optimizer=workload.optimizer,
        versions=first.versions,
    )
    return ProbeOutcome(request, (result,), host=host), subject


def _peak(ranks: list[_ProbedRank], limit: MemoryLimit | None, workload: Workload) -> int:
    """Return the peak of unreclaimable memory of all processes, in bytes; 0 if unknown.

    With a single process, its own measurement is best, because a cgroup also counts cached files.
    With several processes, only the cgroup knows the peak.
    """
    cgroup_peak = limit.peak or 0 if limit else 0
    rank_peak = sum(rank.host_memory.peak_bytes for rank in ranks)
    rank_peak += int(rank_peak * _PAGE_TABLE_SHARE)
    if limit and cgroup_peak and cgroup_peak >= limit.requested - HIDDEN_PEAK_BYTES:
        return 0
    has_others = workload.ranks > 1 or workload.workers > 0
    return cgroup_peak if has_others and cgroup_peak else rank_peak
