"""How a trial ended, and why: from its status, what its ranks said, and what the kernel counted."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stepscope.capture.outcome import Evidence, judge, signal_name
from stepscope.records import Ending, Outcome

_SHM_WORDS = re.compile(
    r"unable to (?:write to|open shared|resize|mmap)[^\n]*(?:No space left|\(28\))"
    r"|unable to allocate shared memory\(shm\)"
    r"|out of shared memory"
    r"|insufficient shared memory"
    r"|No space left on device: '/dev/shm"
    r"|No space left on device[^\n]*(?:torch_|psm_|/dev/shm)",
    re.IGNORECASE,
)
"""How PyTorch, its workers and multiprocessing say that /dev/shm is full."""
_STDERR_LINES = 20


@dataclass(frozen=True)
class Stopped:
    """Why the runner ended the trial itself."""

    outcome: Outcome
    reason: str
    evidence: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Seen:
    """All that is known of a trial that is over."""

    status: int
    ranks: Sequence[Mapping[str, Any]]
    """What each rank left of itself."""
    expected_ranks: int
    stopped: Stopped | None = None
    kills: int = 0
    """Processes that the kernel killed in the trial's own memory group."""
    counters: Mapping[str, int] = field(default_factory=dict)
    before: Evidence = field(default_factory=lambda: Evidence(None, None))
    after: Evidence = field(default_factory=lambda: Evidence(None, None))
    shm_share: float | None = None
    stderr: str = ""
    disk_is_full: bool = False
    """Of the run folder: then nobody could write down what happened."""

    @property
    def done(self) -> bool:
        return sum(bool(rank.get("done")) for rank in self.ranks) == self.expected_ranks

    @property
    def errors(self) -> list[Mapping[str, Any]]:
        """The first in time first: when a rank fails, the others fail for the lack of it."""
        errors = [rank["error"] for rank in self.ranks if rank.get("error")]
        return sorted(errors, key=lambda error: error.get("monotonic_ns") or 0)


def judge_trial(seen: Seen) -> Ending:
    """The outcome with its cause. Memory comes first: who lacks it hangs, crashes or is stopped in
    ways that look like something else."""
    ending = _judge(seen)
    if ending.outcome is Outcome.OK:
        return ending
    tail = last_lines(seen.stderr)
    extra: dict[str, Any] = {"stderr": tail} if tail else {}
    if seen.counters:
        extra["counters"] = dict(seen.counters)
    return replace(ending, evidence={**ending.evidence, **extra})


def _judge(seen: Seen) -> Ending:
    stopped = seen.stopped
    if stopped and stopped.outcome in (Outcome.INTERRUPTED, Outcome.HOST_OOM):
        return _of_stop(stopped)
    base = judge(seen.status, seen.before, seen.after, None, False, None)
    if seen.done and base.outcome is Outcome.OK:
        return replace(base, reason="it trained to its end")
    if seen.kills > 0:
        return _host_oom(seen, base)
    if base.outcome is Outcome.HOST_OOM and not stopped:
        return base
    for said in (_gpu_oom(seen, base), _shm_full(seen, base), _no_host_memory(seen, base)):
        if said is not None:
            return said
    if stopped:
        return _of_stop(stopped)
    return _crashed(seen, base)


def _of_stop(stopped: Stopped) -> Ending:
    return Ending(stopped.outcome, stopped.reason, evidence=dict(stopped.evidence))


def _host_oom(seen: Seen, base: Ending) -> Ending:
    many = "a process" if seen.kills == 1 else f"{seen.kills} processes"
    reason = f"the kernel killed {many} of the trial at its memory limit"
    return Ending(Outcome.HOST_OOM, reason, base.exit_code, base.signal, {"oom_kills": seen.kills})


def _gpu_oom(seen: Seen, base: Ending) -> Ending | None:
    message = next((e["message"] for e in seen.errors if e.get("kind") == "gpu_oom"), None)
    if message is None:
        return None
    reason = str(message).partition(". ")[0].strip()
    return Ending(Outcome.GPU_OOM, reason, base.exit_code, base.signal, {"message": str(message)})


def _no_host_memory(seen: Seen, base: Ending) -> Ending | None:
    """Where memory was refused, nobody had to be killed for it."""
    error = next((e for e in seen.errors if e.get("kind") == "host_oom"), None)
    if error is None:
        return None
    said = {"message": str(error.get("message"))}
    return Ending(Outcome.HOST_OOM, str(error.get("summary")), base.exit_code, base.signal, said)


def _shm_full(seen: Seen, base: Ending) -> Ending | None:
    texts = [str(e.get("message", "")) for e in seen.errors] + [seen.stderr]
    found = next((match for text in texts if (match := _SHM_WORDS.search(text))), None)
    is_full = seen.shm_share is not None and seen.shm_share >= 0.98 and not seen.stopped
    if found is None and not is_full:
        return None
    share = f", {seen.shm_share:.0%} in use" if seen.shm_share is not None else ""
    said = {"message": found[0]} if found else {}
    return Ending(
        Outcome.SHM_FULL,
        f"shared memory (/dev/shm) was full{share}",
        base.exit_code,
        base.signal,
        {"shm_share": seen.shm_share, **said},
    )


def _crashed(seen: Seen, base: Ending) -> Ending:
    silent = _silent_rank(seen)
    if silent is not None:
        return Ending(Outcome.CRASHED, silent, base.exit_code, base.signal)
    error = next(iter(seen.errors), None)
    if error is not None:
        reason = str(error.get("summary") or error.get("type"))
        return Ending(
            Outcome.CRASHED, reason, base.exit_code, base.signal, {"message": error.get("message")}
        )
    if seen.disk_is_full:
        reason = f"{base.reason}; the disk of its run folder is full"
        return Ending(Outcome.CRASHED, reason, base.exit_code, base.signal, {"disk_is_full": True})
    if base.outcome is Outcome.OK:
        return Ending(Outcome.CRASHED, "it left before its training was done", base.exit_code)
    return replace(base, outcome=Outcome.CRASHED)


def _silent_rank(seen: Seen) -> str | None:
    """The rank that ended without a word, and not because the launcher ended it: when one fails,
    the launcher ends those that still live, and others complain that it is gone."""
    if seen.expected_ranks == 1:
        return None
    told = {rank.get("rank"): rank for rank in seen.ranks}
    codes = {int(rank): int(code) for rank, code in _EXIT_CODES.findall(seen.stderr)}
    for number in range(seen.expected_ranks):
        rank, code = told.get(number, {}), codes.get(number)
        if rank.get("done") or rank.get("error") or _was_dismissed(rank.get("pid"), code, seen):
            continue
        return f"rank {number} {_left_how(code)}"
    return None


def _was_dismissed(pid: int | None, code: int | None, seen: Seen) -> bool:
    """Whether the launcher ended a rank since another had failed. It says so, unless it was told
    to log less."""
    dismissed = _DISMISSED.findall(seen.stderr)
    if dismissed:
        return str(pid) in dismissed
    return code == -signal.SIGTERM and bool(seen.errors)


def _left_how(code: int | None) -> str:
    if code is None:
        return "ended without a word"
    return f"was killed by {signal_name(-code)}" if code < 0 else f"left with code {code}"


_EXIT_CODES = re.compile(r"rank\s*:\s*(\d+) \(local_rank[^\n]*\n\s*exitcode\s*:\s*(-?\d+)")
_DISMISSED = re.compile(r"Sending process (\d+) closing signal")
"""Both as the elastic launcher tells them."""


def last_lines(text: str, count: int = _STDERR_LINES) -> list[str]:
    """The last lines that say something."""
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
