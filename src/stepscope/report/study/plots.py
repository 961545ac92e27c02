"""The plots of a study's report, as static SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from stepscope.analysis.study.records import (
    RESPONSES,
    THROUGHPUT,
    Configuration,
    Effects,
    Front,
    Interaction,
    Response,
    ScalingCurve,
    Sensitivity,
)
from stepscope.report.kit import svg
from stepscope.report.kit.document import Figure
from stepscope.report.kit.format import is_known, rate_text, upper_first
from stepscope.report.study.configurations import ordered
from stepscope.report.study.format import (
    interval_text,
    measured_text,
    size_interval,
    size_text,
    thinned,
    tick_text,
)
from stepscope.report.study.messages import (
    best_level,
    curve_text,
    curve_title,
    effect_text,
    effects_text,
    interaction_text,
    ranking_title,
    significance_text,
)
from stepscope.report.study.view import BlockLine
from stepscope.studies.trial_spec import level_text, levels_text

MAX_POINTS = 240
"""Points of a scatter plot; more are thinned."""
_MAX_LEVELS = 16
_MAX_NUMBERS = 12
_LEFT = 52
_RIGHT = svg.WIDTH - 10
_TOP = 26
_HEIGHT = 236
_BOTTOM = _HEIGHT - 36
_MIN_SPAN = 0.1
"""Smallest span of the axis, as a share of the throughput: small noise must look small."""


def ranking_plot(ranking: Sensitivity, top: float) -> Figure:
    """Main effects as bars from 1× to `top`, which several plots share."""
    response, effects, title = RESPONSES[THROUGHPUT], ranking.effects, ranking_title(ranking)
    bottom = 8 + 26 * len(effects)
    low = min([1.0, *(each.size.low for each in effects if is_known(each.size.low))])
    scale = svg.Scale(max(low, top**-0.2, 1e-3), max(top, 1.001), 112, 268, is_log=True)
    places = [(value, f"{value:g}×") for value in svg.log_ticks(top)]
    parts = list(svg.bottom_axis(scale, bottom, places, top=4))
    zero = scale.at(1)
    for place, effect in enumerate(effects):
        y, size, text = 21 + 26 * place, effect.size, effect_text(effect, response)
        kind, weak = ("", "") if effect.is_significant else ("weak", " not-significant")
        end = scale.at(size.value) if is_known(size.value) else zero
        drawn = svg.bar(zero, y, max(0.0, end - zero), f"bar{weak}")
        if size_interval(size, response):
            drawn += svg.across(scale.at(size.low), scale.at(size.high), y, f"whisker{weak}")
        tips = [f"{effect.factor}: {text}", f"best level {best_level(effect, response)}"]
        tips.append(significance_text(size, response))
        parts.append(svg.tipped(drawn, ", ".join(filter(None, tips))))
        parts.append(svg.text(104, y + 4, svg.shortened(effect.factor, 100), kind, "end"))
        parts.append(svg.text(280, y + 4, text, kind))
    parts.append(svg.line(zero, 4, zero, bottom, "none"))
    sizes = ", ".join(f"{each.factor} {size_text(each.size, response)}" for each in effects)
    return svg.picture("ranking", f"Main effects, {title}: {sizes}", bottom + 22, parts, title)


def ranking_top(rankings: Sequence[Sensitivity]) -> float:
    """Return the upper end of the scale of all rankings."""
    sizes = [effect.size for each in rankings for effect in each.effects]
    ends = [end for size in sizes for end in (size.value, size.high) if is_known(end)]
    largest = max([size.value for size in sizes if is_known(size.value)], default=1.0)
    return max(1.02, min(max(ends, default=1.0), math.pow(largest, 1.5) * 1.05))


def effects_plot(effects: Effects) -> Figure:
    """Marginal means of all levels with their intervals, all factors on one scale."""
    response = effects.response
    means = [each for effect in effects.main for each in effect.levels]
    values = [value for each in means for value in (each.mean, each.low, each.high)]
    low, high = svg.padded(values)
    if all(not is_known(value) or value >= 0 for value in values):
        low = max(low, 0.0)
    scale = svg.Scale(low, high, 112, svg.WIDTH - 12)
    parts: list[str] = []
    y = 4.0
    for effect in effects.main:
        y += 16
        kind, weak = ("", "") if effect.is_significant else ("weak", " not-significant")
        parts.append(svg.text(8, y, svg.shortened(effect.factor, 180), f"factor {kind}".rstrip()))
        parts.append(svg.text(svg.WIDTH - 8, y, effect_text(effect, response), kind, "end"))
        for each in thinned(effect.levels, _MAX_LEVELS):
            y += 17
            name = level_text(effect.factor, each.level)
            drawn = svg.text(104, y + 4, svg.shortened(name, 92), "tick", "end")
            interval = interval_text(each.low, each.high, response)
            if interval:
                ends = scale.at(each.low), scale.at(each.high)
                drawn += svg.across(*ends, y, f"whisker soft{weak}")
            drawn += svg.dot(scale.at(each.mean), y, 4, f"dot{weak}")
            tip = f"{effect.factor} {name}: {measured_text(each.mean, response)}"
            parts.append(svg.tipped(drawn, f"{tip} ({interval})" if interval else tip))
        y += 14
    places = [(value, tick_text(value, response)) for value in _ticks(low, high, response)]
    axis = svg.bottom_axis(scale, y, places, top=24)
    label = f"Marginal means of {response.label} by factor"
    title, caption = upper_first(response.label), effects_text(effects)
    return svg.picture("effects", label, y + 22, [*axis, *parts], title, caption)


def interaction_plot(interaction: Interaction, response: Response) -> Figure:
    """Cell means over the levels of the first factor, one line per level of the second."""
    across_levels = list(dict.fromkeys(cell.first for cell in interaction.cells))
    lines = list(dict.fromkeys(cell.second for cell in interaction.cells))
    names = [f"{interaction.second} {level_text(interaction.second, each)}" for each in lines]
    legend, height = svg.legend(names, _LEFT, 14)
    top = 8 + height + 10
    bottom = top + 160
    low, high = svg.padded((cell.mean for cell in interaction.cells), 0.1)
    low = max(0.0, low) if all(cell.mean >= 0 for cell in interaction.cells) else low
    across_scale = svg.Scale(-0.3, len(across_levels) - 0.7, _LEFT, _RIGHT)
    scale = svg.Scale(low, high, bottom, top)
    places = [
        (float(place), svg.shortened(level_text(interaction.first, each), 320 / len(across_levels)))
        for place, each in enumerate(across_levels)
    ]
    label_of = partial(tick_text, response=response)
    ticks = _ticks(low, high, response)
    parts = [legend, *svg.left_axis(scale, _LEFT, _RIGHT, ticks, label_of)]
    parts += svg.bottom_axis(across_scale, bottom, places)
    parts.append(svg.text(_RIGHT, bottom + 31, interaction.first, "unit", "end"))
    for number, second in enumerate(lines):
        kind = min(number, svg.SERIES)
        cells = {c.first: c for c in interaction.cells if c.second == second}
        dots = [
            (across_scale.at(float(place)), scale.at(cells[level].mean), cells[level])
            for place, level in enumerate(across_levels)
            if level in cells
        ]
        parts.append(svg.path([(x, y) for x, y, _ in dots], f"line series-{kind}"))
        for x, y, cell in dots:
            first = f"{interaction.first} {level_text(interaction.first, cell.first)}"
            tip = f"{first}, {names[number]}: {measured_text(cell.mean, response)}"
            parts.append(svg.tipped(svg.dot(x, y, 3.5, f"end-{kind}"), tip))
    label = f"{upper_first(response.label)} by {interaction.first} and {interaction.second}"
    title = f"{upper_first(response.label)}: {interaction.first} × {interaction.second}"
    caption = interaction_text(interaction, response)
    return svg.picture("interaction", label, bottom + 36, parts, title, caption)


def curve_plot(curve: ScalingCurve) -> Figure:
    """Throughput over the levels of a factor, with the knee."""
    response, title, caption = RESPONSES[THROUGHPUT], curve_title(curve), curve_text(curve)
    points = curve.points
    xs = [float(point.level) for point in points]  # type: ignore[arg-type]
    highest = max(end for point in points for end in (point.mean, point.high) if is_known(end))
    # Logarithmic if all levels are powers of two.
    is_log = len(xs) > 2 and min(xs) > 0 and all(math.log2(x).is_integer() for x in xs)
    across_scale = svg.Scale(min(xs), max(xs), _LEFT + 14, _RIGHT - 14, is_log)
    places = [(x, _number_text(curve.factor, x)) for x in xs]
    scale = svg.Scale(0.0, highest * 1.06, _BOTTOM, _TOP)
    parts = _throughput_axes(scale, across_scale, places, curve.factor)
    if curve.knee:
        knee, text = curve.knee.level, f"knee: {_number_text(curve.factor, curve.knee.level)}"
        x = across_scale.at(knee)
        fits_right = x + 8 + svg.width_of(text) <= _RIGHT
        at, anchor = (x + 8, "start") if fits_right else (x - 8, "end")
        parts.append(svg.line(x, _BOTTOM, x, _TOP, "knee"))
        parts.append(svg.text(at, _BOTTOM - 9, text, "knee-text", anchor))
    drawn = [(across_scale.at(x), scale.at(p.mean)) for x, p in zip(xs, points, strict=True)]
    parts.append(svg.path(drawn, "line series-0"))
    for point, (x, y) in zip(points, drawn, strict=True):
        interval = interval_text(point.low, point.high, response)
        mark = ""
        if interval:
            mark = svg.upright(x, scale.at(point.low), scale.at(point.high), "whisker soft")
        is_knee = curve.knee is not None and point.level == curve.knee.level
        mark += svg.dot(x, y, 5 if is_knee else 4, "knee-dot" if is_knee else "dot")
        name = f"{curve.factor} {level_text(curve.factor, point.level)}"
        tip = f"{name}: {measured_text(point.mean, response)}"
        parts.append(svg.tipped(mark, f"{tip} ({interval})" if interval else tip))
    label = f"Throughput by {title}: {caption}"
    return svg.picture("curve", label, _HEIGHT, parts, title, caption)


def front_plot(
    front: Front, configurations: Sequence[Configuration], factors: Sequence[str]
) -> Figure:
    """Throughput vs. its cost; the configurations on the Pareto front are numbered and joined."""
    up, cost = (RESPONSES[key] for key in front.responses)
    on_front = front.configurations
    names = {each.name for each in on_front}
    dominated = [
        each
        for each in configurations
        if each.name not in names
        and all(is_known(each.values.get(key)) for key in front.responses)
        and front.group.items() <= each.levels.items()
    ]
    others = thinned(dominated, MAX_POINTS)
    shown = [*others, *on_front]
    low, high = svg.padded((e.values[cost.key] for e in shown), 0.08, 0.02)
    low = max(0.0, low)
    top = max(each.values[up.key] for each in shown) * 1.08
    scale, across_scale = svg.Scale(0.0, top, _BOTTOM, _TOP), svg.Scale(low, high, _LEFT, _RIGHT)
    places = [(value, tick_text(value, cost)) for value in _ticks(low, high, cost)]
    parts = _throughput_axes(scale, across_scale, places, cost.label)

    def place(each: Configuration) -> tuple[float, float]:
        return across_scale.at(each.values[cost.key]), scale.at(each.values[up.key])

    def tip(each: Configuration) -> str:
        values = ", ".join(measured_text(each.values[r.key], r) for r in (up, cost))
        return f"{levels_text(ordered(each.levels, factors))}: {values}"

    parts += [svg.tipped(svg.dot(*place(each), 3.2, "dominated"), tip(each)) for each in others]
    points = sorted(map(place, on_front))
    steps = points[:1]
    for (_, y), (x, after) in pairwise(points):  # first right to the next cost, then up
        steps += [(x, y), (x, after)]
    parts.append(svg.path(steps, "step"))
    parts += [svg.tipped(svg.dot(*place(each), 5, "front"), tip(each)) for each in on_front]
    parts += _numbers([place(each) for each in on_front])
    label = f"Throughput vs. {cost.label}"
    return svg.picture(
        "front", label, _HEIGHT, parts, caption="Better is up and to the left. Gray: dominated."
    )


def _numbers(points: Sequence[tuple[float, float]]) -> Iterator[str]:
    """Number the points in the order of the table, where there is space for it."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    for number, (x, y) in enumerate(points[:_MAX_NUMBERS], 1):
        wide = svg.width_of(str(number)) + 1
        beside = 8 + wide / 2
        for dx, dy in ((beside, 14), (-beside, -6), (beside, -6), (0, 20), (0, -10)):
            box = (x + dx - wide / 2, y + dy - 10, x + dx + wide / 2, y + dy + 1)
            is_inside = box[0] > _LEFT and box[2] < svg.WIDTH and box[3] < _BOTTOM
            if is_inside and all(
                box[2] <= other[0] or other[2] <= box[0] or box[3] <= other[1] or other[3] <= box[1]
                for other in taken
            ):
                taken.append(box)
                yield svg.text(x + dx, y + dy, str(number), "number", "middle")
                break


