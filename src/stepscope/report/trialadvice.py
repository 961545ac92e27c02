"""What to do after a trial. The first line is to be read; those below it, a command or a path, are
to be copied, and so are never wrapped."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stepscope.analysis.throughput import LEARNT_FROM, Spread, students_t
from stepscope.analysis.trial import Measurement, TrialRecord, number
from stepscope.records import Outcome
from stepscope.report.format import share_text
from stepscope.runs.reader import Run

_REPEATS = 5
"""What is advised: the fewest that tell a spread of their own."""
_LONGER = 4
"""How many times as long a trial is advised to take that cannot be judged."""
_LEAST_STEPS = 16
"""Fifteen of them have a length, seven of those may be cut as warm-up, and the eight that are left
are one more than it takes to judge whether they are steady. Trials by time take as many."""
_ADVICE: dict[Outcome, str] = {
    Outcome.GPU_OOM: "Give a smaller --batch-size; --accumulate keeps the global batch",
    Outcome.SHM_FULL: "Give fewer --workers or a smaller --prefetch, or enlarge /dev/shm "
    "(docker run --shm-size)",
    Outcome.TIMEOUT: "Give it more time, or less to do",
}
_STUCK = (
    "A sample, a lock or another rank blocks it; if it is only slow, give a larger --hang. "
    "See where it stood:"
)
_NATIVE = ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGFPE", "SIGILL")
_FLAGS = {
    "--profile", "--pin", "--no-pin", "--persistent", "--no-persistent", "--channels-last",
    "--compile",
}  # fmt: skip
"""Options without a value."""
_OF_OUTPUT = {"--json", "--quiet", "-q"}
"""Who types a suggested command wants to see what comes of it."""


def advice_for(run: Run, record: TrialRecord, measured: Measurement) -> str:
    """What to do next; empty where nothing is to be done."""
    outcome = run.ending.outcome
    if outcome is Outcome.OK:
        return _to_be_surer(record, measured)
    if outcome is Outcome.RUNNING:
        return ""
    return _hint(record) or _after_failure(run, record, measured)


def when_idle(trial: Mapping[str, Any]) -> str:
    """For a rate that others spoilt."""
    return f"Try again when the machine is idle:\n{_again(trial)}"


def with_repeats(trial: Mapping[str, Any], spread: Spread, repeats: int = 0) -> str:
    """How sure more repeats would be than one, or than so many."""
    more = max(_REPEATS, 2 * repeats)
    half = students_t(max(spread.dof, LEARNT_FROM)) * spread.cv / math.sqrt(more)
    return f"For about ± {share_text(half)}:\n{_again(trial, 'repeat', more)}"


def _after_failure(run: Run, record: TrialRecord, measured: Measurement) -> str:
    ending, paths = run.ending, run.paths
    if ending.outcome is Outcome.HOST_OOM:
        return _for_host_memory(record, measured.steps)
    if ending.outcome is Outcome.TIMEOUT and _says_something(paths.trial_stacks):
        is_stuck = ending.evidence.get("limit") == "hang"  # it did not just go on for too long
        words = _STUCK if is_stuck else f"{_ADVICE[ending.outcome]}. Where it stood:"
        return f"{words}\n{paths.trial_stacks}"
    if ending.evidence.get("disk_is_full"):
        return "Free some of the disk, or choose another place with --out DIR"
    if ending.outcome is Outcome.CRASHED and _says_something(paths.stderr_log):
        native = any(name in f"{ending.signal} {ending.reason}" for name in _NATIVE)
        words = "Where it crashed is at the end of" if native else "All that it said:"
        return f"{words}\n{paths.stderr_log}"
    advice = _ADVICE.get(ending.outcome) or f"Again:\n{_again(record.trial)}"
    if ending.outcome is Outcome.GPU_OOM and _is_limited(record, "gpu_memory"):
        advice += "; or allow more with --gpu-memory"
    return advice


def _for_host_memory(record: TrialRecord, steps: int) -> str:
    """What would take less of it: that of workers, or that of batches once there were any."""
    less = []
    if number(record.workload, "workers"):
        less = ["fewer --workers", "a smaller --prefetch", "a smaller --batch-size"]
    elif steps:
        less = ["a smaller --batch-size"]
    ways = " or ".join(text for text in (", ".join(less[:-1]), *less[-1:]) if text)
    if _is_limited(record, "memory"):
        return f"Give {ways}; or allow more with --memory" if ways else "Allow more with --memory"
    return f"Give {ways}" if ways else "Free memory on this machine, or give it less to hold"


def _is_limited(record: TrialRecord, what: str) -> bool:
    return number(record.limits, what, "asked") is not None


def _says_something(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def _hint(record: TrialRecord) -> str | None:
    """What a rank itself advised when it failed."""
    errors = (rank.told.get("error") for rank in record.ranks)
    hints = (error.get("hint") for error in errors if isinstance(error, Mapping))
    return next((str(hint) for hint in hints if hint), None)


def _to_be_surer(record: TrialRecord, measured: Measurement) -> str:
    rate, spread = measured.rate, measured.spread
    if measured.is_disturbed:
        return when_idle(record.trial)
    if rate is None or not measured.steady.steady:
        return f"To judge it, let it take longer:\n{_longer(record, measured)}"
    if spread is None or (number(record.trial, "repeats") or 1) > 1:
        return ""
    if rate.within > spread.cv:
        return f"To be surer, let it take longer:\n{_longer(record, measured)}"
    return with_repeats(record.trial, spread)


def _longer(record: TrialRecord, measured: Measurement) -> str:
    """Several times as long, and long enough to be judged."""
    trial, steps = record.trial, number(record.workload, "steps")
    if steps:
        return _again(trial, "steps", max(_LEAST_STEPS, round(steps * _LONGER)))
    epochs = number(record.workload, "epochs")
    if epochs:
        least = _LEAST_STEPS / (number(record.told, "steps_per_epoch") or _LEAST_STEPS)
        return _again(trial, "epochs", math.ceil(max(least, epochs * _LONGER)))
    seconds = number(record.workload, "seconds") or number(record.told, "phases", "training") or 15
    least = _LEAST_STEPS * measured.step.median if measured.step else 0.0
    return _again(trial, "seconds", math.ceil(max(least, seconds * _LONGER)))


def _again(trial: Mapping[str, Any], option: str = "", value: int = 0) -> str:
    """The command that made a trial, as one would type it, with an option set anew."""
    words = trial.get("command")
    given = [str(word) for word in words] if isinstance(words, list) else []
    new = [f"--{option}", str(value)] if option else []
    parts: dict[str, list[str]] = {}
    for name, part in _parts([*given, *new]):
        if name not in _OF_OUTPUT:
            parts.pop(name, None)
            parts[name] = part
    command = [word for part in parts.values() for word in part]
    return shlex.join(command) if given else " ".join(["the same command", *new])


def _parts(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Words that belong together: options by their name, which is said once, others by place."""
    rest = list(enumerate(words))
    while rest:
        place, word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if not word.startswith("-"):
            yield str(place), [word]
        elif equals or word in _FLAGS | _OF_OUTPUT or not rest:
            yield name.replace("--no-", "--"), [word]
        else:
            yield name, [word, rest.pop(0)[1]]
