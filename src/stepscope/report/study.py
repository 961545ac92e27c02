"""What is shown of a study, made once; terminal, page, CSV and JSON only write it down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from stepscope.analysis.study.configurations import as_good
from stepscope.analysis.study.records import (
    ENERGY,
    MEMORY,
    THROUGHPUT,
    Configuration,
    Level,
    StudyAnalysis,
)
from stepscope.records import Outcome
from stepscope.report.format import rate_text, share_text
from stepscope.report.outcomes import OUTCOMES, Tone
from stepscope.report.studyeffects import (
    CurveView,
    EffectsView,
    FrontView,
    Ranking,
    curve_of,
    effects_of,
    front_of,
    ranking_of,
)
from stepscope.report.studypoints import Point, ordered, points_of
from stepscope.report.studywords import (
    about_text,
    counted,
    rate_interval,
    ratio_text,
)
from stepscope.studies.result import MACHINE, Result
from stepscope.studies.spec import levels_text

if TYPE_CHECKING:
    from stepscope.studies.design import Design

_NOTHING = "Nothing has finished yet."
_MANY_DISTURBED = 0.25
"""Of the trials that count: a few among many hardly move a mean, and are marked."""
_NONE_TRAINED = "None of the trials trained, so there is nothing to compare."
_FAILED_WORDS = {
    Outcome.GPU_OOM: "ran out of memory",
    Outcome.HOST_OOM: "ran out of memory",
    Outcome.SHM_FULL: "ran out of shared memory",
}


@dataclass(frozen=True)
class BlockLine:
    """A block of trials, with how its sentinel did."""

    number: int
    trials: int
    sentinel_rate: float | None
    flagged: bool
    reasons: Sequence[str] = ()
    rerun: bool = False
    """Whether its trials were run again."""
    began: float = 0.0
    """Seconds since 1970."""


@dataclass(frozen=True)
class RunningNow:
    """Who is at it, and where they are."""

    pid: int
    since: float
    trial: str
    share: float | None = None
    phase: str = ""


@dataclass(frozen=True)
class StudyContents:
    """All that is known of a study, as its folder tells it."""

    name: str
    folder: Path
    machine: str
    """In words."""
    design: Design
    planned: int
    results: Sequence[Result]
    """All attempts, also of sentinels."""
    counted: Sequence[Result]
    """Those that count, one per trial."""
    skipped: Sequence[tuple[Mapping[str, Level], str]]
    """Combinations that are not tried, each with the reason."""
    pending: int
    blocks: Sequence[BlockLine]
    analysis: StudyAnalysis
    spent_s: float = 0.0
    left_s: float | None = None
    running: RunningNow | None = None
    remarks: Sequence[str] = ()
    disturbed: int = 0
    """Of those that count, how many others disturbed, also when they were tried again."""


@dataclass(frozen=True)
class Best:
    """The fastest configuration of all, or of one group."""

    group: str
    """Empty for all."""
    configuration: Configuration
    rate: str
    """With its interval."""
    levels: str
    as_good: tuple[str, ...]
    """Those that cannot be told from it, by what they have otherwise."""
    beats: str


@dataclass(frozen=True)
class SkippedGroup:
    """Combinations that were left out for the same reason."""

    why: str
    count: int
    example: str


@dataclass(frozen=True)
class StudyView:
    """A study, ready to be shown. Texts are as they were said: whoever draws escapes them."""

    contents: StudyContents
    state: str
    tone: Tone
    headline: str
    about: str
    """What all trials have in common, and the machine."""
    now: str
    """What runs at the moment; empty where nothing does."""
    warning: str
    """Why not to trust what follows; empty where there is no reason."""
    lack: str
    """Why there is nothing to compare; empty where there is."""
    bests: tuple[Best, ...]
    rankings: tuple[Ranking, ...]
    effects: tuple[EffectsView, ...]
    curves: tuple[CurveView, ...]
    fronts: tuple[FrontView, ...]
    not_measured: tuple[str, ...]
    factors: tuple[str, ...]
    """Names of what differs between trials, in the order of the design."""
    points: tuple[Point, ...]
    failures: tuple[Result, ...]
    """Attempts that answered nothing."""
    skipped: tuple[SkippedGroup, ...]
    remarks: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        return self.contents.name

    @property
    def blocks(self) -> Sequence[BlockLine]:
        return self.contents.blocks

    @property
    def analysis(self) -> StudyAnalysis:
        return self.contents.analysis

    @property
    def flagged(self) -> tuple[BlockLine, ...]:
        return tuple(block for block in self.blocks if block.flagged)

    @property
    def noise(self) -> str:
        """`20 blocks, 2 disturbed, 1 of them run again`."""
        flagged = len(self.flagged)
        again = sum(block.rerun for block in self.flagged)
        parts = [counted(len(self.blocks), "block")]
        parts.append(f"{flagged:,} disturbed" if flagged else "none disturbed")
        if again:
            parts.append(f"{again:,} of them run again" if flagged > 1 else "run again")
        return ", ".join(parts)


def study_view(contents: StudyContents) -> StudyView:
    """Compute and put into words all that is shown of a study."""
    analysis, factors = contents.analysis, _factor_names(contents)
    state, tone = _state(contents)
    return StudyView(
        contents=contents,
        state=state,
        tone=tone,
        headline=_headline(contents),
        about=_about(contents),
        now=_now(contents.running),
        warning=_warning(contents),
        lack=_lack(contents),
        bests=tuple(_bests(analysis, factors)),
        rankings=tuple(ranking_of(each) for each in analysis.sensitivity if each.effects),
        effects=effects_of(analysis.effects),
        curves=tuple(curve_of(each, factors) for each in analysis.curves),
        fronts=tuple(front_of(each, factors) for each in analysis.fronts),
        not_measured=tuple(_not_measured(analysis)),
        factors=factors,
        points=points_of(analysis.configurations, contents.counted, factors),
        failures=tuple(each for each in contents.results if not each.is_result),
        skipped=_skipped(contents.skipped),
        remarks=tuple(dict.fromkeys((*analysis.remarks, *contents.remarks))),
    )


def _factor_names(contents: StudyContents) -> tuple[str, ...]:
    names = [factor.name for factor in contents.design.factors]
    names += [factor.name for factor in contents.analysis.factors]
    names += [MACHINE] if any(result.machine for result in contents.results) else []
    return tuple(dict.fromkeys(names))


def _state(contents: StudyContents) -> tuple[str, Tone]:
    if contents.running:
        return "running", "neutral"
    if contents.pending:
        return "not finished", "warning"
    return "finished", "warning" if _warning(contents) else "good"


def _warning(contents: StudyContents) -> str:
    if contents.disturbed < _MANY_DISTURBED * max(1, len(contents.counted)):
        return ""
    trials = counted(len(contents.counted), "trial")
    return (
        f"{contents.disturbed} of {trials} were disturbed by others, and there is nothing better: "
        "do not trust what follows. When the machine is idle, raise `reruns` under `blocks` in the "
        "design, and run the study again"
    )


def _headline(contents: StudyContents) -> str:
    """`48 of 60 trials, 3 ran out of memory, 5 combinations skipped, 2 to go (about 4 min)`."""
    done = len(contents.counted)
    all_of = counted(contents.planned, "trial")
    parts = [all_of if done == contents.planned else f"{done:,} of {all_of}"]
    parts += [f"{count:,} {words}" for words, count in _failed(contents.counted)]
    if contents.skipped:
        parts.append(f"{counted(len(contents.skipped), 'combination')} skipped")
    if contents.pending:
        left = about_text(contents.left_s)
        parts.append(f"{contents.pending:,} to go" + (f" (about {left})" if left else ""))
    return ", ".join(parts)


def _failed(results: Sequence[Result]) -> list[tuple[str, int]]:
    outcomes = Counter(each.outcome for each in results if not each.is_ok)
    words: Counter[str] = Counter()
    for outcome, count in sorted(outcomes.items(), key=lambda each: list(Outcome).index(each[0])):
        words[_FAILED_WORDS.get(outcome, OUTCOMES[outcome][0])] += count
    return list(words.items())


def _about(contents: StudyContents) -> str:
    took = about_text(contents.spent_s) if contents.spent_s else ""
    parts = (levels_text(contents.design.fixed), contents.machine, f"took {took}" if took else "")
    return " · ".join(part for part in parts if part)


def _now(running: RunningNow | None) -> str:
    if running is None:
        return ""
    share = share_text(running.share) if running.share is not None else ""
    where = ", ".join(part for part in (running.phase, share) if part)
    return f"{running.trial} ({where})" if where else running.trial


def _lack(contents: StudyContents) -> str:
    if contents.analysis.configurations:
        return ""
    return _NONE_TRAINED if contents.counted else _NOTHING


def _bests(analysis: StudyAnalysis, factors: Sequence[str]) -> Iterator[Best]:
    """The best of all; where there are several models, the best of each, as they do not compare."""
    groups = [each.group for each in analysis.sensitivity if each.group]
    noise = next((e.noise for e in analysis.effects if e.response.key == THROUGHPUT), None)
    for group in groups or [{}]:
        inside = [c for c in analysis.configurations if _is_in(c.levels, group)]
        if inside:
            names = set(as_good(inside, noise) if group else analysis.as_good)
            yield _best(inside, group, factors, [c for c in inside[1:] if c.name in names])


def _is_in(levels: Mapping[str, Level], group: Mapping[str, Level]) -> bool:
    return all(levels.get(name) == level for name, level in group.items())


def _best(
    inside: Sequence[Configuration],
    group: Mapping[str, Level],
    factors: Sequence[str],
    rivals: Sequence[Configuration],
) -> Best:
    first = inside[0]
    rate = f"{rate_text(first.values.get(THROUGHPUT))} samples/s"
    interval = rate_interval(first.low, first.high)
    own = [name for name in factors if name not in group] or list(factors)
    return Best(
        group=levels_text(group),
        configuration=first,
        rate=f"{rate} ({interval})" if interval else rate,
        levels=levels_text(ordered(first.levels, own)),
        as_good=tuple(levels_text(_otherwise(each.levels, first.levels, own)) for each in rivals),
        beats=_beats([each.values[THROUGHPUT] for each in inside if THROUGHPUT in each.values]),
    )


def _otherwise(
    levels: Mapping[str, Level], best: Mapping[str, Level], factors: Sequence[str]
) -> dict[str, Level]:
    return {
        name: level for name, level in ordered(levels, factors).items() if level != best.get(name)
    }


def _beats(rates: Sequence[float]) -> str:
    if len(rates) < 2 or min(rates) <= 0:
        return ""
    best = max(rates)
    slowest = f"{ratio_text(best / min(rates))} times the slowest"
    if len(rates) < 4:
        return slowest
    return f"{slowest}, {ratio_text(best / median(rates))} times the median of {len(rates):,}"


def _not_measured(analysis: StudyAnalysis) -> Iterator[str]:
    measured = {each.response.key for each in analysis.effects}
    measured |= {key for each in analysis.configurations for key in each.values}
    if not analysis.configurations:
        return
    if ENERGY not in measured:
        yield "Energy was not measured: no GPU that tells it."
    if not measured.intersection(MEMORY):
        yield "Memory was not measured."


def _skipped(skipped: Sequence[tuple[Mapping[str, Level], str]]) -> tuple[SkippedGroup, ...]:
    """By reason, the most frequent first."""
    counts = Counter(why for _, why in skipped)
    examples: dict[str, str] = {}
    for levels, why in skipped:
        examples.setdefault(why, levels_text(levels))
    return tuple(SkippedGroup(why, count, examples[why]) for why, count in counts.most_common())
