"""What to do after a trial: chosen as data, worded once, as options of `stepscope trial`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from stepscope.analysis.trial.measurement import Measurement, TrialRecord
from stepscope.analysis.trial.throughput import LEARNT_FROM, students_t
from stepscope.records import NATIVE_CRASH_SIGNALS, Ending, Outcome
from stepscope.records.trial import ProcessNoise
from stepscope.report.kit.format import share_text
from stepscope.runs.paths import RunPaths
from stepscope.workloads.spec import DEFAULT_SECONDS, LEAST_STEPS, option_name, switches

_REPEATS = 5  # what is recommended: the fewest that tell a noise of their own
_LONGER = 4  # how many times as long a trial should take that cannot be judged
_OF_OUTPUT = {"--json", "--quiet", "-q"}
"""Left out of a suggested command: its user wants to see what comes of it."""
_FLAGS = {*_OF_OUTPUT, "--profile", *switches()}  # options without a value


class AdviceKind(Enum):
    """Why something is recommended; the text is the sentence for it."""

    NONE = ""
    HINT = "{hint}"
    IDLE_MACHINE = "Try again when the machine is idle:"
    LONGER_TO_JUDGE = "To judge it, let it take longer:"
    LONGER = "To be surer, let it take longer:"
    REPEAT = "For about ± {half_width}:"
    AGAIN = "Again:"
    GPU_MEMORY = "Give {less}; --accumulate keeps the global batch"
    HOST_MEMORY = "Give {less}"
    MACHINE_MEMORY = "Free memory on this machine, or give it less to hold"
    SHARED_MEMORY = "Give fewer --workers or {less}, or enlarge /dev/shm (docker run --shm-size)"
    TIME = "Give it more time, or less to do"
    TIME_WITH_STACKS = "Give it more time, or less to do. Where it stood:"
    STALLED = (
        "A sample, a lock or another rank blocks it; if it is only slow, give a larger --hang. "
        "See where it stood:"
    )
    DISK = "Free some of the disk, or choose another place with --out DIR"
    NATIVE_CRASH = "Where it crashed is at the end of"
    PRINTED = "All that it said:"


@dataclass(frozen=True)
class TrialAdvice:
    """A recommendation: settings to give anew or to reduce, a limit to raise, a file to read."""

    kind: AdviceKind = AdviceKind.NONE
    setting: str = ""
    value: int | None = None  # to run the same command with
    reduce: tuple[str, ...] = ()  # settings of which less would do
    raise_limit: str = ""
    half_width: float | None = None  # of the interval that is to be expected, as a share
    file: Path | None = None
    hint: str = ""  # what a rank itself said to do


_AGAIN = "IDLE_MACHINE", "LONGER_TO_JUDGE", "LONGER", "REPEAT", "AGAIN"
"""Kinds that end with the command to run."""
_LESS = {
    "workers": "fewer --workers",
    "prefetch": "a smaller --prefetch",
    "batch_size": "a smaller --batch-size",
}


def advice_for(
    ending: Ending, record: TrialRecord, measured: Measurement, paths: RunPaths
) -> TrialAdvice:
    if ending.outcome is Outcome.RUNNING:
        return TrialAdvice()
    if ending.outcome is not Outcome.OK:
        errors = (rank.facts.error for rank in record.ranks)
        if hint := next((error.hint for error in errors if error and error.hint), ""):
            return TrialAdvice(AdviceKind.HINT, hint=hint)
        return _after_failure(ending, record, measured, paths)
    rate, noise = measured.rate, measured.noise
    if measured.is_disturbed:
        return TrialAdvice(AdviceKind.IDLE_MACHINE)
    if rate is None or not measured.steady.steady:
        return _longer(AdviceKind.LONGER_TO_JUDGE, record, measured)
    if noise is None or record.trial.repeats > 1:
        return TrialAdvice()
    if rate.within > noise.cv:
        return _longer(AdviceKind.LONGER, record, measured)
    return repeat_advice(noise)


def repeat_advice(noise: ProcessNoise, repeats: int = 0) -> TrialAdvice:
    """More repeats than one, or than so many, and how sure they would be."""
    more = max(_REPEATS, 2 * repeats)
    half = students_t(max(noise.dof, LEARNT_FROM)) * noise.cv / math.sqrt(more)
    return TrialAdvice(AdviceKind.REPEAT, "repeat", more, half_width=half)


def _longer(kind: AdviceKind, record: TrialRecord, measured: Measurement) -> TrialAdvice:
    """Several times as long, and long enough to be judged."""
    settings, first = record.settings, record.first
    if settings.steps:
        return TrialAdvice(kind, "steps", max(LEAST_STEPS, round(settings.steps * _LONGER)))
    if settings.epochs:
        least = LEAST_STEPS / (first.steps_per_epoch or LEAST_STEPS)
        return TrialAdvice(kind, "epochs", math.ceil(max(least, settings.epochs * _LONGER)))
    seconds = settings.seconds or first.phases.get("training") or DEFAULT_SECONDS
    least = LEAST_STEPS * measured.step.median if measured.step else 0.0
    return TrialAdvice(kind, "seconds", math.ceil(max(least, seconds * _LONGER)))


def _after_failure(
    ending: Ending, record: TrialRecord, measured: Measurement, paths: RunPaths
) -> TrialAdvice:
    def has_text(file: Path) -> bool:
        return file.exists() and file.stat().st_size > 0

    evidence, limits = ending.evidence, record.limits
    match ending.outcome:
        case Outcome.HOST_OOM:
            raised = "memory" if limits.memory else ""
            reduce: tuple[str, ...] = ("batch_size",) if measured.steps else ()
            if record.settings.workers:
                reduce = ("workers", "prefetch", "batch_size")
            is_limited = bool(reduce or raised)
            kind = AdviceKind.HOST_MEMORY if is_limited else AdviceKind.MACHINE_MEMORY
            return TrialAdvice(kind, reduce=reduce, raise_limit=raised)
        case Outcome.GPU_OOM:
            raised = "gpu_memory" if limits.gpu_memory else ""
            return TrialAdvice(AdviceKind.GPU_MEMORY, reduce=("batch_size",), raise_limit=raised)
        case Outcome.SHM_FULL:
            return TrialAdvice(AdviceKind.SHARED_MEMORY, reduce=("prefetch",))
        case Outcome.TIMEOUT if has_text(paths.trial_stacks):
            is_stalled = evidence.get("limit") == "hang"  # it did not just go on for too long
            kind = AdviceKind.STALLED if is_stalled else AdviceKind.TIME_WITH_STACKS
            return TrialAdvice(kind, file=paths.trial_stacks)
        case Outcome.TIMEOUT:
            return TrialAdvice(AdviceKind.TIME)
    if evidence.get("disk_is_full"):
        return TrialAdvice(AdviceKind.DISK)
    if ending.outcome is Outcome.CRASHED and has_text(paths.stderr_log):
        is_native = (evidence.get("rank_signal") or ending.signal) in NATIVE_CRASH_SIGNALS
        kind = AdviceKind.NATIVE_CRASH if is_native else AdviceKind.PRINTED
        return TrialAdvice(kind, file=paths.stderr_log)
    return TrialAdvice(AdviceKind.AGAIN)


def advice_text(advice: TrialAdvice, command: Sequence[str]) -> str:
    """The first line is to be read; one below it, a command or a path, is to be copied."""
    less = [_LESS[setting] for setting in advice.reduce]
    ways = " or ".join(filter(None, (", ".join(less[:-1]), *less[-1:])))
    text = advice.kind.value.format(
        hint=advice.hint, less=ways, half_width=share_text(advice.half_width)
    )
    if advice.raise_limit:
        allow = f"allow more with --{advice.raise_limit.replace('_', '-')}"
        text = f"{text}; or {allow}" if ways else allow.capitalize()
    if advice.kind.name in _AGAIN:
        return f"{text}\n{_again(command, advice.setting, advice.value)}"
    return f"{text}\n{advice.file}" if advice.file else text


def _again(command: Sequence[str], setting: str, value: int | None) -> str:
    """The command that made a trial, as one would type it, with an option set anew."""
    new = [option_name(setting), str(value)] if setting else []
    if not command:
        return " ".join(["the same command", *new])
    parts: dict[str, list[str]] = {}  # options by their name, which is said once; others by place
    rest = list(enumerate([*command, *new]))
    while rest:
        place, word = rest.pop(0)
        name, equals, _ = word.partition("=")
        part = [word]
        if not word.startswith("-"):
            name = str(place)
        elif equals or word in _FLAGS or not rest:
            name = name.replace("--no-", "--")
        else:
            part.append(rest.pop(0)[1])
        if name not in _OF_OUTPUT:
            parts.pop(name, None)
            parts[name] = part
    return shlex.join(word for part in parts.values() for word in part)
