"""Sentences about the results of a study's analysis."""

from __future__ import annotations

import math
from collections.abc import Mapping

from stepscope.analysis.study.drift import BlockJudged, Trend
from stepscope.analysis.study.noise import is_significant
from stepscope.analysis.study.records import (
    RESPONSES,
    THROUGHPUT,
    Effects,
    Estimate,
    Front,
    Interaction,
    Level,
    MainEffect,
    Remark,
    Response,
    ScalingCurve,
    Sensitivity,
)
from stepscope.analysis.study.scaling import MIN_GAIN
from stepscope.analysis.study.table import MAX_LEVELS
from stepscope.records.trial import InterferenceReason
from stepscope.report.kit.format import is_known, share_text, upper_first
from stepscope.report.study.format import (
    counted,
    ratio_text,
    size_interval,
    size_text,
)
from stepscope.studies.trial_spec import level_text, levels_text

_REMARKS = {
    "too_few_trials": "fewer than two trials succeeded, so there is nothing to compare",
    "unknown_level": (
        "{trials} excluded: {they_use} a level of {factor} that is not in the design"
    ),
    "invalid_values": "{trials} excluded from the analysis of {response}: invalid value",
    "too_many_levels": f"{{factor}} is not analyzed: {{count:,}} levels (maximum {MAX_LEVELS})",
    "confounded_factor": (
        "the effect of {factor} is not estimable: it is confounded with other factors"
    ),
    "confounded_levels": (
        "{factor} {levels} cannot be compared with the other levels: confounded with other factors"
    ),
    "noise_unknown": (
        "the noise is unknown because there are no repeats: set `repeats` in the design to get"
        " confidence intervals"
    ),
    "noise_from_residuals": (
        "there are few repeats: the noise is estimated from the residuals of the model, so the"
        " intervals are conservative"
    ),
    "interactions_not_estimable": (
        "no interaction is estimable from the {count} observed configurations: main effects assume"
        " that there are none"
    ),
    "interaction_incomplete": (
        "not all combinations of {both} were observed: their main effects assume no interaction"
        " between them"
    ),
    "interaction_confounded": (
        "the interaction of {both} is confounded with other effects: their main effects assume"
        " that there is none"
    ),
    "too_many_interactions": "there are too many levels to estimate all interactions",
}
_NO_KNEE = {
    "two_levels": "no knee with two levels: {other} is {faster} than {level}{interval}",
    "not_significant": "not significant: {other} is {faster} than {level}{interval}",
    "flat": "no knee: all levels differ by at most {change}",
    "gaining": "no knee: {other} is still {faster} than {level}{interval}",
    "slower": "more than {level} is slower: {other} is {faster}{interval}",
    "unclear": "no significant gain beyond {level}: {other} is {faster}{interval}",
    "small_gain": (
        f"no gain of more than {MIN_GAIN * 100:.0f}% beyond {{level}}: {{other}} is "
        f"{{faster}}{{interval}}"
    ),
}
_INTERFERENCE = {
    "cpu": "other processes used {value:.1f} of {cores:g} cores",
    "hypervisor": "the hypervisor gave {value:.1f} cores to other virtual machines",
    "gpu": "other processes used the GPU {share} of the time",
    "heat": "the GPU was thermally throttled {share} of the time",
}
_NOISE_SOURCES = {
    "repeats": "from repeats",
    "residuals": "from residuals",
    "prior": "known for this machine before the study",
}


def remark_text(remark: Remark) -> str:
    factor = remark.factors[0] if remark.factors else ""
    levels = [level_text(factor, level) for level in remark.levels]
    return _REMARKS[remark.kind].format(
        factor=factor,
        both=" and ".join(remark.factors),
        levels=" and ".join(filter(None, [", ".join(levels[:-1]), *levels[-1:]])),
        response=remark.response,
        count=remark.count,
        trials=counted(remark.count, "trial"),
        they_use="it uses" if remark.count == 1 else "they use",
    )