def reference_plot(blocks: Sequence[BlockLine]) -> Figure:
    """Throughput of the reference trial in every block; flagged blocks are crosses."""
    known = [block for block in blocks if is_known(block.reference_throughput)]
    others = thinned([block for block in known if not block.flagged], MAX_POINTS)
    flagged = thinned([block for block in known if block.flagged], MAX_POINTS)
    shown = sorted([*others, *flagged], key=lambda block: block.number)
    values = [block.reference_throughput or 0.0 for block in shown]
    low, high = svg.padded(values, 0.1, _MIN_SPAN)
    low = max(0.0, low)
    numbers = [block.number for block in shown] or [0, 1]
    across_scale = svg.Scale(numbers[0], numbers[-1], _LEFT + 14, _RIGHT - 14)
    scale = svg.Scale(low, high, _BOTTOM, _TOP)
    whole = [t for t in svg.ticks(numbers[0], numbers[-1], 6) if float(t).is_integer()] or numbers
    parts = _throughput_axes(scale, across_scale, [(t, f"{t:g}") for t in whole], "block")
    places = [(across_scale.at(b.number), scale.at(v)) for b, v in zip(shown, values, strict=True)]
    parts.append(svg.path(places, "line series-6"))
    for block, (x, y) in zip(shown, places, strict=True):
        mark = svg.cross(x, y, 4.5, "flagged") if block.flagged else svg.dot(x, y, 3.5, "dot")
        tip = f"block {block.number}: {rate_text(block.reference_throughput)} samples/s"
        reason = f", {'; '.join(block.reasons) or 'flagged'}" if block.flagged else ""
        parts.append(svg.tipped(mark, tip + reason))
    count = sum(block.flagged for block in blocks)
    label = f"Throughput of the reference trial in {len(blocks)} blocks, {count} flagged"
    caption = "The same configuration at the start of each block; crosses: flagged."
    return svg.picture("reference", label, _HEIGHT, parts, "Reference trial", caption)


def _ticks(low: float, high: float, response: Response) -> list[float]:
    """Return round ticks; for bytes they are multiples of a power of two: 2 GiB, not 1.86 GiB."""
    if response.unit != "bytes" or not high > low:
        return svg.ticks(low, high)
    step = 2.0 ** round(math.log2((high - low) / 4))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def _throughput_axes(
    scale: svg.Scale, across: svg.Scale, places: Sequence[tuple[float, str]], unit: str
) -> list[str]:
    """Draw samples per second on the vertical axis, and `places` on the horizontal one."""
    label_of = partial(tick_text, response=RESPONSES[THROUGHPUT])
    return [
        svg.text(4, 12, "samples/s", "unit"),
        *svg.left_axis(scale, _LEFT, _RIGHT, svg.ticks(scale.low, scale.high), label_of),
        *svg.bottom_axis(across, _BOTTOM, places),
        svg.text(_RIGHT, _BOTTOM + 31, unit, "unit", "end"),
    ]


def _number_text(factor: str, value: float) -> str:
    whole = int(value) if float(value).is_integer() else value
    return level_text(factor, whole)
