"""Records of a study's analysis: observations, effects, scaling curves and Pareto fronts.

Every number that is computed from several trials is an `Estimate` with a confidence interval; the
confidence level is `analysis.trial.throughput.CONFIDENCE`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Level = str | int | float | bool | None
"""A value of a setting or a limit. None: no limit, or the workload's default."""

Scale = Literal["ratio", "difference"]


@dataclass(frozen=True)
class Response:
    """A measurement of every trial on which factors may have an effect."""

    key: str
    label: str
    unit: str  # "1/s", "share", "bytes" or "J"
    scale: Scale  # how two values are compared: 1.28× as much, or 12 points more
    better: Literal["higher", "lower", ""]  # empty: neither is better in general


RESPONSES: dict[str, Response] = {
    response.key: response
    for response in (
        Response("samples_per_second", "throughput", "1/s", "ratio", "higher"),
        Response("gpu_utilization", "GPU utilization", "share", "difference", "higher"),
        Response("gpu_sm", "SM activity", "share", "difference", "higher"),
        Response("cpu_share", "CPU utilization", "share", "difference", ""),
        Response("data_wait_share", "data wait", "share", "difference", "lower"),
        Response("host_memory_peak", "host memory", "bytes", "ratio", "lower"),
        Response("gpu_memory_peak", "GPU memory", "bytes", "ratio", "lower"),
        Response("joules_per_sample", "energy per sample", "J", "ratio", "lower"),
    )
}
THROUGHPUT = "samples_per_second"
MEMORY = ("gpu_memory_peak", "host_memory_peak")
ENERGY = "joules_per_sample"


@dataclass(frozen=True)
class Observation:
    """One successful trial: the levels of its factors, and its measurements."""

    levels: Mapping[str, Level]
    values: Mapping[str, float]  # by the keys of `RESPONSES`; without what was not measured
    name: str = ""


@dataclass(frozen=True)
class Factor:
    """A setting or limit that the study varies."""

    name: str
    levels: tuple[Level, ...]  # in the order of the design

    @property
    def is_numeric(self) -> bool:
        """Whether all levels are numbers, so that they have a natural order."""
        return all(
            isinstance(level, int | float) and not isinstance(level, bool) for level in self.levels
        )


@dataclass(frozen=True)
class Estimate:
    """A ratio (1 means no effect) or a difference (0 means no effect), with its interval."""

    value: float  # the estimate
    low: float  # lower end of the confidence interval
    high: float  # upper end of the confidence interval


@dataclass(frozen=True)
class Noise:
    """The variation between identical trials, and where the estimate comes from."""

    sigma: float
    """Standard deviation: of the natural logarithm for ratios (0.05 is about 5%), in the unit of
    the response for differences."""
    dof: float  # degrees of freedom
    source: Literal["repeats", "residuals", "prior", "none"]
    """`repeats`; `residuals` of the model; `prior`, what was known of the machine before the study;
    or `none`: the noise is unknown and there are no intervals."""


@dataclass(frozen=True)
class Remark:
    """A limitation of the analysis: what is excluded or not estimable, and why."""

    kind: Literal[
        "too_few_trials",
        "unknown_level",
        "invalid_values",
        "too_many_levels",
        "confounded_factor",
        "confounded_levels",
        "noise_unknown",
        "noise_from_residuals",
        "interactions_not_estimable",
        "interaction_incomplete",
        "interaction_confounded",
        "too_many_interactions",
    ]
    factors: tuple[str, ...] = ()  # one factor, or the two of an interaction
    levels: tuple[Level, ...] = ()
    response: str = ""
    count: int = 0  # of trials, levels or configurations


@dataclass(frozen=True)
class LevelMean:
    """Marginal mean of a level: the mean over an equal mix of the levels of all other factors."""

    level: Level  # level of the factor
    mean: float  # mean, in the unit of the response
    low: float  # lower end of the confidence interval
    high: float  # upper end of the confidence interval
    trials: int  # number of trials with this level


@dataclass(frozen=True)
class MainEffect:
    """The effect of one factor on a response."""

    factor: str  # name of the factor
    levels: tuple[LevelMean, ...]  # mean of each observed level, in the order of the design
    highest_level: Level  # the level with the highest mean
    lowest_level: Level  # the level with the lowest mean
    size: Estimate
    """Ratio or difference of the highest and the lowest mean, depending on the scale."""
    is_significant: bool  # whether the interval of the size excludes "no effect"


