"""Probes of host memory: each is a trial of one batch, in fresh processes within the limit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from stepscope.analysis.memory.model import Parts
from stepscope.errors import CannotTry
from stepscope.fit.probes.client import probe_folder
from stepscope.fit.probes.contract import HostFacts, ProbeOutcome
from stepscope.fit.thresholds import PRESSED
from stepscope.records import Outcome
from stepscope.records.codec import salvage
from stepscope.records.trial import LimitFacts, MemoryLimit, RankError, RankFacts
from stepscope.runs.trial import read_json
from stepscope.trials.heartbeat import Progress
from stepscope.trials.limits.spec import Limits
from stepscope.trials.request import TrialRequest
from stepscope.trials.runner import CompletedTrial, run_repeats
from stepscope.trials.state import machine_lock, machine_turn
from stepscope.workloads.probing import Kind, ProbeRequest, ProbeResult, Subject
from stepscope.workloads.spec import Workload

_INTERVAL_S = 0.25
"""Only the limit matters here, and that is the kernel's."""
_PAGE_TABLES = 1 / 512
"""What the kernel itself holds for each byte of a process."""
_KINDS: dict[Outcome, Kind] = {
    Outcome.OK: "ok",
    Outcome.HOST_OOM: "host_oom",
    Outcome.SHM_FULL: "host_oom",
    Outcome.TIMEOUT: "timeout",
}


class TrialProbes:
    """`with TrialProbes(workload, limits, …) as probes`: nothing stays of a probe but its outcome.

    They take turns with the trials of studies on this machine. `cap` of a request is another limit
    than the usual one.
    """

    def __init__(
        self,
        workload: Workload,
        limits: Limits,
        tell: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        self._workload = workload
        self._limits = limits
        self._tell = tell
        self._show = show
        self.subject = Subject("cpu", "CPU", 0, 0, None, optimizer=workload.optimizer)
        """Known once a probe has passed."""

    def __enter__(self) -> TrialProbes:
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
            self._show(f"batch {batch:,}: {progress.phase}")

        with machine_turn(self._tell, machine_lock()):
            (tried,) = run_repeats(trial, self._tell, show)
        if tried.asked_to_end:
            raise KeyboardInterrupt
        if tried.leftovers:
            left = "; ".join(tried.leftovers)
            raise CannotTry(
                f"No other batch was tried: {left} is left of batch {batch:,}",
                "End it, then try again",
            )
        outcome, subject = read_trial_probe(tried, workload, request)
        if outcome.last.is_ok and not self.subject.parameters:
            self.subject = subject
        shutil.rmtree(tried.paths.folder, ignore_errors=True)
        return outcome


@dataclass(frozen=True)
class _HostMemory:
    before: int = 0
    peak: int = 0
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class _ProbedRank(RankFacts):
    parts: Parts = field(default_factory=Parts)
    host_memory: _HostMemory = _HostMemory()
    note: str = ""


def read_trial_probe(
    tried: CompletedTrial, workload: Workload, request: ProbeRequest
) -> tuple[ProbeOutcome, Subject]:
    """What a trial left, as far as it came."""
    from stepscope.runs.trial import read_steps

    paths, ending = tried.paths, tried.ending
    ranks = [
        salvage(_ProbedRank, read_json(paths.trial_rank(rank))) for rank in range(workload.ranks)
    ]
    first, is_ok = ranks[0], ending.outcome is Outcome.OK
    limit = salvage(LimitFacts, read_json(paths.run_json).get("limits")).memory
    error, data = first.error or RankError(), first.data
    reached = first.phase or "start"
    # Each step of the first rank, from the end of the one before it. The first has none.
    steps = read_steps(paths.trial_steps(0))
    spent = steps["wait_ns"] + steps["copy_ns"].clip(0) + steps["compute_ns"].clip(0)
    phase = reached
    if ending.outcome is Outcome.SHM_FULL:
        phase = "/dev/shm"
    elif reached in ("first step", "training"):
        phase = f"step {len(spent) + 1}"
    place = f" ({error.where})" if error.where else ""
    result = ProbeResult(
        workload.batch_size,
        _KINDS.get(ending.outcome, "error"),
        phase="" if is_ok else phase,
        reserved_peak=_peak(ranks, limit, workload),
        step_s=tuple(float(ns) / 1e9 for ns in spent),
        kept=first.host_memory.kept,
        parts=first.parts,
        message="" if is_ok else f"{ending.reason}{place}",
        hint=error.hint,
        notes=(first.note,) if first.note else (),
    )
    data_bytes = data.bytes or 0 if data.source == "memory" else 0
    host = HostFacts(
        before=sum(rank.host_memory.before for rank in ranks),
        data_bytes=data_bytes,
        enforced_by=limit.by if limit else "",
        reached=reached,
    )
    # Random data is made as large as it must be.
    is_endless = data_bytes and workload.samples is None
    subject = Subject(
        device="cpu",
        device_name="CPU",
        parameters=first.model.parameters or 0,
        sample_bytes=first.parts.inputs // workload.batch_size,
        samples=None if is_endless else data.samples,
        optimizer=workload.optimizer,
        versions=first.versions,
    )
    return ProbeOutcome(request, (result,), host=host), subject


def _peak(ranks: list[_ProbedRank], limit: MemoryLimit | None, workload: Workload) -> int:
    """Bytes that could not be taken back, of all processes; 0 where it is unknown.

    Where one process does everything, it knows best, since a group counts cached files too. Of
    several, with those that they start, only the group knows the peak.
    """
    of_group = limit.peak or 0 if limit else 0
    own = sum(rank.host_memory.peak for rank in ranks)
    own += int(own * _PAGE_TABLES)
    if limit and of_group and of_group >= limit.asked - PRESSED:
        return 0
    several = workload.ranks > 1 or workload.workers > 0
    return of_group if several and of_group else own
