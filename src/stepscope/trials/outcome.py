"""The outcome of a trial, from its exit status, the errors of its ranks and kernel counters."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stepscope.capture.outcome import SHM_FULL_SHARE, KernelEvidence, judge, signal_name
from stepscope.records import ExitStatus, Outcome
from stepscope.records.trial import RankError, RankFacts
from stepscope.trials.limits.cgroups import ControlValue

_SHM_ERRORS = re.compile(
    r"unable to (?:write to|open shared|resize|mmap)[^\n]*(?:No space left|\(28\))"
    r"|unable to allocate shared memory\(shm\)"
    r"|out of shared memory"
    r"|insufficient shared memory"
    r"|No space left on device: '/dev/shm"
    r"|No space left on device[^\n]*(?:torch_|psm_|/dev/shm)",
    re.IGNORECASE,
)
"""Error messages of frameworks, loader workers and multiprocessing for a full /dev/shm."""
_STDERR_LINES = 20
_EXIT_CODES = re.compile(r"rank\s*:\s*(\d+) \(local_rank[^\n]*\n\s*exitcode\s*:\s*(-?\d+)")
_TERMINATED = re.compile(r"Sending process (\d+) closing signal")
"""Output of PyTorch's elastic launcher."""


@dataclass(frozen=True)
class Stopped:
    """Why the runner ended the trial."""

    outcome: Outcome
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialEvidence:
    status: int
    ranks: Sequence[RankFacts]  # of the ranks that wrote any
    expected_ranks: int
    stopped: Stopped | None = None
    kills: int = 0  # OOM kills in the cgroup of the trial
    counters: Mapping[str, ControlValue] = field(default_factory=dict)
    before: KernelEvidence = field(default_factory=lambda: KernelEvidence(None, None))
    after: KernelEvidence = field(default_factory=lambda: KernelEvidence(None, None))
    shm_share: float | None = None
    stderr: str = ""
    disk_is_full: bool = False  # of the run folder, so that errors could not be written

    @property
    def errors(self) -> list[RankError]:
        """The errors in order of time: when a rank fails, other ranks fail because of it."""
        errors = [rank.error for rank in self.ranks if rank.error]
        return sorted(errors, key=lambda error: error.monotonic_ns)


def judge_trial(seen: TrialEvidence) -> ExitStatus:
    exit_status = _judge(seen)
    if exit_status.outcome is Outcome.OK:
        return exit_status
    tail = last_lines(seen.stderr)
    extra: dict[str, Any] = {"stderr": tail} if tail else {}
    if seen.counters:
        extra["counters"] = dict(seen.counters)
    return replace(exit_status, evidence={**exit_status.evidence, **extra})


def _judge(seen: TrialEvidence) -> ExitStatus:
    """Check memory first: a lack of memory can look like a stall, a crash or a timeout."""
    stopped = seen.stopped
    if stopped and stopped.outcome in (Outcome.INTERRUPTED, Outcome.HOST_OOM):
        return ExitStatus(stopped.outcome, stopped.reason, evidence=dict(stopped.evidence))
    base = judge(seen.status, seen.before, seen.after, None, False, None)

    def exit_status(outcome: Outcome, reason: str, evidence: dict[str, Any]) -> ExitStatus:
        return replace(base, outcome=outcome, reason=reason, evidence=evidence)

    all_done = sum(rank.done for rank in seen.ranks) == seen.expected_ranks
    if all_done and base.outcome is Outcome.OK:
        return replace(base, reason="training completed")
    if seen.kills > 0:
        killed = "a process" if seen.kills == 1 else f"{seen.kills} processes"
        reason = f"the kernel killed {killed} of the trial at the memory limit"
        return exit_status(Outcome.HOST_OOM, reason, {"oom_kills": seen.kills})
    if base.outcome is Outcome.HOST_OOM and not stopped:
        return base
    by_kind = {error.kind: error for error in reversed(seen.errors)}
    if error := by_kind.get("gpu_oom"):
        reason = error.message.partition(". ")[0].strip()
        return exit_status(Outcome.GPU_OOM, reason, {"message": error.message})
    texts = [error.message for error in seen.errors] + [seen.stderr]
    found = next((match for text in texts if (match := _SHM_ERRORS.search(text))), None)
    share = seen.shm_share
    if found or (share is not None and share >= SHM_FULL_SHARE and not stopped):
        in_use = f" ({share:.0%} in use)" if share is not None else ""
        evidence = {"shm_share": share, **({"message": found[0]} if found else {})}
        return exit_status(Outcome.SHM_FULL, f"shared memory (/dev/shm) was full{in_use}", evidence)
    if error := by_kind.get("host_oom"):  # an allocation failed without an OOM kill
        return exit_status(Outcome.HOST_OOM, error.summary, {"message": error.message})
    if stopped:
        return ExitStatus(stopped.outcome, stopped.reason, evidence=dict(stopped.evidence))
    return _crashed(seen, base)


def _crashed(seen: TrialEvidence, base: ExitStatus) -> ExitStatus:
    def crashed(reason: str, **evidence: Any) -> ExitStatus:
        return replace(base, outcome=Outcome.CRASHED, reason=reason, evidence=evidence)

    if silent := _silent_rank(seen):
        rank, code = silent
        if code is None:
            return crashed(f"rank {rank} exited without an error message")
        if code >= 0:
            return crashed(f"rank {rank} exited with code {code}")
        name = signal_name(-code)
        return crashed(f"rank {rank} was killed by {name}", rank_signal=name)
    if seen.errors:
        error = seen.errors[0]
        return crashed(error.summary or error.type, message=error.message)
    if seen.disk_is_full:
        return crashed(f"{base.reason}; the disk with the run folder is full", disk_is_full=True)
    if base.outcome is Outcome.OK:
        return crashed("exited before training finished")
    return replace(base, outcome=Outcome.CRASHED)


def _silent_rank(seen: TrialEvidence) -> tuple[int, int | None] | None:
    """Return the rank that exited without an error, with its exit code if known.

    Ranks that the launcher ended do not count: when a rank fails, the launcher ends the remaining
    ones, or they fail because of the missing rank.
    """
    if seen.expected_ranks == 1:
        return None
    ranks = {rank.rank: rank for rank in seen.ranks}
    codes = {int(rank): int(code) for rank, code in _EXIT_CODES.findall(seen.stderr)}
    terminated = _TERMINATED.findall(seen.stderr)
    for number in range(seen.expected_ranks):
        rank, code = ranks.get(number, RankFacts()), codes.get(number)
        # The launcher logs which ranks it ends, unless its log level hides it.
        if terminated:
            was_terminated = str(rank.pid) in terminated
        else:
            was_terminated = code == -signal.SIGTERM and bool(seen.errors)
        if not (rank.done or rank.error or was_terminated):
            return number, code
    return None


def last_lines(text: str, count: int = _STDERR_LINES) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
