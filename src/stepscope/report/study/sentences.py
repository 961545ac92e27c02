"""What the analysis of a study found, in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping

from stepscope.analysis.study.drift import BlockJudged, Trend
from stepscope.analysis.study.records import (
    RESPONSES,
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
from stepscope.records.trial import InterferenceReason
from stepscope.report.kit.format import is_known, share_text
from stepscope.report.study.words import (
    counted,
    ratio_text,
    size_interval,
    size_text,
    upper_first,
)
from stepscope.studies.trial_spec import level_text, levels_text

_NO_INTERVAL = "where it lies is not known"
_REMARKS = {
    "too_few_trials": "fewer than two trials trained: there is nothing to compare",
    "unknown_level": (
        "{count} trials are left out: they have a level of {factor} that the design does not name"
    ),
    "bad_values": "{count} trials are left out of {response}: theirs cannot be",
    "too_many_levels": "{factor} is left out: it has {count:,} levels",
    "confounded_factor": (
        "the effect of {factor} cannot be told: it changed only together with others"
    ),
    "confounded_levels": (
        "{factor} {levels} cannot be compared with its other levels: more changed with it"
    ),
    "noise_unknown": (
        "how much trials differ by themselves is not known: repeats would tell what is an effect"
        " and what is chance"
    ),
    "noise_from_residuals": (
        "there are few repeats: all that the model does not explain is taken for chance, which"
        " makes intervals rather too wide"
    ),
    "pairs_unknown": (
        "the {count} configurations observed do not tell how factors depend on each other: each is"
        " told as if it did not"
    ),
    "pair_incomplete": (
        "not all combinations of {both} were observed: the effect of each is told as if it did not"
        " depend on the other"
    ),
    "pair_confounded": (
        "whether {both} depend on each other cannot be told by these configurations: each is told"
        " as if it did not"
    ),
    "too_many_pairs": "there are too many levels to tell how all factors depend on each other",
}
_NO_KNEE = {
    "two_levels": "two levels show no knee: {other} {gain}",
    "gaining": "still gaining {change} from {level} to {other}",
    "unclear": "it cannot be told yet whether more {name} {pay}: {other} {gain}",
    "flat": "{name} {do} not matter here: all are within {change}",
    "never_pays": "more than {level} never pays: {other} is slower by {change}",
}
_INTERFERENCE = {
    "cpu": "others used {value:.1f} of {cores:g} cores",
    "hypervisor": "the hypervisor gave {value:.1f} cores to others",
    "gpu": "other processes used its GPU {value:.0%} of the time",
    "heat": "heat held its GPU's clocks down {value:.0%} of the time",
}
_NOISE_SOURCES = {
    "repeats": "from repeats",
    "residuals": "from what the effects leave over",
    "known": "as learnt of this machine before",
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
    )


def ranking_title(found: Sensitivity) -> str:
    return levels_text(found.group) or "All trials"


def sensitivity_text(found: Sensitivity) -> str:
    """`for vit cpus matter 1.28× (1.21–1.36), batch_size 1.05× (…)`."""
    group = " and ".join(level_text(name, level) for name, level in found.group.items())
    if found.effects:
        first, *others = found.effects
        verb = "matter" if _is_plural(first.factor) else "matters"
        parts = [f"{first.factor} {verb} {_size(first)}"]
        parts += [f"{each.factor} {_size(each)}" for each in others]
        return f"for {group or 'all trials'} {', '.join(parts)}"
    return f"for {group or 'all trials'} there is no factor whose effect could be told"


def _size(effect: MainEffect) -> str:
    size = effect.size
    between = _NO_INTERVAL
    if math.isfinite(size.high):
        between = f"{ratio_text(size.low)}–{ratio_text(size.high)}"
    untold = "" if effect.is_significant else ", not told from no effect"
    return f"{ratio_text(size.value)}× ({between}{untold})"


def effect_text(effect: MainEffect, response: Response) -> str:
    """`1.28× (1.21–1.36)`."""
    size, interval = size_text(effect.size, response), size_interval(effect.size, response)
    return f"{size} ({interval})" if interval else size


def best_level(effect: MainEffect, response: Response) -> str:
    """The level to choose; empty where that depends."""
    level = effect.highest if response.better == "more" else effect.lowest
    return level_text(effect.factor, level) if response.better else ""


def effects_text(effects: Effects) -> str:
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


def interaction_text(found: Interaction, response: Response) -> str:
    """`from 1 to 2 cpus: 1.90× with workers 0, 1.10× with workers 2`."""

    def second(level: Level) -> str:
        return f"{found.second} {level_text(found.second, level)}"

    low, high = (level_text(found.first, level) for level in (found.low, found.high))
    begin = f"from {low} to {high} {found.first}"
    if found.changes:
        each = [f"{_effect(value, response)} with {second(at)}" for at, value in found.changes]
        return f"{begin}: {', '.join(each)}"
    much = _effect(found.size.value, response).lstrip("+")
    if response.scale == "ratio":
        return f"{begin}: {much} as much with {second(found.more)} as with {second(found.less)}"
    return f"{begin}: {much} more with {second(found.more)} than with {second(found.less)}"


def curve_title(curve: ScalingCurve) -> str:
    return _of_group(curve.factor, curve.group)


def curve_text(curve: ScalingCurve) -> str:
    """Where more of a factor stops paying, or why that is not known."""
    name = curve.factor
    is_plural = _is_plural(name)
    knee, none = curve.knee, curve.no_knee
    if knee is not None:
        text = (
            f"more {name} than {level_text(name, knee.level)} {'stop' if is_plural else 'stops'}"
            f" paying: {level_text(name, knee.best)} {_gain(knee.gain)}"
        )
        if knee.fall:
            peak, worst = (level_text(name, each) for each in (knee.fall.peak, knee.fall.worst))
            text += f"; beyond {peak} it falls, by {_percent(knee.fall.loss)} at {worst}"
        return text
    if none is None:
        return ""
    return _NO_KNEE[none.kind].format(
        name=name,
        pay="pay" if is_plural else "pays",
        do="do" if is_plural else "does",
        level=level_text(name, none.level),
        other=level_text(name, none.other),
        change=_percent(abs(none.gain.value - 1)),
        gain=_gain(none.gain),
    )


def front_title(front: Front) -> str:
    first, *others = (RESPONSES[key].label for key in front.responses)
    return _of_group(f"{upper_first(first)} against {' and '.join(others)}", front.group)


def front_text(front: Front) -> str:
    beaten = f"{counted(front.beaten, 'other')} {'is' if front.beaten == 1 else 'are'} beaten"
    return f"{counted(len(front.best), 'configuration')} to choose from; {beaten}."


def interference_text(reason: InterferenceReason) -> str:
    """`others used 1.2 of 2 cores`."""
    if reason.kind == "other" or reason.value is None:
        return reason.text
    return _INTERFERENCE[reason.kind].format(value=reason.value, cores=reason.cores or 0.0)


def block_reasons(block: BlockJudged) -> tuple[str, ...]:
    """Why a block is not believed; nothing where it is."""
    reasons = []
    if block.reference_failed:
        reasons.append("its sentinel failed, which others did not")
    if block.is_out_of_line and block.relative and block.usual_rate:
        digits = 0 if block.usual_rate >= 100 else 1
        reasons.append(
            f"its sentinel ran at {_percent(block.relative)} of the usual rate"
            f" (others: {block.usual_rate:,.{digits}f} samples/s)"
        )
    reasons += [
        f"{interference_text(each.first)}, during {each.disturbed} of its {each.trials} trials"
        for each in block.disturbances
    ]
    return tuple(reasons)


def trend_text(trend: Trend) -> str:
    change = trend.change
    how = "slower" if change.value < 1 else "faster"
    least, most = sorted(abs(end - 1) for end in (change.low, change.high))
    return (
        f"the sentinel became {how} over the study, by {_percent(abs(change.value - 1))}"
        f" ({_percent(least)} to {_percent(most)}) from block {trend.first} to {trend.last}:"
        " something drifts, as a machine that gets warm or a disk that fills"
    )


def _of_group(title: str, group: Mapping[str, Level]) -> str:
    return f"{title}, {levels_text(group)}" if group else title


def _effect(value: float, response: Response) -> str:
    """One level against another: `1.28×`, `+12 points`."""
    if response.scale == "ratio":
        return f"{ratio_text(value)}×"
    if response.unit == "share":
        return f"{value * 100:+.0f} points".replace("-", "−")
    return f"{value:+.3g} {response.unit}".rstrip().replace("-", "−")


def _gain(gain: Estimate) -> str:
    """`gains 2 % (−3 to +7 %)`."""
    low, value, high = (
        round((each - 1) * 100) if math.isfinite(each) else each
        for each in (gain.low, gain.value, gain.high)
    )
    text = "gains nothing" if value == 0 else f"{'loses' if value < 0 else 'gains'} {abs(value)} %"
    if not math.isfinite(high):
        return f"{text} ({_NO_INTERVAL})"
    return f"{text} ({_signed(low)} to {_signed(high)} %)"


def _signed(percents: float) -> str:
    return f"−{-percents}" if percents < 0 else f"+{percents}"


def _percent(share: float) -> str:
    return f"{share * 100:.0f} %"


def _is_plural(factor: str) -> bool:
    """Workers matter, a batch_size matters."""
    return factor.endswith("s")
