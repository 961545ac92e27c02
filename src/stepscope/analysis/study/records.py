"""The nouns of a study's analysis: what was observed, and what is told of it.

Every number that is told of several trials is an `Estimate`: with an interval, at a confidence of
`analysis.throughput.CONFIDENCE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Level = str | int | float | bool | None
"""A value of a setting or a limit. None is "as much as there is", or what the workload chooses."""

Scale = Literal["ratio", "difference"]


@dataclass(frozen=True)
class Response:
    """Something measured of every trial, that factors may have an effect on."""

    key: str
    label: str
    unit: str
    """"1/s", "share", "bytes", "J"."""
    scale: Scale
    """How two values are compared: 1.28 times as much, or 12 points more."""
    better: Literal["more", "less", ""]
    """Which of two values a user wants; nothing where that depends."""


RESPONSES: dict[str, Response] = {
    response.key: response
    for response in (
        Response("samples_per_second", "throughput", "1/s", "ratio", "more"),
        Response("gpu_utilization", "GPU utilisation", "share", "difference", "more"),
        Response("gpu_sm", "SM activity", "share", "difference", "more"),
        Response("cpu_share", "CPU utilisation", "share", "difference", ""),
        Response("data_wait_share", "waiting for data", "share", "difference", "less"),
        Response("host_memory_peak", "host memory", "bytes", "ratio", "less"),
        Response("gpu_memory_peak", "GPU memory", "bytes", "ratio", "less"),
        Response("joules_per_sample", "energy per sample", "J", "ratio", "less"),
    )
}
THROUGHPUT = "samples_per_second"
MEMORY = ("gpu_memory_peak", "host_memory_peak")
ENERGY = "joules_per_sample"


@dataclass(frozen=True)
class Observation:
    """One trial that trained: the levels of its factors, and what was measured of it."""

    levels: Mapping[str, Level]
    values: Mapping[str, float]
    """By the keys of `RESPONSES`; what was not measured is not in it."""
    name: str = ""


@dataclass(frozen=True)
class Factor:
    """What was varied, with its levels in the order of the design."""

    name: str
    levels: tuple[Level, ...]

    @property
    def is_numeric(self) -> bool:
        """Whether its levels have an order of their own."""
        return all(
            isinstance(level, int | float) and not isinstance(level, bool) for level in self.levels
        )


@dataclass(frozen=True)
class Estimate:
    """A ratio (1 is no effect) or a difference (0 is none), and where it lies."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Noise:
    """How much trials of the same configuration differ, and how that is known."""

    sigma: float
    """Of logarithms for ratios, so that 0.05 is 5 %; of the values themselves for differences."""
    dof: float
    source: Literal["repeats", "residuals", "known", "none"]
    """From repeats; from what the model leaves over; from what was learnt of this machine before;
    or nothing is known, and no interval can be told."""


@dataclass(frozen=True)
class Remark:
    """What could not be told of some trials, and why."""

    kind: Literal[
        "too_few_trials",
        "unknown_level",
        "bad_values",
        "too_many_levels",
        "confounded_factor",
        "confounded_levels",
        "noise_unknown",
        "noise_from_residuals",
        "pairs_unknown",
        "pair_incomplete",
        "pair_confounded",
        "too_many_pairs",
    ]
    factors: tuple[str, ...] = ()
    """The factor, or the two of a pair."""
    levels: tuple[Level, ...] = ()
    response: str = ""
    count: int = 0
    """Of trials, levels or configurations."""


@dataclass(frozen=True)
class LevelMean:
    """What trials with one level have on average, all other factors being equally mixed."""

    level: Level
    mean: float
    low: float
    high: float
    trials: int


@dataclass(frozen=True)
class MainEffect:
    """How much one factor changes a response."""

    factor: str
    levels: tuple[LevelMean, ...]
    """In the order of the design; those that were never observed are not in it."""
    highest: Level
    lowest: Level
    size: Estimate
    """Highest level over lowest (or minus it)."""
    is_significant: bool
    """Whether it can be told from no effect at all."""


