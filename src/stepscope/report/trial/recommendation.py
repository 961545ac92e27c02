"""The recommended next step after a trial, as options of `stepscope trial`."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from stepscope.analysis.trial.measurement import Measurement, TrialRecord
from stepscope.analysis.trial.throughput import MIN_NOISE_DOF, students_t
from stepscope.records import NATIVE_CRASH_SIGNALS, ExitStatus, Outcome
from stepscope.records.trial import ProcessNoise
from stepscope.report.kit.format import share_text
from stepscope.runs.paths import RunPaths
from stepscope.workloads.spec import DEFAULT_SECONDS, LEAST_STEPS, option_name, switches

_REPEATS = 5  # the fewest repeats that replace the assumed noise
_LONGER = 4  # factor for the duration of a trial that is too short
_OUTPUT_OPTIONS = {"--json", "--quiet", "-q"}  # removed from a recommended command
_FLAGS = {*_OUTPUT_OPTIONS, "--profile", *switches()}  # options without a value


class RecommendationKind(Enum):
    """Kinds of recommendations, with the template of their text."""

    NONE = ""
    HINT = "{hint}"
    IDLE_MACHINE = "Run the trial again on an idle machine:"
    STEADY_STATE = "Run longer to reach a steady state:"
    LONGER = "Run longer for a narrower interval:"
    REPEAT = "Repeat the trial for an interval of about ± {half_width}:"
    AGAIN = "Run the trial again:"
    GPU_MEMORY = "Reduce {settings} (increase --accumulate to keep the global batch size)"
    HOST_MEMORY = "Reduce {settings}"
    MACHINE_MEMORY = "Free memory on this machine, or use a smaller workload"
    SHARED_MEMORY = "Reduce {settings}, or enlarge /dev/shm (docker run --shm-size)"
    TIME = "Increase --timeout, or reduce the workload"
    TIME_WITH_STACKS = "Increase --timeout, or reduce the workload. Stacks at the timeout:"
    STALLED = (
        "Training may be stuck on a sample, a lock or another rank. If it is only slow, increase "
        "--stall-timeout. Stacks at the timeout:"
    )
    DISK = "Free disk space, or choose another folder with --out DIR"
    NATIVE_CRASH = "The stack of the crash is at the end of:"
    ERROR_OUTPUT = "Full error output:"


@dataclass(frozen=True)
class TrialRecommendation:
    """A recommendation: a setting to change, settings to reduce, a limit to raise, or a file to
    read."""

    kind: RecommendationKind = RecommendationKind.NONE
    setting: str = ""  # to change in the command
    value: int | None = None
    reduce: tuple[str, ...] = ()  # settings to reduce
    raise_limit: str = ""
    half_width: float | None = None  # of the expected interval, relative to the rate
    file: Path | None = None
    hint: str = ""  # from the error of a rank


_WITH_COMMAND = "IDLE_MACHINE", "STEADY_STATE", "LONGER", "REPEAT", "AGAIN"
"""Kinds that are followed by a command."""


def recommend(
    exit_status: ExitStatus, record: TrialRecord, measured: Measurement, paths: RunPaths
) -> TrialRecommendation:
    if exit_status.outcome is Outcome.RUNNING:
        return TrialRecommendation()
    if exit_status.outcome is not Outcome.OK:
        errors = (rank.facts.error for rank in record.ranks)
        if hint := next((error.hint for error in errors if error and error.hint), ""):
            return TrialRecommendation(RecommendationKind.HINT, hint=hint)
        return _after_failure(exit_status, record, measured, paths)
    rate, noise = measured.rate, measured.noise
    if measured.has_interference:
        return TrialRecommendation(RecommendationKind.IDLE_MACHINE)
    if rate is None or not measured.steady.steady:
        return _longer(RecommendationKind.STEADY_STATE, record, measured)
    if noise is None or record.trial.repeats > 1:
        return TrialRecommendation()
    if rate.relative_error > noise.cv:
        return _longer(RecommendationKind.LONGER, record, measured)
    return recommend_repeats(noise)


def recommend_repeats(noise: ProcessNoise, repeats: int = 0) -> TrialRecommendation:
    """Recommend more repeats, with the width of the interval to expect."""
    count = max(_REPEATS, 2 * repeats)
    half = students_t(max(noise.dof, MIN_NOISE_DOF)) * noise.cv / math.sqrt(count)
    return TrialRecommendation(RecommendationKind.REPEAT, "repeat", count, half_width=half)


def _longer(
    kind: RecommendationKind, record: TrialRecord, measured: Measurement
) -> TrialRecommendation:
    """Recommend several times the duration, and at least the minimum number of steps."""
    settings, first = record.settings, record.first
    if settings.steps:
        return TrialRecommendation(kind, "steps", max(LEAST_STEPS, round(settings.steps * _LONGER)))
    if settings.epochs:
        least = LEAST_STEPS / (first.steps_per_epoch or LEAST_STEPS)
        return TrialRecommendation(kind, "epochs", math.ceil(max(least, settings.epochs * _LONGER)))
    seconds = settings.seconds or first.phases.get("training") or DEFAULT_SECONDS
    least = LEAST_STEPS * measured.step.median if measured.step else 0.0
    return TrialRecommendation(kind, "seconds", math.ceil(max(least, seconds * _LONGER)))


def _after_failure(
    exit_status: ExitStatus, record: TrialRecord, measured: Measurement, paths: RunPaths
) -> TrialRecommendation:
    def has_text(file: Path) -> bool:
        return file.exists() and file.stat().st_size > 0

    evidence, limits = exit_status.evidence, record.limits
    match exit_status.outcome:
        case Outcome.HOST_OOM:
            raise_limit = "memory" if limits.memory else ""
            reduce: tuple[str, ...] = ("batch_size",) if measured.steps else ()
            if record.settings.workers:
                reduce = ("workers", "prefetch", "batch_size")
            kind = RecommendationKind.HOST_MEMORY
            if not reduce and not raise_limit:
                kind = RecommendationKind.MACHINE_MEMORY
            return TrialRecommendation(kind, reduce=reduce, raise_limit=raise_limit)
        case Outcome.GPU_OOM:
            raise_limit = "gpu_memory" if limits.gpu_memory else ""
            return TrialRecommendation(
                RecommendationKind.GPU_MEMORY, reduce=("batch_size",), raise_limit=raise_limit
            )
        case Outcome.SHM_FULL:
            return TrialRecommendation(
                RecommendationKind.SHARED_MEMORY, reduce=("workers", "prefetch")
            )
        case Outcome.TIMEOUT if has_text(paths.trial_stacks):
            is_stalled = evidence.get("limit") == "stall_timeout"
            kind = RecommendationKind.STALLED if is_stalled else RecommendationKind.TIME_WITH_STACKS
            return TrialRecommendation(kind, file=paths.trial_stacks)
        case Outcome.TIMEOUT:
            return TrialRecommendation(RecommendationKind.TIME)
    if evidence.get("disk_is_full"):
        return TrialRecommendation(RecommendationKind.DISK)
    if exit_status.outcome is Outcome.CRASHED and has_text(paths.stderr_log):
        is_native = (evidence.get("rank_signal") or exit_status.signal) in NATIVE_CRASH_SIGNALS
        kind = RecommendationKind.NATIVE_CRASH if is_native else RecommendationKind.ERROR_OUTPUT
        return TrialRecommendation(kind, file=paths.stderr_log)
    return TrialRecommendation(RecommendationKind.AGAIN)


def recommendation_text(recommendation: TrialRecommendation, command: Sequence[str]) -> str:
    """Return a sentence, followed by a line with the command or path to copy, if any."""
    options = [option_name(setting) for setting in recommendation.reduce]
    settings = " or ".join(filter(None, (", ".join(options[:-1]), *options[-1:])))
    text = recommendation.kind.value.format(
        hint=recommendation.hint,
        settings=settings,
        half_width=share_text(recommendation.half_width),
    )
    if recommendation.raise_limit:
        limit = option_name(recommendation.raise_limit)
        text = f"{text}, or raise {limit}" if settings else f"Raise {limit}"
    if recommendation.kind.name in _WITH_COMMAND:
        return f"{text}\n{_command(command, recommendation.setting, recommendation.value)}"
    return f"{text}\n{recommendation.file}" if recommendation.file else text


def _command(command: Sequence[str], setting: str, value: int | None) -> str:
    """Return the command of a trial with an option added or replaced, quoted for a shell."""
    new = [option_name(setting), str(value)] if setting else []
    if not command:
        return " ".join(["stepscope trial …", *new])
    parts: dict[str, list[str]] = {}  # by option name, so that the last value wins, or by index
    rest = list(enumerate([*command, *new]))
    while rest:
        index, word = rest.pop(0)
        name, equals, _ = word.partition("=")
        part = [word]
        if not word.startswith("-"):
            name = str(index)
        elif equals or word in _FLAGS or not rest:
            name = name.replace("--no-", "--")
        else:
            part.append(rest.pop(0)[1])
        if name not in _OUTPUT_OPTIONS:
            parts.pop(name, None)
            parts[name] = part
    return shlex.join(word for part in parts.values() for word in part)
