"""Details of a failed trial, the most informative first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.analysis.trial.measurement import TrialRecord
from stepscope.records import ExitStatus, Outcome
from stepscope.report.kit.format import plural
from stepscope.trials.heartbeat import PHASES
from stepscope.trials.limits.spec import size_text

_STDERR_LINES = 5
_KILLED = (Outcome.TIMEOUT, Outcome.HOST_OOM)  # standard error does not show the cause
_MARKERS = re.compile(r"[\s^~]*")  # lines of a traceback that mark a part of the line above
_WARNING = re.compile(r".*:\d+: \w*Warning: ")
_FATAL = re.compile("Fatal Python error")  # first line of faulthandler


def failure_details(exit_status: ExitStatus, record: TrialRecord) -> list[str]:
    """Return the errors of the ranks, the progress, counted OOM kills and the error output."""
    evidence = exit_status.evidence
    # The first rank to fail shows the cause; the other ranks fail because it is missing.
    failed = [(rank.rank, rank.facts.error) for rank in record.ranks if rank.facts.error]
    errors = []
    for rank, error in sorted(failed, key=lambda each: each[1].monotonic_ns):
        prefix = f"rank {rank}: " if len(record.ranks) > 1 else ""
        if error.text == exit_status.reason and not prefix:
            errors.append(f"at {error.where}" if error.where else "")
        else:
            location = f" (at {error.where})" if error.where else ""
            errors.append(f"{prefix}{error.text}{location}")
    if not failed:
        errors = [str(evidence.get("message") or "")]
    lines = [text for text in dict.fromkeys(errors) if text and text != exit_status.reason]
    lines += filter(None, (_progress(exit_status, record), _memory_details(exit_status, record)))
    if failed or exit_status.outcome in _KILLED:
        return lines
    return lines + _error_output(evidence.get("stderr") or [])


def _progress(exit_status: ExitStatus, record: TrialRecord) -> str:
    """Return the last step, or the phase if there are no steps."""
    first, evidence = record.first, exit_status.evidence
    phase = str(evidence.get("phase") or first.phase)
    if phase == "closing" and first.error:  # it closed because of the error
        phase = ""
    logged = min((len(rank.steps) for rank in record.ranks), default=0)
    steps = logged or int(evidence.get("steps") or 0)
    if steps and phase not in ("profile", PHASES["profile"], "closing"):
        progress = f"at step {steps:,}"
    else:
        progress = f"while {PHASES.get(phase, phase)}" if phase else ""
    location = evidence.get("stalled_at")
    return ", ".join(filter(None, (progress, f"last seen at {location}" if location else "")))


def _memory_details(exit_status: ExitStatus, record: TrialRecord) -> str:
    evidence, texts = exit_status.evidence, []
    if exit_status.outcome is Outcome.HOST_OOM:
        if (memory := record.limits.memory) and memory.peak is not None:
            peak, limit = size_text(memory.peak, memory.requested), size_text(memory.requested)
            texts.append(f"peak {peak} of {limit} including page cache")
        largest = evidence.get("largest")  # bytes by process, from the soft limit
        if isinstance(largest, Mapping) and largest:
            texts.append(f"the largest process used {size_text(max(largest.values()))}")
    elif exit_status.signal != "SIGKILL":  # otherwise the reason includes the OOM kills
        for prefix, where in (("cgroup", "in the cgroup"), ("machine", "on the machine")):
            before, after = (evidence.get(f"{prefix}_oom_kills_{w}") for w in ("before", "after"))
            kills = 0 if before is None or after is None else after - before
            if kills > 0:
                recorded = f"{plural(kills, 'was', 'were')} recorded {where} during the trial"
                texts.append(f"{kills} {plural(kills, 'OOM kill')} {recorded}")
    return ", ".join(filter(None, texts))


def _error_output(stderr: Sequence[Any]) -> list[str]:
    """Return the last lines of standard error, or the first ones of a crash in native code."""
    lines: list[str] = []
    is_warning = False
    for line in map(str, stderr):
        is_warning_code = is_warning and line[:1].isspace()  # the line of code that warns
        is_warning = bool(_WARNING.match(line))
        if not (is_warning or is_warning_code or _MARKERS.fullmatch(line)):
            lines.append(line)
    fatal = next((index for index, line in enumerate(lines) if _FATAL.match(line)), None)
    return lines[-_STDERR_LINES:] if fatal is None else lines[fatal : fatal + _STDERR_LINES]