def significance_text(size: Estimate, response: Response) -> str:
    """Return `not significant` or `significance unknown`; empty for a significant effect."""
    if not is_known(size.low) or not is_known(size.high):
        return "significance unknown"
    return "" if is_significant(size, response.scale) else "not significant"


def ranking_title(ranking: Sensitivity) -> str:
    return levels_text(ranking.group) or "All trials"


def sensitivity_text(ranking: Sensitivity) -> str:
    """`vit: cpus 1.28× (1.21–1.36) from worst (1) to best (4), lr 1.01× (…, not significant)`."""
    response = RESPONSES[THROUGHPUT]
    parts = []
    for effect in ranking.effects:
        notes = [size_interval(effect.size, response), significance_text(effect.size, response)]
        text = f"{effect.factor} {size_text(effect.size, response)}"
        text += f" ({', '.join(filter(None, notes))})"
        if effect.is_significant:
            levels = effect.lowest_level, effect.highest_level
            worst, best = (level_text(effect.factor, level) for level in levels)
            text += f" from worst ({worst}) to best ({best})"
        parts.append(text)
    return f"{ranking_title(ranking)}: {', '.join(parts) or 'no main effect is estimable'}"


def effect_text(effect: MainEffect, response: Response) -> str:
    """`1.28× (1.21–1.36)`."""
    size, interval = size_text(effect.size, response), size_interval(effect.size, response)
    return f"{size} ({interval})" if interval else size


def best_level(effect: MainEffect, response: Response) -> str:
    """Return the level to choose; empty if neither high nor low values are better."""
    level = effect.highest_level if response.better == "higher" else effect.lowest_level
    return level_text(effect.factor, level) if response.better else ""


def effects_text(effects: Effects) -> str:
    """`159 trials of 53 configurations; noise 2.1% (from repeats); the model explains …`."""
    noise = effects.noise
    trials = counted(effects.trials, "trial")
    parts = [f"{trials} of {counted(effects.configurations, 'configuration')}"]
    if noise.source == "none" or not is_known(noise.sigma):
        parts.append("noise unknown (no repeats)")
    else:
        sigma = share_text(noise.sigma)
        if effects.response.scale == "difference":
            sigma = f"{noise.sigma * 100:.1f} points"
        parts.append(f"noise {sigma} ({_NOISE_SOURCES[noise.source]})")
    if is_known(effects.explained_variance_share):
        explained = share_text(effects.explained_variance_share)
        parts.append(f"the model explains {explained} of the variance")
    return "; ".join(parts)


def interaction_text(interaction: Interaction, response: Response) -> str:
    """`cpus from 1 to 2: 1.90× with workers 0, 1.10× with workers 2`."""

    def second(level: Level) -> str:
        return f"{interaction.second} {level_text(interaction.second, level)}"

    ends = interaction.from_level, interaction.to_level
    low, high = (level_text(interaction.first, level) for level in ends)
    change = f"{interaction.first} from {low} to {high}"
    if interaction.simple_effects:
        effects = [
            f"{_effect(value, response)} with {second(level)}"
            for level, value in interaction.simple_effects
        ]
        return f"{change}: {', '.join(effects)}"
    size = _effect(interaction.size.value, response).lstrip("+")
    stronger, weaker = second(interaction.stronger_at), second(interaction.weaker_at)
    if response.scale == "ratio":
        return f"{change}: the effect with {stronger} is {size} that with {weaker}"
    return f"{change}: the effect with {stronger} is {size} above that with {weaker}"


def curve_title(curve: ScalingCurve) -> str:
    return _of_group(curve.factor, curve.group)


