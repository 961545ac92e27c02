"""What factors do, as it is shown: rankings, effects, curves and fronts in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepscope.analysis.study import records
from stepscope.analysis.study.records import RESPONSES, THROUGHPUT, Level, MainEffect, Response
from stepscope.report.kit.format import is_known, share_text
from stepscope.report.study import sentences
from stepscope.report.study.configurations import ordered
from stepscope.report.study.words import (
    counted,
    measured_text,
    size_interval,
    size_text,
    upper_first,
)
from stepscope.studies.trial_spec import level_text, levels_text

_NOISE_SOURCES = {
    "repeats": "from repeats",
    "residuals": "from what the effects leave over",
    "known": "as learnt of this machine before",
}


@dataclass(frozen=True)
class EffectRow:
    """What one factor does, in words."""

    effect: MainEffect
    factor: str
    size: str
    interval: str
    best: str
    """The level to choose; empty where that depends."""
    is_told: bool

    @property
    def text(self) -> str:
        """`1.28× (1.21–1.36)`."""
        return f"{self.size} ({self.interval})" if self.interval else self.size


@dataclass(frozen=True)
class Ranking:
    """Factors by how much they matter for throughput, the first most."""

    title: str
    says: str
    rows: tuple[EffectRow, ...]


@dataclass(frozen=True)
class EffectsView:
    """What factors do to one response."""

    effects: records.Effects
    title: str
    about: str
    rows: tuple[EffectRow, ...]
    interactions: tuple[str, ...]
    """Those that are told, in words."""
    remarks: tuple[str, ...]

    @property
    def response(self) -> Response:
        return self.effects.response


@dataclass(frozen=True)
class CurveView:
    """How throughput goes with more of something."""

    curve: records.ScalingCurve
    title: str
    says: str
    has_knee: bool


@dataclass(frozen=True)
class FrontView:
    """What is to be chosen from, where more of one thing costs another."""

    front: records.Front
    title: str
    says: str
    rows: tuple[tuple[str, ...], ...]
    """Values of its responses, and the levels."""


def ranking_of(found: records.Sensitivity) -> Ranking:
    rows = _effect_rows(found.effects, RESPONSES[THROUGHPUT])
    return Ranking(
        levels_text(found.group) or "All trials", sentences.sensitivity_text(found), rows
    )


def _effect_rows(effects: Sequence[MainEffect], response: Response) -> tuple[EffectRow, ...]:
    rows = []
    for effect in effects:
        size, interval = size_text(effect.size, response), size_interval(effect.size, response)
        level = effect.highest if response.better == "more" else effect.lowest
        best = level_text(effect.factor, level) if response.better else ""
        rows.append(EffectRow(effect, effect.factor, size, interval, best, effect.is_told))
    return tuple(rows)


def effects_of(all_effects: Sequence[records.Effects]) -> tuple[EffectsView, ...]:
    """What is remarked of several responses alike is said once."""
    said: set[str] = set()
    views = []
    for effects in all_effects:
        response = effects.response
        told = (each for each in effects.interactions if each.is_told)
        remarks = [sentences.remark_text(each) for each in effects.remarks]
        views.append(
            EffectsView(
                effects,
                upper_first(response.label),
                _noise_text(effects),
                _effect_rows(effects.main, response),
                tuple(sentences.interaction_text(each, response) for each in told),
                tuple(text for text in remarks if text not in said),
            )
        )
        said.update(remarks)
    return tuple(views)


def _noise_text(effects: records.Effects) -> str:
    """How many trials it is told of, how much alike ones differ, and how much is explained."""
    noise = effects.noise
    trials = counted(effects.trials, "trial")
    parts = [f"{trials} of {counted(effects.configurations, 'configuration')}"]
    if noise.source == "none" or not is_known(noise.sigma):
        parts.append("no interval can be told: nothing was repeated")
    else:
        differ = share_text(noise.sigma)
        if effects.response.scale == "difference":
            differ = f"{noise.sigma * 100:.1f} points"
        parts.append(f"trials alike differ by {differ} ({_NOISE_SOURCES[noise.source]})")
    if is_known(effects.explained):
        parts.append(f"factors explain {share_text(effects.explained)} of what differs")
    return "; ".join(parts)


def curve_of(curve: records.ScalingCurve, factors: Sequence[str]) -> CurveView:
    title = _grouped(curve.factor, curve.group, factors)
    return CurveView(curve, title, sentences.curve_text(curve), curve.knee is not None)


def front_of(front: records.Front, factors: Sequence[str]) -> FrontView:
    responses = [RESPONSES[key] for key in front.responses]
    first, *others = (each.label for each in responses)
    rows = []
    for each in front.best:
        values = (measured_text(each.values.get(r.key), r) for r in responses)
        rows.append((*values, levels_text(ordered(each.levels, factors))))
    beaten = f"{counted(front.beaten, 'other')} {'is' if front.beaten == 1 else 'are'} beaten"
    says = f"{counted(len(front.best), 'configuration')} to choose from; {beaten}."
    title = f"{upper_first(first)} against {' and '.join(others)}"
    return FrontView(front, _grouped(title, front.group, factors), says, tuple(rows))


def _grouped(title: str, group: Mapping[str, Level], factors: Sequence[str]) -> str:
    return ", ".join(filter(None, (title, levels_text(ordered(group, factors)))))