@dataclass(frozen=True)
class CellMean:
    """What trials with a level of each of two factors have on average."""

    first: Level
    second: Level
    mean: float
    trials: int


@dataclass(frozen=True)
class Interaction:
    """How much the effect of one factor depends on the level of another."""

    first: str
    second: str
    cells: tuple[CellMean, ...]
    size: Estimate
    """The effect of the first where the second makes it largest, over that where it makes it
    smallest (or minus it)."""
    is_significant: bool
    low: Level
    """The effect of the first factor is that of going from this level …"""
    high: Level
    """… to this one."""
    more: Level
    """The level of the second with which that does more …"""
    less: Level
    """… than with this one."""
    changes: tuple[tuple[Level, float], ...]
    """The effect with each of these two, in the order of the design; none where only their ratio
    (or difference) is told."""


@dataclass(frozen=True)
class Effects:
    """All that factors do to one response, the largest first."""

    response: Response
    trials: int
    configurations: int
    noise: Noise
    main: tuple[MainEffect, ...]
    interactions: tuple[Interaction, ...]
    explained: float | None
    """Part of the variance between trials that the effects account for."""
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True)
class Sensitivity:
    """What matters, the most first: for a group (the trials of a model), or for all together."""

    group: Mapping[str, Level]
    effects: tuple[MainEffect, ...]


@dataclass(frozen=True)
class Knee:
    """Where more of something stops paying."""

    level: float
    best: Level
    gain: Estimate
    """Of the best level beyond it over the knee."""
    is_sure: bool
    """Whether the intervals bear it out: less is worse, and more is hardly better."""
    fall: Fall | None = None


@dataclass(frozen=True)
class Fall:
    """Too much is worse than enough."""

    peak: Level
    worst: Level
    loss: float
    """At the worst level beyond the peak, as a part of the peak."""


@dataclass(frozen=True)
class NoKnee:
    """Why a curve has no knee: what its levels do instead."""

    kind: Literal["gaining", "unclear", "flat", "never_pays", "two_levels"]
    level: Level
    other: Level
    gain: Estimate
    """Of the other level over the first."""


@dataclass(frozen=True)
class ScalingCurve:
    """Throughput over the levels of a numeric factor, for one group of trials."""

    factor: str
    group: Mapping[str, Level]
    """Levels of the other factors it holds for; nothing where they are averaged."""
    points: tuple[LevelMean, ...]
    knee: Knee | None
    no_knee: NoKnee | None = None


@dataclass(frozen=True)
class Configuration:
    """One point of a design, over its repeats."""

    name: str
    levels: Mapping[str, Level]
    trials: int
    values: Mapping[str, float]
    """Means over its repeats, by the keys of `RESPONSES` (of ratios: geometric)."""
    low: float | None = None
    """Of throughput."""
    high: float | None = None


@dataclass(frozen=True)
class Front:
    """Configurations that no other beats in all of some responses at once."""

    responses: tuple[str, ...]
    best: tuple[Configuration, ...]
    """By throughput, the highest first."""
    beaten: int
    group: Mapping[str, Level] = field(default_factory=dict)
    """The model, where there are several: one is no substitute for another."""


@dataclass(frozen=True)
class StudyAnalysis:
    """All that a study teaches."""

    factors: tuple[Factor, ...]
    """That were varied and observed on more than one level."""
    configurations: tuple[Configuration, ...]
    """By throughput, the highest first."""
    effects: tuple[Effects, ...]
    """A response each, in the order of `RESPONSES`; only those that were measured."""
    sensitivity: tuple[Sensitivity, ...]
    """All together first, then each model (or machine) where there are several."""
    curves: tuple[ScalingCurve, ...]
    fronts: tuple[Front, ...]
    as_good: tuple[str, ...] = ()
    """Names of the others that cannot be told from the best."""
    remarks: tuple[Remark, ...] = ()
