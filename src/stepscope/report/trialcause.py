"""What ended a trial that did not end well, in words, the most telling first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.analysis.trial import RankRecord, TrialRecord, number
from stepscope.records import Ending, Outcome
from stepscope.report.triallimits import peak_text, size_text

_STDERR_LINES = 5
_EXPLAINED = (Outcome.TIMEOUT, Outcome.HOST_OOM)
"""Ended from outside: what was printed last has nothing to do with it."""
_MARKERS = re.compile(r"[\s^~]*")
"""Lines by which a traceback points at a part of the line above."""
_WARNING = re.compile(r".*:\d+: \w*Warning: ")
_FATAL = "Fatal Python error"
_PHASES = {
    "start": "starting",
    "import": "importing the framework",
    "data": "preparing data",
    "build": "building the model",
    "first step": "taking the first step",
    "profile": "profiling",
}
"""As a rank names them, and in words; a runner that ended a trial has the words already."""


def causes(ending: Ending, record: TrialRecord) -> list[str]:
    """What the ranks or the allocator said, where it was, what was counted or else printed."""
    evidence = ending.evidence
    errors = [
        text
        for rank in sorted(record.ranks, key=_failed_at)
        if (text := _error_text(record, rank, ending.reason))
    ]
    has_error = any(isinstance(rank.told.get("error"), Mapping) for rank in record.ranks)
    message = str(evidence.get("message") or "")
    said = list(dict.fromkeys(errors)) if has_error else [message]
    lines = [text for text in said if text and text != ending.reason]
    lines += [text for text in (_where(ending, record), _counted(ending, record)) if text]
    if has_error or ending.outcome in _EXPLAINED:
        return lines
    return lines + _telling(evidence.get("stderr") or [])


def _failed_at(rank: RankRecord) -> float:
    """The first to fail tells why; the others fail for the lack of it."""
    return number(rank.told, "error", "monotonic_ns") or 0.0


def _error_text(record: TrialRecord, rank: RankRecord, reason: str) -> str:
    """What a rank said of its failure and where that was, less what the reason says already."""
    error = rank.told.get("error")
    if not isinstance(error, Mapping):
        return ""
    of_rank = f"rank {rank.rank}: " if len(record.ranks) > 1 else ""
    text, where = _message(error), error.get("where")
    if text == reason and not of_rank:
        return f"at {where}" if where else ""
    return f"{of_rank}{text}" + (f" (at {where})" if where else "")


def _message(error: Mapping[str, Any]) -> str:
    message = str(error.get("message") or "").strip()
    if error.get("kind") == "workload":  # in our own words
        return message
    if message.startswith("Caught "):  # with the traceback of a loader's worker
        return str(error.get("summary") or message)
    return f"{error.get('type') or 'Error'}: {message}"


def _where(ending: Ending, record: TrialRecord) -> str:
    """How far it had come: by its steps, which are on disk, or else by its phase."""
    place = ending.evidence.get("stood_at")
    stood = f"it stood at {place}" if place else ""
    return ", ".join(text for text in (_progress(ending, record), stood) if text)


def _progress(ending: Ending, record: TrialRecord) -> str:
    phase = str(ending.evidence.get("phase") or record.told.get("phase") or "")
    if phase == "closing" and record.told.get("error"):  # which it did for its error
        phase = ""
    taken = min((len(rank.steps) for rank in record.ranks), default=0)
    steps = taken or int(number(ending.evidence, "steps") or 0)
    if steps and phase not in ("profile", "profiling", "closing"):
        return f"at step {steps:,}"
    return f"while {_PHASES.get(phase, phase)}" if phase else ""


def _counted(ending: Ending, record: TrialRecord) -> str:
    """What was counted of memory, where it was short of it."""
    evidence = ending.evidence
    kills = int(number(evidence, "oom_kills") or 0)
    is_new = kills and "the kernel killed" not in ending.reason
    texts = [f"{_processes(kills)} killed by the kernel"] if is_new else []
    if ending.outcome is Outcome.HOST_OOM:
        texts += [peak_text(record.limits), _largest(evidence.get("largest"))]
    if "OOM kill" not in ending.reason:
        texts += [
            _more_kills(evidence, "cgroup", "its control group"),
            _more_kills(evidence, "machine", "the machine"),
        ]
    return ", ".join(text for text in texts if text)


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes"


def _largest(held: Any) -> str:
    """Of the processes, as the soft limit saw them."""
    sizes = held.values() if isinstance(held, Mapping) else ()
    most = max((size for size in sizes if isinstance(size, int | float)), default=None)
    return "" if most is None else f"the largest of its processes held {size_text(most)}"


def _more_kills(evidence: Mapping[str, Any], prefix: str, who: str) -> str:
    before, after = (number(evidence, f"{prefix}_oom_kills_{when}") for when in ("before", "after"))
    more = int((after or 0) - (before or 0)) if None not in (before, after) else 0
    return f"{who} counted {more} OOM kill{'s' * (more > 1)} meanwhile" if more > 0 else ""


def _telling(printed: Sequence[Any]) -> list[str]:
    """The last lines of standard error, or the first of what a crash in native code wrote."""
    lines: list[str] = []
    warned = False
    for line in map(str, printed):
        of_warning = warned and line[:1].isspace()  # the line of code that warns
        warned = bool(_WARNING.match(line))
        if not (warned or of_warning or _MARKERS.fullmatch(line)):
            lines.append(line)
    fatal = next((place for place, line in enumerate(lines) if line.startswith(_FATAL)), None)
    return lines[-_STDERR_LINES:] if fatal is None else lines[fatal : fatal + _STDERR_LINES]