@dataclass(frozen=True)
class CellMean:
    """Mean of the trials with a given level of each of two factors."""

    first: Level  # level of the first factor
    second: Level  # level of the second factor
    mean: float  # mean, in the unit of the response
    trials: int  # number of trials with both levels


@dataclass(frozen=True)
class Interaction:
    """How much the effect of one factor depends on the level of another.

    The effect of the first factor is that of a change from `from_level` to `to_level`.
    """

    first: str  # name of the first factor
    second: str  # name of the second factor
    cells: tuple[CellMean, ...]  # mean at each pair of levels
    size: Estimate
    """Ratio or difference of the effects of the first factor at `stronger_at` and at `weaker_at`,
    depending on the scale."""
    is_significant: bool  # whether the interval of the size excludes "no interaction"
    from_level: Level  # level of the first factor before the change
    to_level: Level  # level of the first factor after the change
    stronger_at: Level  # level of the second factor with the larger effect
    weaker_at: Level  # level of the second factor with the smaller effect
    simple_effects: tuple[tuple[Level, float], ...]
    """The effect at each of these two levels, in the order of the design; empty if only the size of
    the interaction is estimable."""


@dataclass(frozen=True)
class Effects:
    """All effects on one response, the largest first."""

    response: Response
    trials: int
    configurations: int
    noise: Noise
    main: tuple[MainEffect, ...]
    interactions: tuple[Interaction, ...]
    explained_variance_share: float | None  # share that the model explains, 0 to 1 (R²)
    remarks: tuple[Remark, ...] = ()


@dataclass(frozen=True)
class Sensitivity:
    """Main effects on throughput, the largest first, for a group of trials or for all."""

    group: Mapping[str, Level]  # such as {"model": "vit"}; empty for all trials
    effects: tuple[MainEffect, ...]


@dataclass(frozen=True)
class Fall:
    """A significant loss of throughput beyond the best level."""

    peak: Level
    worst: Level
    loss: Estimate  # throughput at the worst level divided by that at the peak


@dataclass(frozen=True)
class Knee:
    """The smallest level beyond which no level has a significant gain of more than 5%."""

    level: float  # level of the knee
    best: Level  # the best level beyond the knee
    gain: Estimate  # throughput at the best level beyond the knee divided by that at the knee
    is_certain: bool
    """Whether the intervals confirm it: lower levels are slower, and higher levels gain less than
    10%."""
    fall: Fall | None = None


@dataclass(frozen=True)
class NoKnee:
    """Why a curve has no knee."""

    kind: Literal[
        "two_levels", "not_significant", "flat", "gaining", "slower", "unclear", "small_gain"
    ]
    level: Level
    other: Level
    gain: Estimate  # throughput at the other level divided by that at the level


@dataclass(frozen=True)
class ScalingCurve:
    """Throughput over the levels of a numeric factor, for a group of trials or for all."""

    factor: str
    group: Mapping[str, Level]  # levels of other factors; empty for all trials
    points: tuple[LevelMean, ...]  # in samples per second, by ascending level
    knee: Knee | None
    no_knee: NoKnee | None = None


@dataclass(frozen=True)
class Configuration:
    """One combination of levels, with the means of its repeats."""

    name: str  # hash of the settings
    levels: Mapping[str, Level]  # level by factor
    trials: int  # number of successful trials
    values: Mapping[str, float]  # mean by response; geometric means for ratios
    low: float | None = None  # throughput: lower end of the confidence interval
    high: float | None = None  # throughput: upper end of the confidence interval


@dataclass(frozen=True)
class Front:
    """Pareto front: the configurations that no other one dominates in two responses."""

    responses: tuple[str, ...]
    configurations: tuple[Configuration, ...]  # by throughput, the highest first
    dominated: int  # number of configurations that are not on the front
    group: Mapping[str, Level] = field(default_factory=dict)
    """The model if there are several: models are never compared with each other."""


@dataclass(frozen=True)
class StudyAnalysis:
    """All results of a study's analysis."""

    factors: tuple[Factor, ...]  # those that were observed at more than one level
    configurations: tuple[Configuration, ...]  # by throughput, the highest first
    effects: tuple[Effects, ...]  # one per measured response, in the order of `RESPONSES`
    sensitivity: tuple[Sensitivity, ...]
    """All trials first, then each model (or machine) if there are several."""
    curves: tuple[ScalingCurve, ...]
    fronts: tuple[Front, ...]
    equivalent: tuple[str, ...] = ()  # names of configurations not significantly below the best
    remarks: tuple[Remark, ...] = ()
