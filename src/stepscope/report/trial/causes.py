"""What ended a trial that did not end well, in words, the most telling first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from stepscope.analysis.trial.measurement import TrialRecord
from stepscope.records import Ending, Outcome
from stepscope.report.kit.format import plural
from stepscope.trials.heartbeat import PHASES
from stepscope.trials.limits.spec import size_text

_STDERR_LINES = 5
_FROM_OUTSIDE = (Outcome.TIMEOUT, Outcome.HOST_OOM)
"""What was printed last has nothing to do with such an end."""
_MARKERS = re.compile(r"[\s^~]*")  # lines by which a traceback points at a part of the line above
_WARNING = re.compile(r".*:\d+: \w*Warning: ")
_FATAL = re.compile("Fatal Python error")  # by which faulthandler begins


def causes(ending: Ending, record: TrialRecord) -> list[str]:
    """What the ranks or the allocator said, where it was, what was counted or else printed."""
    evidence = ending.evidence
    # The first to fail tells why; the others fail for the lack of it.
    failed = [(rank.rank, rank.facts.error) for rank in record.ranks if rank.facts.error]
    said = []
    for rank, error in sorted(failed, key=lambda each: each[1].monotonic_ns):
        of_rank = f"rank {rank}: " if len(record.ranks) > 1 else ""
        if error.text == ending.reason and not of_rank:
            said.append(f"at {error.where}" if error.where else "")
        else:
            where = f" (at {error.where})" if error.where else ""
            said.append(f"{of_rank}{error.text}{where}")
    if not failed:
        said = [str(evidence.get("message") or "")]
    lines = [text for text in dict.fromkeys(said) if text and text != ending.reason]
    lines += filter(None, (_progress(ending, record), _counted(ending, record)))
    if failed or ending.outcome in _FROM_OUTSIDE:
        return lines
    return lines + _last_printed(evidence.get("stderr") or [])


def _progress(ending: Ending, record: TrialRecord) -> str:
    """How far it had come: by its steps, which are on disk, or else by its phase."""
    first, evidence = record.first, ending.evidence
    phase = str(evidence.get("phase") or first.phase)
    if phase == "closing" and first.error:  # which it did for its error
        phase = ""
    taken = min((len(rank.steps) for rank in record.ranks), default=0)
    steps = taken or int(evidence.get("steps") or 0)
    if steps and phase not in ("profile", PHASES["profile"], "closing"):
        progress = f"at step {steps:,}"
    else:
        progress = f"while {PHASES.get(phase, phase)}" if phase else ""
    place = evidence.get("stood_at")
    return ", ".join(filter(None, (progress, f"it stood at {place}" if place else "")))


def _counted(ending: Ending, record: TrialRecord) -> str:
    evidence, texts = ending.evidence, []
    if ending.outcome is Outcome.HOST_OOM:
        if (memory := record.limits.memory) and memory.peak is not None:
            peak, asked = size_text(memory.peak, memory.asked), size_text(memory.asked)
            texts.append(f"peak {peak} of {asked}, page cache included")
        held = evidence.get("largest")  # processes with their bytes, as the soft limit saw them
        if isinstance(held, Mapping) and held:
            texts.append(f"the largest of its processes held {size_text(max(held.values()))}")
    elif ending.signal != "SIGKILL":  # else the reason tells what was counted
        for prefix, who in (("cgroup", "its control group"), ("machine", "the machine")):
            before, after = (evidence.get(f"{prefix}_oom_kills_{w}") for w in ("before", "after"))
            more = 0 if before is None or after is None else after - before
            if more > 0:
                texts.append(f"{who} counted {more} {plural(more, 'OOM kill')} meanwhile")
    return ", ".join(filter(None, texts))


def _last_printed(printed: Sequence[Any]) -> list[str]:
    """The last lines of standard error, or the first of what a crash in native code wrote."""
    lines: list[str] = []
    warned = False
    for line in map(str, printed):
        of_warning = warned and line[:1].isspace()  # the line of code that warns
        warned = bool(_WARNING.match(line))
        if not (warned or of_warning or _MARKERS.fullmatch(line)):
            lines.append(line)
    fatal = next((place for place, line in enumerate(lines) if _FATAL.match(line)), None)
    return lines[-_STDERR_LINES:] if fatal is None else lines[fatal : fatal + _STDERR_LINES]
