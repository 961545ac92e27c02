"""The view of a study, which terminal, page, CSV and JSON render."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from stepscope.analysis.study.configurations import equivalent
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
from stepscope.report.study.format import about_text, counted, rate_interval, ratio_text
from stepscope.report.study.messages import remark_text
from stepscope.studies.results import MACHINE, Result
from stepscope.studies.trial_spec import levels_text

if TYPE_CHECKING:
    from stepscope.studies.design.records import Design, SkippedPoint
    from stepscope.studies.folder import StudyProgress

_MUCH_INTERFERENCE = 0.25
"""Share of trials with interference that calls for a warning: fewer hardly change a mean."""
_FAILURES = {
    Outcome.GPU_OOM: "ran out of memory",
    Outcome.HOST_OOM: "ran out of memory",
    Outcome.SHM_FULL: "ran out of shared memory",
}


@dataclass(frozen=True)
class BlockLine:
    """A block of trials with the result of its reference trial."""

    number: int  # block number, from 1
    trials: int  # number of trials, excluding the reference trial
    reference_throughput: float | None  # throughput of the reference trial
    flagged: bool  # whether drift or interference was detected
    reasons: Sequence[str] = ()  # why it is flagged
    rerun: bool = False  # whether any of its trials was rerun
    started: float = 0.0  # start, Unix time in seconds


@dataclass(frozen=True)
class Best:
    """The fastest configuration of all trials, or of a group."""

    group: str  # empty for all trials
    configuration: Configuration
    throughput: str
    interval: str
    levels: str
    equivalent: tuple[str, ...]
    """The configurations that are not significantly slower, by the levels that differ."""
    speedup: str


@dataclass(frozen=True)
class SkippedGroup:
    """Combinations that are skipped for the same reason."""

    reason: str  # why they are skipped
    combinations: int  # number of combinations
    example: str  # levels of one of them


@dataclass(frozen=True)
class StudyView:
    """A study, ready to be rendered. Texts are as recorded: renderers escape them."""

    name: str
    folder: Path
    machine: str
    design: Design
    planned: int  # trials of the design that the machine can run
    results: Sequence[Result]  # all attempts, including reference trials
    counted: Sequence[Result]  # of each trial that is done, the result that counts
    skipped: Sequence[SkippedPoint]
    remaining: int  # trials without a result that are still to run
    reruns: int  # trials with a result that run again, for example because of interference
    blocks: Sequence[BlockLine]
    analysis: StudyAnalysis
    elapsed_s: float = 0.0
    remaining_s: float | None = None  # estimated duration of the remaining trials
    reruns_s: float | None = 0.0  # estimated duration of the reruns
    running: StudyProgress | None = None
    remarks: Sequence[str] = ()
    with_interference: int = 0  # counted results from flagged blocks

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """Names of the factors, in the order of the design."""
        names = [factor.name for factor in (*self.design.factors, *self.analysis.factors)]
        names += [MACHINE] if any(result.machine for result in self.results) else []
        return tuple(dict.fromkeys(names))

    @property
    def state(self) -> tuple[str, Tone]:
        if self.running:
            return "running", "neutral"
        if self.remaining or self.reruns:
            return "not finished", "warning"
        return "finished", "warning" if self.warning else "good"

    @property
    def headline(self) -> str:
        """`8 of 12 trials done, 4 remaining (about 6 min), 2 reruns (about 3 min), 1 crashed`."""
        done = len(self.counted)
        trials = counted(done + self.remaining, "trial")
        parts = [f"{done:,} of {trials} done" if self.remaining or self.reruns else trials]
        if self.remaining:
            parts.append(f"{self.remaining:,} remaining{_about(self.remaining_s)}")
        if self.reruns:
            parts.append(f"{counted(self.reruns, 'rerun')} pending{_about(self.reruns_s)}")
        failed = [each.outcome for each in self.counted if not each.is_ok]
        failures = Counter(
            _FAILURES.get(outcome, OUTCOMES[outcome][0])
            for outcome in sorted(failed, key=list(Outcome).index)
        )
        parts += [f"{count:,} {failure}" for failure, count in failures.items()]
        if self.skipped:
            parts.append(f"{counted(len(self.skipped), 'combination')} skipped")
        return ", ".join(parts)

    @property
    def about(self) -> str:
        """The fixed settings, the machine and the elapsed time."""
        elapsed = f"{about_text(self.elapsed_s)} elapsed" if self.elapsed_s else ""
        return " · ".join(filter(None, (levels_text(self.design.fixed), self.machine, elapsed)))

    @property
    def now(self) -> str:
        """The trial that is running; empty if there is none."""
        if self.running is None:
            return ""
        share = share_text(self.running.share) if self.running.share is not None else ""
        progress = ", ".join(filter(None, (self.running.phase, share)))
        return f"{self.running.trial} ({progress})" if progress else self.running.trial

    @property
    def warning(self) -> str:
        """Why the results are unreliable; empty if they are not."""
        if self.with_interference < _MUCH_INTERFERENCE * max(1, len(self.counted)):
            return ""
        return (
            f"{self.with_interference:,} of {counted(len(self.counted), 'trial')} ran in blocks "
            "with interference and have no clean rerun: do not trust their results. Increase "
            "`reruns` under `blocks` in the design, and run the study again while the machine is "
            "idle"
        )

    @property
    def missing_results(self) -> str:
        """Why there is nothing to compare; empty if there is."""
        if self.analysis.configurations:
            return ""
        if self.counted:
            return "No trial succeeded, so there is nothing to compare."
        return "No trial has finished yet."

    @property
    def not_measured(self) -> list[str]:
        if not self.analysis.configurations:
            return []
        measured = {each.response.key for each in self.analysis.effects}
        measured |= {key for each in self.analysis.configurations for key in each.values}
        notes = []
        if ENERGY not in measured:
            notes.append("Energy was not measured: there is no GPU that reports it.")
        if not measured.intersection(MEMORY):
            notes.append("Memory was not measured.")
        return notes

    @cached_property
    def bests(self) -> list[Best]:
        """The best configuration; of each model if there are several, as models do not compare."""
        analysis = self.analysis
        groups = [each.group for each in analysis.sensitivity if each.group]
        noise = next((e.noise for e in analysis.effects if e.response.key == THROUGHPUT), None)
        bests = []
        for group in groups or [{}]:
            inside = [c for c in analysis.configurations if group.items() <= c.levels.items()]
            if not inside:
                continue
            first, *others = inside
            names = set(equivalent(inside, noise) if group else analysis.equivalent)
            own = [name for name in self.factors if name not in group] or self.factors
            levels = ordered(first.levels, own)
            different = (
                {n: v for n, v in ordered(each.levels, own).items() if v != levels.get(n)}
                for each in others
                if each.name in names
            )
            values = [each.values[THROUGHPUT] for each in inside if THROUGHPUT in each.values]
            speedup = ""
            if len(values) > 1 and min(values) > 0:
                speedup = f"{ratio_text(max(values) / min(values))}× the slowest"
            if speedup and len(values) > 3:
                over_median = ratio_text(max(values) / median(values))
                speedup += f", {over_median}× the median of {len(values):,} configurations"
            bests.append(
                Best(
                    group=levels_text(group),
                    configuration=first,
                    throughput=f"{rate_text(first.values.get(THROUGHPUT))} samples/s",
                    interval=rate_interval(first.low, first.high),
                    levels=levels_text(levels),
                    equivalent=tuple(map(levels_text, different)),
                    speedup=speedup,
                )
            )
        return bests

    @property
    def rankings(self) -> list[Sensitivity]:
        """Main effects on throughput, for all groups that have an estimable one."""
        return [each for each in self.analysis.sensitivity if each.effects]

    @cached_property
    def effect_remarks(self) -> Mapping[str, Sequence[str]]:
        """Remarks by the key of the response; a remark on several responses appears once."""
        listed: set[str] = set()
        remarks: dict[str, Sequence[str]] = {}
        for effects in self.analysis.effects:
            texts = list(map(remark_text, effects.remarks))
            remarks[effects.response.key] = [text for text in texts if text not in listed]
            listed.update(texts)
        return remarks

    @cached_property
    def configurations(self) -> tuple[ConfigurationRow, ...]:
        return configuration_rows(self.analysis.configurations, self.counted, self.factors)

    @cached_property
    def failures(self) -> list[Result]:
        """Attempts without a usable result."""
        return [each for each in self.results if not each.is_result]

    @property
    def notes(self) -> list[str]:
        """All remarks, those of the analysis first."""
        return list(dict.fromkeys((*map(remark_text, self.analysis.remarks), *self.remarks)))

    @cached_property
    def flagged(self) -> list[BlockLine]:
        return [block for block in self.blocks if block.flagged]

    @property
    def block_summary(self) -> str:
        """`20 blocks, 2 flagged, 1 rerun`."""
        parts = [counted(len(self.blocks), "block"), f"{len(self.flagged):,} flagged"]
        if self.flagged:
            parts.append(f"{sum(block.rerun for block in self.flagged):,} rerun")
        return ", ".join(parts)


def skipped_groups(skipped: Iterable[SkippedPoint]) -> tuple[SkippedGroup, ...]:
    """Group combinations by the reason why they are skipped, the most frequent first."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for point in skipped:
        counts[point.why] += 1
        examples.setdefault(point.why, levels_text(point.levels))
    return tuple(SkippedGroup(why, count, examples[why]) for why, count in counts.most_common())


def _about(seconds: float | None) -> str:
    text = about_text(seconds)
    return f" (about {text})" if text else ""
