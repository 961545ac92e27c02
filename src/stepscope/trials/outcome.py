"""The outcome of a trial: from its status, what its ranks said, and what the kernel counted."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stepscope.capture.outcome import SHM_FULL_SHARE, KernelEvidence, judge, signal_name
from stepscope.records import Ending, Outcome
from stepscope.records.trial import RankError, RankFacts
from stepscope.trials.limits.cgroups import ControlValue

_SHM_WORDS = re.compile(
    r"unable to (?:write to|open shared|resize|mmap)[^\n]*(?:No space left|\(28\))"
    r"|unable to allocate shared memory\(shm\)"
    r"|out of shared memory"
    r"|insufficient shared memory"
    r"|No space left on device: '/dev/shm"
    r"|No space left on device[^\n]*(?:torch_|psm_|/dev/shm)",
    re.IGNORECASE,
)
"""How frameworks, their workers and multiprocessing say that /dev/shm is full."""
_STDERR_LINES = 20
_EXIT_CODES = re.compile(r"rank\s*:\s*(\d+) \(local_rank[^\n]*\n\s*exitcode\s*:\s*(-?\d+)")
_DISMISSED = re.compile(r"Sending process (\d+) closing signal")
"""Both as torch's elastic launcher writes them."""


@dataclass(frozen=True)
class Stopped:
    """Why the runner ended the trial itself."""

    outcome: Outcome
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrialEvidence:
    status: int
    ranks: Sequence[RankFacts]  # of the ranks that left any
    expected_ranks: int
    stopped: Stopped | None = None
    kills: int = 0  # processes that the kernel killed in the trial's own memory group
    counters: Mapping[str, ControlValue] = field(default_factory=dict)
    before: KernelEvidence = field(default_factory=lambda: KernelEvidence(None, None))
    after: KernelEvidence = field(default_factory=lambda: KernelEvidence(None, None))
    shm_share: float | None = None
    stderr: str = ""
    disk_is_full: bool = False  # of the run folder: then nobody could write down what happened

    @property
    def errors(self) -> list[RankError]:
        """The first in time first: when a rank fails, the others fail for the lack of it."""
        errors = [rank.error for rank in self.ranks if rank.error]
        return sorted(errors, key=lambda error: error.monotonic_ns)


def judge_trial(seen: TrialEvidence) -> Ending:
    ending = _judge(seen)
    if ending.outcome is Outcome.OK:
        return ending
    tail = last_lines(seen.stderr)
    extra: dict[str, Any] = {"stderr": tail} if tail else {}
    if seen.counters:
        extra["counters"] = dict(seen.counters)
    return replace(ending, evidence={**ending.evidence, **extra})


def _judge(seen: TrialEvidence) -> Ending:
    """Memory comes first: what lacks it hangs, crashes or is stopped in ways that look like
    something else."""
    stopped = seen.stopped
    if stopped and stopped.outcome in (Outcome.INTERRUPTED, Outcome.HOST_OOM):
        return Ending(stopped.outcome, stopped.reason, evidence=dict(stopped.evidence))
    base = judge(seen.status, seen.before, seen.after, None, False, None)

    def ending(outcome: Outcome, reason: str, evidence: dict[str, Any]) -> Ending:
        return replace(base, outcome=outcome, reason=reason, evidence=evidence)

    all_done = sum(rank.done for rank in seen.ranks) == seen.expected_ranks
    if all_done and base.outcome is Outcome.OK:
        return replace(base, reason="it trained to its end")
    if seen.kills > 0:
        killed = "a process" if seen.kills == 1 else f"{seen.kills} processes"
        reason = f"the kernel killed {killed} of the trial at its memory limit"
        return ending(Outcome.HOST_OOM, reason, {"oom_kills": seen.kills})
    if base.outcome is Outcome.HOST_OOM and not stopped:
        return base
    by_kind = {error.kind: error for error in reversed(seen.errors)}
    if error := by_kind.get("gpu_oom"):
        reason = error.message.partition(". ")[0].strip()
        return ending(Outcome.GPU_OOM, reason, {"message": error.message})
    texts = [error.message for error in seen.errors] + [seen.stderr]
    words = next((match for text in texts if (match := _SHM_WORDS.search(text))), None)
    share = seen.shm_share
    if words or (share is not None and share >= SHM_FULL_SHARE and not stopped):
        in_use = f", {share:.0%} in use" if share is not None else ""
        evidence = {"shm_share": share, **({"message": words[0]} if words else {})}
        return ending(Outcome.SHM_FULL, f"shared memory (/dev/shm) was full{in_use}", evidence)
    if error := by_kind.get("host_oom"):  # memory was refused: nobody had to be killed for it
        return ending(Outcome.HOST_OOM, error.summary, {"message": error.message})
    if stopped:
        return Ending(stopped.outcome, stopped.reason, evidence=dict(stopped.evidence))
    return _crashed(seen, base)


def _crashed(seen: TrialEvidence, base: Ending) -> Ending:
    def crashed(reason: str, **evidence: Any) -> Ending:
        return replace(base, outcome=Outcome.CRASHED, reason=reason, evidence=evidence)

    if silent := _silent_rank(seen):
        rank, code = silent
        if code is None:
            return crashed(f"rank {rank} ended without a word")
        if code >= 0:
            return crashed(f"rank {rank} left with code {code}")
        name = signal_name(-code)
        return crashed(f"rank {rank} was killed by {name}", rank_signal=name)
    if seen.errors:
        error = seen.errors[0]
        return crashed(error.summary or error.type, message=error.message)
    if seen.disk_is_full:
        return crashed(f"{base.reason}; the disk of its run folder is full", disk_is_full=True)
    if base.outcome is Outcome.OK:
        return crashed("it left before its training was done")
    return replace(base, outcome=Outcome.CRASHED)


def _silent_rank(seen: TrialEvidence) -> tuple[int, int | None] | None:
    """The rank that ended without a word, with its exit code if that is known.

    One that the launcher ended is not meant: when a rank fails, the launcher ends those that still
    live, and others complain that it is gone.
    """
    if seen.expected_ranks == 1:
        return None
    ranks = {rank.rank: rank for rank in seen.ranks}
    codes = {int(rank): int(code) for rank, code in _EXIT_CODES.findall(seen.stderr)}
    dismissed = _DISMISSED.findall(seen.stderr)
    for number in range(seen.expected_ranks):
        rank, code = ranks.get(number, RankFacts()), codes.get(number)
        # The launcher says whom it ended, unless it was told to log less.
        if dismissed:
            was_dismissed = str(rank.pid) in dismissed
        else:
            was_dismissed = code == -signal.SIGTERM and bool(seen.errors)
        if not (rank.done or rank.error or was_dismissed):
            return number, code
    return None


def last_lines(text: str, count: int = _STDERR_LINES) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
