"""What is shown of a study: terminal, page, CSV and JSON only write it down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from stepscope.analysis.study.configurations import as_good
from stepscope.analysis.study.records import (
    ENERGY,
    MEMORY,
    THROUGHPUT,
    Configuration,
    Sensitivity,
    StudyAnalysis,
)
from stepscope.records import Outcome
from stepscope.report.kit.format import rate_text, share_text
from stepscope.report.kit.outcomes import OUTCOMES, Tone
from stepscope.report.study.configurations import ConfigurationRow, configuration_rows, ordered
from stepscope.report.study.sentences import remark_text
from stepscope.report.study.words import about_text, counted, rate_interval, ratio_text
from stepscope.studies.results import MACHINE, Result
from stepscope.studies.trial_spec import levels_text

if TYPE_CHECKING:
    from stepscope.studies.design.records import Design, SkippedPoint
    from stepscope.studies.folder import StudyProgress

_MANY_DISTURBED = 0.25
"""Of the trials that count: a few among many hardly move a mean, and are marked."""
_FAILED_WORDS = {
    Outcome.GPU_OOM: "ran out of memory",
    Outcome.HOST_OOM: "ran out of memory",
    Outcome.SHM_FULL: "ran out of shared memory",
}


@dataclass(frozen=True)
class BlockLine:
    """A block of trials, with how its reference trial did. Fields are keys of the JSON."""

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
    """All that is known of a study, and how it is put. Texts are as recorded: renderers escape."""

    name: str
    folder: Path
    machine: str
    """In words."""
    design: Design
    planned: int
    results: Sequence[Result]
    """All attempts, also of reference trials."""
    counted: Sequence[Result]
    """Those that count, one per trial."""
    skipped: Sequence[SkippedPoint]
    pending: int
    blocks: Sequence[BlockLine]
    analysis: StudyAnalysis
    spent_s: float = 0.0
    left_s: float | None = None
    running: StudyProgress | None = None
    remarks: Sequence[str] = ()
    disturbed: int = 0
    """Of those that count, how many others disturbed, also when they were tried again."""

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """Names of what differs between trials, in the order of the design."""
        names = [factor.name for factor in (*self.design.factors, *self.analysis.factors)]
        names += [MACHINE] if any(result.machine for result in self.results) else []
        return tuple(dict.fromkeys(names))

    @property
    def state(self) -> tuple[str, Tone]:
        if self.running:
            return "running", "neutral"
        if self.pending:
            return "not finished", "warning"
        return "finished", "warning" if self.warning else "good"

    @property
    def headline(self) -> str:
        """`48 of 60 trials, 3 ran out of memory, 5 combinations skipped, 2 to go (about 4 min)`."""
        done, all_of = len(self.counted), counted(self.planned, "trial")
        parts = [all_of if done == self.planned else f"{done:,} of {all_of}"]
        failed = [each.outcome for each in self.counted if not each.is_ok]
        words = Counter(
            _FAILED_WORDS.get(outcome, OUTCOMES[outcome][0])
            for outcome in sorted(failed, key=list(Outcome).index)
        )
        parts += [f"{count:,} {how}" for how, count in words.items()]
        if self.skipped:
            parts.append(f"{counted(len(self.skipped), 'combination')} skipped")
        if self.pending:
            left = about_text(self.left_s)
            parts.append(f"{self.pending:,} to go" + (f" (about {left})" if left else ""))
        return ", ".join(parts)

    @property
    def about(self) -> str:
        """What all trials have in common, and the machine."""
        took = f"took {about_text(self.spent_s)}" if self.spent_s else ""
        return " · ".join(filter(None, (levels_text(self.design.fixed), self.machine, took)))

    @property
    def now(self) -> str:
        """What runs at the moment; empty where nothing does."""
        if self.running is None:
            return ""
        share = share_text(self.running.share) if self.running.share is not None else ""
        where = ", ".join(filter(None, (self.running.phase, share)))
        return f"{self.running.trial} ({where})" if where else self.running.trial

    @property
    def warning(self) -> str:
        """Why not to trust what follows; empty where there is no reason."""
        if self.disturbed < _MANY_DISTURBED * max(1, len(self.counted)):
            return ""
        trials = counted(len(self.counted), "trial")
        return (
            f"{self.disturbed} of {trials} were disturbed by others, and there is nothing better: "
            "do not trust what follows. When the machine is idle, raise `reruns` under `blocks` in "
            "the design, and run the study again"
        )

    @property
    def lack(self) -> str:
        """Why there is nothing to compare; empty where there is."""
        if self.analysis.configurations:
            return ""
        if self.counted:
            return "None of the trials trained, so there is nothing to compare."
        return "Nothing has finished yet."

    @property
    def not_measured(self) -> list[str]:
        if not self.analysis.configurations:
            return []
        measured = {each.response.key for each in self.analysis.effects}
        measured |= {key for each in self.analysis.configurations for key in each.values}
        lacks = []
        if ENERGY not in measured:
            lacks.append("Energy was not measured: no GPU that tells it.")
        if not measured.intersection(MEMORY):
            lacks.append("Memory was not measured.")
        return lacks

    @cached_property
    def bests(self) -> list[Best]:
        """Of all; where there are several models, of each, as they do not compare."""
        analysis = self.analysis
        groups = [each.group for each in analysis.sensitivity if each.group]
        noise = next((e.noise for e in analysis.effects if e.response.key == THROUGHPUT), None)
        bests = []
        for group in groups or [{}]:
            inside = [c for c in analysis.configurations if group.items() <= c.levels.items()]
            if not inside:
                continue
            first, *others = inside
            names = set(as_good(inside, noise) if group else analysis.as_good)
            own = [name for name in self.factors if name not in group] or self.factors
            levels = ordered(first.levels, own)
            otherwise = (
                {n: v for n, v in ordered(each.levels, own).items() if v != levels.get(n)}
                for each in others
                if each.name in names
            )
            rates = [each.values[THROUGHPUT] for each in inside if THROUGHPUT in each.values]
            beats = ""
            if len(rates) > 1 and min(rates) > 0:
                beats = f"{ratio_text(max(rates) / min(rates))} times the slowest"
            if beats and len(rates) > 3:
                over_median = ratio_text(max(rates) / median(rates))
                beats += f", {over_median} times the median of {len(rates):,}"
            bests.append(
                Best(
                    group=levels_text(group),
                    configuration=first,
                    rate=f"{rate_text(first.values.get(THROUGHPUT))} samples/s",
                    interval=rate_interval(first.low, first.high),
                    levels=levels_text(levels),
                    as_good=tuple(map(levels_text, otherwise)),
                    beats=beats,
                )
            )
        return bests

    @property
    def rankings(self) -> list[Sensitivity]:
        """What matters for throughput; groups of which nothing is told are left out."""
        return [each for each in self.analysis.sensitivity if each.effects]

    @cached_property
    def effect_remarks(self) -> Mapping[str, Sequence[str]]:
        """Of each response, by its key; what is remarked of several alike is said once."""
        said: set[str] = set()
        remarks: dict[str, Sequence[str]] = {}
        for effects in self.analysis.effects:
            texts = list(map(remark_text, effects.remarks))
            remarks[effects.response.key] = [text for text in texts if text not in said]
            said.update(texts)
        return remarks

    @cached_property
    def configurations(self) -> tuple[ConfigurationRow, ...]:
        return configuration_rows(self.analysis.configurations, self.counted, self.factors)

    @cached_property
    def failures(self) -> list[Result]:
        """Attempts that answered nothing."""
        return [each for each in self.results if not each.is_result]

    @property
    def notes(self) -> list[str]:
        """All remarks, those of the analysis first."""
        return list(dict.fromkeys((*map(remark_text, self.analysis.remarks), *self.remarks)))

    @cached_property
    def flagged(self) -> list[BlockLine]:
        return [block for block in self.blocks if block.flagged]

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


def skipped_groups(skipped: Iterable[SkippedPoint]) -> tuple[SkippedGroup, ...]:
    """Combinations by the reason why they are skipped, the most frequent first."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for point in skipped:
        counts[point.why] += 1
        examples.setdefault(point.why, levels_text(point.levels))
    return tuple(SkippedGroup(why, count, examples[why]) for why, count in counts.most_common())
