"""What is shown of a trial, made once from its run folder; terminal and JSON only write it down."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.analysis.throughput import (
    LEARNT_FROM,
    Combined,
    Spread,
    combined,
    students_t,
)
from stepscope.analysis.trial import (
    Measurement,
    RankRecord,
    TrialRecord,
    measure,
    number,
    samples_per_step,
)
from stepscope.records import Ending, Outcome
from stepscope.report.format import share_text
from stepscope.report.view import OUTCOMES, Tone, flattened
from stepscope.runs.reader import Run, open_run
from stepscope.runs.trial import known_spread, read_trial

_REPEATS = 5
"""What is advised: the fewest that tell a spread of their own."""
_LONGER = 4
"""How many times as long a trial is advised to take that cannot be judged."""
_STDERR_LINES = 5
_ADVICE: dict[Outcome, str] = {
    Outcome.GPU_OOM: "Give a smaller --batch-size; --accumulate keeps the global batch",
    Outcome.HOST_OOM: "Give fewer --workers, a smaller --prefetch or a smaller --batch-size",
    Outcome.SHM_FULL: "Give fewer --workers or a smaller --prefetch, or enlarge /dev/shm "
    "(docker run --shm-size)",
    Outcome.TIMEOUT: "Give it more time, or less to do",
}
_LIMITS = {Outcome.GPU_OOM: "gpu_memory", Outcome.HOST_OOM: "memory"}
"""What could be raised, where it was what the trial ran into."""


@dataclass(frozen=True)
class TrialView:
    """A trial, ready to be shown. Texts are as they were recorded: whoever draws escapes them."""

    name: str
    folder: Path
    ending: Ending
    outcome: str
    tone: Tone
    workload: Mapping[str, Any]
    """All knobs, those that were left open as the trial resolved them."""
    told: Mapping[str, Any]
    """What its first rank said of itself."""
    limits: Mapping[str, Any]
    trial: Mapping[str, Any]
    global_batch: int | None
    measured: Measurement
    cause: tuple[str, ...]
    """What ended it, unless it ended well: the most telling first."""
    advice: str
    """What to do next."""

    @property
    def is_ok(self) -> bool:
        return self.ending.outcome is Outcome.OK

    @property
    def warmup_steps(self) -> int:
        """All that were cut; the first step always is."""
        return min(self.measured.steps, self.measured.steady.warmup + 1)

    @property
    def samples_per_second(self) -> float | None:
        return self.measured.rate.per_second if self.measured.rate else None


def trial_view(run: Run | Path | str, ending: Ending | None = None) -> TrialView:
    """Read a trial, by its run or the folder of it, and compute all that is shown.

    `ending` is for one that is over but could not write that down: the disk was full.
    """
    if not isinstance(run, Run):
        run = open_run(run)
    if ending is not None and run.ending.outcome is Outcome.RUNNING:
        run.ending = ending
    record = read_trial(run)
    label, tone = OUTCOMES[run.ending.outcome]
    measured = measure(record, run.recorded(), known_spread(record))
    return TrialView(
        name=run.name,
        folder=run.path,
        ending=run.ending,
        outcome=label,
        tone=tone,
        workload={**record.workload, **(record.told.get("knobs") or {})},
        told=record.told,
        limits=record.limits,
        trial=record.trial,
        global_batch=samples_per_step(record),
        measured=measured,
        cause=() if run.ending.outcome is Outcome.OK else tuple(_causes(run.ending, record)),
        advice=_advice(run, record, measured),
    )


def mean_of(views: Sequence[TrialView]) -> Combined | None:
    """The mean rate of repeats that ended well; None without two of them."""
    rates = [view.samples_per_second for view in views if view.is_ok]
    told = [rate for rate in rates if rate is not None]
    spread = next((view.measured.spread for view in views if view.measured.spread), None)
    return combined(told, spread) if len(told) > 1 and spread else None


def _causes(ending: Ending, record: TrialRecord) -> list[str]:
    """What the ranks or the allocator said, what was counted, and what was printed last."""
    evidence = dict(ending.evidence)
    printed, message = evidence.pop("stderr", None) or [], evidence.pop("message", None)
    errors = [
        _error_text(record, rank.rank, rank.told.get("error"))
        for rank in sorted(record.ranks, key=_failed_at)
    ]
    said = [text for text in dict.fromkeys(errors) if text] or [str(message or "")]
    news = [text for text in said if text and text != ending.reason]
    counts = [f"{what} {value}" for what, value in flattened(evidence) if value != "0"]
    counted = ", ".join(counts)
    return [*news, *([counted] if counted else []), *map(str, printed[-_STDERR_LINES:])]


def _failed_at(rank: RankRecord) -> float:
    """The first to fail tells why; the others fail for the lack of it."""
    return number(rank.told, "error", "monotonic_ns") or 0.0


def _error_text(record: TrialRecord, rank: int, error: Any) -> str:
    if not isinstance(error, Mapping):
        return ""
    of_rank = f"rank {rank}: " if len(record.ranks) > 1 else ""
    message = str(error.get("message") or "").strip()
    if message.startswith("Caught "):  # with the traceback of a loader's worker
        return f"{of_rank}{error.get('summary') or message}"
    return f"{of_rank}{error.get('type') or 'Error'}: {message}"


def _advice(run: Run, record: TrialRecord, measured: Measurement) -> str:
    outcome = run.ending.outcome
    if outcome is Outcome.OK:
        return _to_be_surer(record, measured)
    if outcome is Outcome.RUNNING:
        return ""
    paths, advice = run.paths, _hint(record) or _ADVICE.get(outcome)
    if advice is None and outcome is Outcome.CRASHED and _says_something(paths.stderr_log):
        return f"All that it said: {paths.stderr_log}"
    advice = advice or f"Again: {_again(record.trial)}"
    limit = _LIMITS.get(outcome)
    if limit and number(record.limits, limit, "asked") is not None:
        advice += f"; or allow more with --{limit.replace('_', '-')}"
    if _says_something(paths.trial_stacks):
        advice += f". Where it stood: {paths.trial_stacks}"
    return advice


def _says_something(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def _hint(record: TrialRecord) -> str | None:
    """What a rank itself advised when it failed."""
    errors = (rank.told.get("error") for rank in record.ranks)
    hints = (error.get("hint") for error in errors if isinstance(error, Mapping))
    return next((str(hint) for hint in hints if hint), None)


def _to_be_surer(record: TrialRecord, measured: Measurement) -> str:
    rate, spread = measured.rate, measured.spread
    if rate is None or not measured.steady.steady:
        return f"To judge it, let it take longer: {_longer(record)}"
    if spread is None or (number(record.trial, "repeats") or 1) > 1:
        return ""
    if rate.within > spread.cv:
        return f"To be surer, let it take longer: {_longer(record)}"
    return _with_repeats(record.trial, _REPEATS, spread)


def more_repeats(view: TrialView, repeats: int, spread: Spread) -> str:
    """What would make the mean of so many repeats surer."""
    return _with_repeats(view.trial, max(_REPEATS, 2 * repeats), spread)


def _with_repeats(trial: Mapping[str, Any], repeats: int, spread: Spread) -> str:
    half = students_t(max(spread.dof, LEARNT_FROM)) * spread.cv / math.sqrt(repeats)
    return f"To be surer, of about ± {share_text(half)}: {_again(trial, 'repeat', repeats)}"


def _longer(record: TrialRecord) -> str:
    for knob in ("steps", "epochs"):
        length = number(record.workload, knob)
        if length:
            return _again(record.trial, knob, round(length * _LONGER))
    seconds = number(record.workload, "seconds") or number(record.told, "phases", "training") or 15
    return _again(record.trial, "seconds", math.ceil(seconds * _LONGER))


def _again(trial: Mapping[str, Any], option: str = "", value: int = 0) -> str:
    """The command that made a trial, as one would type it, with an option set anew."""
    words = trial.get("command")
    command = [str(word) for word in words] if isinstance(words, list) else []
    flag = f"--{option}"
    if flag in command:
        del command[command.index(flag) : command.index(flag) + 2]
    command = [word for word in command if not word.startswith(f"{flag}=")]
    new = [flag, str(value)] if option else []
    return shlex.join([*command, *new]) if command else " ".join(["the same command", *new])
