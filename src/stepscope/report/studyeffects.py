"""What factors do, as it is shown: rankings, effects, curves and fronts in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stepscope.analysis.study.records import (
    RESPONSES,
    THROUGHPUT,
    Curve,
    Effects,
    Front,
    MainEffect,
    Response,
    Sensitivity,
)
from stepscope.report.format import is_known, share_text
from stepscope.report.studypoints import ordered
from stepscope.report.studywords import (
    best_level,
    counted,
    interval_text,
    measured_text,
    size_interval,
    size_text,
    upper_first,
)
from stepscope.studies.spec import level_text, levels_text

_NO_INTERVAL = "no interval can be told: nothing was repeated"


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

    group: str
    """Empty for all trials."""
    says: str
    rows: tuple[EffectRow, ...]

    @property
    def title(self) -> str:
        return self.group or "All trials"


@dataclass(frozen=True)
class EffectsView:
    """What factors do to one response."""

    effects: Effects
    title: str
    about: str
    rows: tuple[EffectRow, ...]
    levels: tuple[tuple[str, str, str, str, str], ...]
    """Factor, level, mean, interval, trials."""
    interactions: tuple[str, ...]
    """Those that are told, in words."""
    remarks: tuple[str, ...]

    @property
    def response(self) -> Response:
        return self.effects.response


@dataclass(frozen=True)
class CurveView:
    """How throughput goes with more of something."""

    curve: Curve
    title: str
    says: str
    has_knee: bool


@dataclass(frozen=True)
class FrontView:
    """What is to be chosen from, where more of one thing costs another."""

    front: Front
    title: str
    says: str
    rows: tuple[tuple[str, ...], ...]
    """Values of its responses, and the levels."""


def ranking_of(sensitivity: Sensitivity) -> Ranking:
    rows = tuple(_effect_row(each, RESPONSES[THROUGHPUT]) for each in sensitivity.effects)
    return Ranking(levels_text(sensitivity.group), sensitivity.says, rows)


def _effect_row(effect: MainEffect, response: Response) -> EffectRow:
    return EffectRow(
        effect=effect,
        factor=effect.factor,
        size=size_text(effect.size, response),
        interval=size_interval(effect.size, response),
        best=best_level(effect, response),
        is_told=effect.is_told,
    )


def effects_of(all_effects: Sequence[Effects]) -> tuple[EffectsView, ...]:
    """What is remarked of several responses alike is said once."""
    said: set[str] = set()
    views = []
    for effects in all_effects:
        views.append(_effects(effects, tuple(r for r in effects.remarks if r not in said)))
        said.update(effects.remarks)
    return tuple(views)


def _effects(effects: Effects, remarks: tuple[str, ...]) -> EffectsView:
    response = effects.response
    return EffectsView(
        effects=effects,
        title=upper_first(response.label),
        about=_noise_text(effects),
        rows=tuple(_effect_row(each, response) for each in effects.main),
        levels=tuple(_level_rows(effects)),
        interactions=tuple(each.says for each in effects.interactions if each.is_told),
        remarks=remarks,
    )


def _level_rows(effects: Effects) -> Iterator[tuple[str, str, str, str, str]]:
    response = effects.response
    for effect in effects.main:
        for each in effect.levels:
            yield (
                effect.factor,
                level_text(effect.factor, each.level),
                measured_text(each.mean, response),
                interval_text(each.low, each.high, response),
                f"{each.trials:,}",
            )


def _noise_text(effects: Effects) -> str:
    """How many trials it is told of, how much alike ones differ, and how much is explained."""
    noise, response = effects.noise, effects.response
    trials = counted(effects.trials, "trial")
    parts = [f"{trials} of {counted(effects.configurations, 'configuration')}"]
    if noise.source == "none" or not is_known(noise.sigma):
        parts.append(_NO_INTERVAL)
    else:
        differ = share_text(noise.sigma)
        if response.scale == "difference":
            differ = f"{noise.sigma * 100:.1f} points"
        source = {
            "repeats": "from repeats",
            "residuals": "from what the effects leave over",
            "known": "as learnt of this machine before",
        }[noise.source]
        parts.append(f"trials alike differ by {differ} ({source})")
    if is_known(effects.explained):
        parts.append(f"factors explain {share_text(effects.explained)} of what differs")
    return "; ".join(parts)


def curve_of(curve: Curve, factors: Sequence[str]) -> CurveView:
    group = levels_text(ordered(curve.group, factors)) if curve.group else ""
    title = f"{curve.factor}, {group}" if group else curve.factor
    return CurveView(
        curve, title, curve.knee.says if curve.knee else curve.why_no_knee, curve.knee is not None
    )


def front_of(front: Front, factors: Sequence[str]) -> FrontView:
    responses = [RESPONSES[key] for key in front.responses]
    labels = [each.label for each in responses]
    rows = tuple(
        (
            *(measured_text(each.values.get(r.key), r) for r in responses),
            levels_text(ordered(each.levels, factors)),
        )
        for each in front.best
    )
    beaten = f"{counted(front.beaten, 'other')} {'is' if front.beaten == 1 else 'are'} beaten"
    says = f"{counted(len(front.best), 'configuration')} to choose from; {beaten}."
    title = f"{upper_first(labels[0])} against {' and '.join(labels[1:])}"
    group = levels_text(ordered(front.group, factors)) if front.group else ""
    return FrontView(front, f"{title}, {group}" if group else title, says, rows)
