"""What is shown of a study, made once; terminal, page, CSV and JSON only write it down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from stepscope.report.kit.format import rate_text, share_text
from stepscope.report.kit.outcomes import OUTCOMES, Tone
from stepscope.report.study import effects as effect_views
from stepscope.report.study.configurations import ConfigurationRow, configuration_rows, ordered
from stepscope.report.study.sentences import remark_text
from stepscope.report.study.words import about_text, counted, rate_interval, ratio_text
from stepscope.studies.results import MACHINE, Result
from stepscope.studies.trial_spec import levels_text

if TYPE_CHECKING:
    from stepscope.studies.design.records import Design
    from stepscope.studies.folder import StudyProgress

SkippedCombination = tuple[Mapping[str, Level], str]
"""Its levels, and the reason why it is not tried."""
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
    skipped: Sequence[SkippedCombination]
    pending: int
    blocks: Sequence[BlockLine]
    analysis: StudyAnalysis
    spent_s: float = 0.0
    left_s: float | None = None
    running: StudyProgress | None = None
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
    interval: str
    levels: str
    as_good: tuple[str, ...]
    """Those that cannot be told from it, by what they have otherwise."""
    beats: str


@dataclass(frozen=True)
class SkippedGroup:
    """Combinations that were left out for the same reason."""

    why: str
    combinations: int
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
    rankings: tuple[effect_views.Ranking, ...]
    effects: tuple[effect_views.EffectsView, ...]
    curves: tuple[effect_views.CurveView, ...]
    fronts: tuple[effect_views.FrontView, ...]
    not_measured: tuple[str, ...]
    factors: tuple[str, ...]
    """Names of what differs between trials, in the order of the design."""
    configurations: tuple[ConfigurationRow, ...]
    failures: tuple[Result, ...]
    """Attempts that answered nothing."""
    skipped: tuple[SkippedGroup, ...]
    remarks: tuple[str, ...]

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
    analysis = contents.analysis
    names = [factor.name for factor in (*contents.design.factors, *analysis.factors)]
    names += [MACHINE] if any(result.machine for result in contents.results) else []
    factors = tuple(dict.fromkeys(names))
    warning = _warning(contents)
    state: str = "finished"
    tone: Tone = "warning" if warning else "good"
    if contents.running:
        state, tone = "running", "neutral"
    elif contents.pending:
        state, tone = "not finished", "warning"
    now = ""
    if running := contents.running:
        share = share_text(running.share) if running.share is not None else ""
        where = ", ".join(filter(None, (running.phase, share)))
        now = f"{running.trial} ({where})" if where else running.trial
    ranked = [each for each in analysis.sensitivity if each.effects]
    lack = ""
    if not analysis.configurations:
        lack = _NONE_TRAINED if contents.counted else "Nothing has finished yet."
    took = f"took {about_text(contents.spent_s)}" if contents.spent_s else ""
    about = filter(None, (levels_text(contents.design.fixed), contents.machine, took))
    return StudyView(
        contents=contents,
        state=state,
        tone=tone,
        headline=_headline(contents),
        about=" · ".join(about),
        now=now,
        warning=warning,
        lack=lack,
        bests=tuple(_bests(analysis, factors)),
        rankings=tuple(map(effect_views.ranking_of, ranked)),
        effects=effect_views.effects_of(analysis.effects),
        curves=tuple(effect_views.curve_of(each, factors) for each in analysis.curves),
        fronts=tuple(effect_views.front_of(each, factors) for each in analysis.fronts),
        not_measured=tuple(_not_measured(analysis)),
        factors=factors,
        configurations=configuration_rows(analysis.configurations, contents.counted, factors),
        failures=tuple(each for each in contents.results if not each.is_result),
        skipped=skipped_groups(contents.skipped),
        remarks=tuple(dict.fromkeys((*map(remark_text, analysis.remarks), *contents.remarks))),
    )


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
    failed = [each.outcome for each in contents.counted if not each.is_ok]
    words = Counter(
        _FAILED_WORDS.get(outcome, OUTCOMES[outcome][0])
        for outcome in sorted(failed, key=list(Outcome).index)
    )
    parts += [f"{count:,} {how}" for how, count in words.items()]
    if contents.skipped:
        parts.append(f"{counted(len(contents.skipped), 'combination')} skipped")
    if contents.pending:
        left = about_text(contents.left_s)
        parts.append(f"{contents.pending:,} to go" + (f" (about {left})" if left else ""))
    return ", ".join(parts)


def _bests(analysis: StudyAnalysis, factors: Sequence[str]) -> Iterator[Best]:
    """The best of all; where there are several models, the best of each, as they do not compare."""
    groups = [each.group for each in analysis.sensitivity if each.group]
    noise = next((e.noise for e in analysis.effects if e.response.key == THROUGHPUT), None)
    for group in groups or [{}]:
        inside = [c for c in analysis.configurations if group.items() <= c.levels.items()]
        if not inside:
            continue
        first, *others = inside
        names = set(as_good(inside, noise) if group else analysis.as_good)
        own = [name for name in factors if name not in group] or list(factors)
        levels = ordered(first.levels, own)
        otherwise = (
            {n: v for n, v in ordered(each.levels, own).items() if v != levels.get(n)}
            for each in others
            if each.name in names
        )
        yield Best(
            group=levels_text(group),
            configuration=first,
            rate=f"{rate_text(first.values.get(THROUGHPUT))} samples/s",
            interval=rate_interval(first.low, first.high),
            levels=levels_text(levels),
            as_good=tuple(map(levels_text, otherwise)),
            beats=_beats([each.values[THROUGHPUT] for each in inside if THROUGHPUT in each.values]),
        )


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
    if analysis.configurations and ENERGY not in measured:
        yield "Energy was not measured: no GPU that tells it."
    if analysis.configurations and not measured.intersection(MEMORY):
        yield "Memory was not measured."


def skipped_groups(skipped: Iterable[SkippedCombination]) -> tuple[SkippedGroup, ...]:
    """Combinations by the reason why they are skipped, the most frequent first."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for levels, why in skipped:
        counts[why] += 1
        examples.setdefault(why, levels_text(levels))
    return tuple(SkippedGroup(why, count, examples[why]) for why, count in counts.most_common())