def curve_text(curve: ScalingCurve) -> str:
    """Return the knee of a curve, or why it has none."""
    knee, none = curve.knee, curve.no_knee

    def level(value: Level) -> str:
        return level_text(curve.factor, value)

    if knee is not None:
        faster = f"{_faster(knee.gain)}{_interval(knee.gain)}"
        text = f"knee at {level(knee.level)}: {level(knee.best)} is {faster}"
        if fall := knee.fall:
            slower = f"{_faster(fall.loss)} than {level(fall.peak)}{_interval(fall.loss)}"
            text += f"; {level(fall.worst)} is {slower}"
        return text
    if none is None:
        return ""
    return _NO_KNEE[none.kind].format(
        level=level(none.level),
        other=level(none.other),
        change=_percent(abs(none.gain.value - 1)),
        faster=_faster(none.gain),
        interval=_interval(none.gain, with_significance=none.kind != "not_significant"),
    )


def front_title(front: Front) -> str:
    first, *others = (RESPONSES[key].label for key in front.responses)
    return _of_group(f"{upper_first(first)} vs. {' and '.join(others)}", front.group)


def front_text(front: Front) -> str:
    on_front = counted(len(front.configurations), "configuration")
    return f"{on_front} on the Pareto front, {front.dominated:,} dominated."


def interference_text(reason: InterferenceReason) -> str:
    """`other processes used 1.2 of 2 cores`."""
    if reason.kind == "other" or reason.value is None:
        return reason.text
    return _INTERFERENCE[reason.kind].format(
        value=reason.value, share=_percent(reason.value), cores=reason.cores or 0.0
    )


def block_reasons(block: BlockJudged) -> tuple[str, ...]:
    """Return why a block is flagged; empty if it is not."""
    reasons = []
    if block.reference_failed:
        reasons.append("the reference trial failed, but succeeded in other blocks")
    if block.is_outlier and block.relative and block.median_throughput:
        digits = 0 if block.median_throughput >= 100 else 1
        reasons.append(
            f"the reference trial ran at {_percent(block.relative)} of its median throughput"
            f" ({block.median_throughput:,.{digits}f} samples/s)"
        )
    reasons += [
        f"{interference_text(each.reason)} in {each.with_interference} of {each.trials} trials"
        for each in block.interference
    ]
    return tuple(reasons)


def trend_text(trend: Trend) -> str:
    change = trend.change
    direction, causes = "faster", ""
    if change.value < 1:
        direction = "slower"
        causes = "; possible causes include rising temperature and a disk that is filling up"
    least, most = sorted(abs(end - 1) for end in (change.low, change.high))
    return (
        f"drift: the reference trial became {_percent(abs(change.value - 1))} {direction}"
        f" ({_percent(least)} to {_percent(most)}) from block {trend.first} to block {trend.last}"
        f"{causes}"
    )


def _of_group(title: str, group: Mapping[str, Level]) -> str:
    return f"{title}, {levels_text(group)}" if group else title


def _effect(value: float, response: Response) -> str:
    """Format the effect of one level against another: `1.28×`, `+12 points`."""
    if response.scale == "ratio":
        return f"{ratio_text(value)}×"
    if response.unit == "share":
        points = f"{round(value * 100):+d}"  # without a negative zero
        noun = "point" if points in ("+1", "-1") else "points"
        return f"{points} {noun}".replace("-", "−")
    return f"{value:+.3g} {response.unit}".rstrip().replace("-", "−")


def _faster(gain: Estimate) -> str:
    """`2% faster`."""
    percents = round((gain.value - 1) * 100)
    return f"{abs(percents)}% {'slower' if percents < 0 else 'faster'}"


def _interval(gain: Estimate, with_significance: bool = True) -> str:
    """` (−3 to +7%, not significant)`; empty if there is nothing to say."""
    notes = []
    if math.isfinite(gain.low) and math.isfinite(gain.high):
        notes.append(f"{_signed(gain.low)} to {_signed(gain.high)}%")
    if with_significance:
        notes.append(significance_text(gain, RESPONSES[THROUGHPUT]))
    notes = list(filter(None, notes))
    return f" ({', '.join(notes)})" if notes else ""


def _signed(ratio: float) -> str:
    percents = round((ratio - 1) * 100)
    return f"−{-percents}" if percents < 0 else f"+{percents}"


def _percent(share: float) -> str:
    return f"{share * 100:.0f}%"
