"""The plots of a study's report: from what is shown to SVG text, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from stepscope.analysis.study.records import (
    RESPONSES,
    THROUGHPUT,
    Configuration,
    Front,
    Interaction,
    Level,
    LevelMean,
    Response,
)
from stepscope.report.format import is_known, rate_text
from stepscope.report.study import BlockLine
from stepscope.report.studyeffects import CurveView, EffectRow, EffectsView, Ranking
from stepscope.report.studypoints import ordered
from stepscope.report.studysvg import (
    SERIES,
    WIDTH,
    Scale,
    across,
    bottom_axis,
    cross,
    dot,
    left_axis,
    legend,
    line,
    log_ticks,
    n,
    padded,
    path,
    picture,
    shortened,
    text,
    ticks,
    tipped,
    upright,
    width_of,
)
from stepscope.report.studywords import interval_text, measured_text, thinned, tick_text
from stepscope.studies.spec import level_text, levels_text

_RATE = partial(tick_text, response=RESPONSES[THROUGHPUT])
MOST_POINTS = 240
"""Of a scatter: more are thinned."""
_MOST_LEVELS = 16
_MOST_NUMBERS = 12
_LEFT = 52
_RIGHT = WIDTH - 10
_TOP = 26
_HEIGHT = 236
_BOTTOM = _HEIGHT - 36
_LEAST_SPREAD = 0.1
"""A sentinel that hardly varies must look so: the axis spans at least this part of its rate."""


def ranking_plot(ranking: Ranking, top: float) -> str:
    """How much each factor matters: bars from 1× on, up to `top`, which several plots share."""
    rows = ranking.rows
    bottom = 8 + 26 * len(rows)
    low = min([1.0, *(r.effect.size.low for r in rows if is_known(r.effect.size.low))])
    scale = Scale(max(low, top**-0.2, 1e-3), max(top, 1.001), 112, 268, is_log=True)
    places = [(value, f"{value:g}×") for value in log_ticks(top)]
    bars = (part for place, row in enumerate(rows) for part in _bar(row, 21 + 26 * place, scale))
    parts = [*bottom_axis(scale, bottom, places, top=4), *bars]
    parts.append(line(scale.at(1), 4, scale.at(1), bottom, "none"))
    label = f"What matters, {ranking.title}: " + ", ".join(f"{r.factor} {r.size}" for r in rows)
    return picture("ranking", label, bottom + 22, parts)


def _bar(row: EffectRow, y: float, scale: Scale) -> Iterator[str]:
    size = row.effect.size
    weak = "" if row.is_told else " untold"
    zero, end = scale.at(1), scale.at(size.value) if is_known(size.value) else scale.at(1)
    bar = f'<rect x="{n(zero)}" y="{n(y - 8)}" width="{n(max(0.0, end - zero))}" height="16"'
    drawn = f'{bar} rx="2" class="bar{weak}"/>'
    if row.interval:
        drawn += across(scale.at(size.low), scale.at(size.high), y, f"whisker{weak}")
    told = "" if row.is_told else ", not told from no effect"
    best = f", best {row.best}" if row.best else ""
    yield tipped(drawn, f"{row.factor}: {row.text}{best}{told}")
    yield text(104, y + 4, shortened(row.factor, 100), "" if row.is_told else "weak", "end")
    yield text(280, y + 4, row.text, "" if row.is_told else "weak")


def ranking_top(rankings: Sequence[Ranking]) -> float:
    """Where the bars of all rankings end."""
    sizes = [row.effect.size for each in rankings for row in each.rows]
    ends = [end for size in sizes for end in (size.value, size.high) if is_known(end)]
    largest = max([size.value for size in sizes if is_known(size.value)], default=1.0)
    return max(1.02, min(max(ends, default=1.0), math.pow(largest, 1.5) * 1.05))


def effects_plot(view: EffectsView) -> str:
    """The mean of each level with its interval, all factors on one scale."""
    response, rows = view.response, view.rows
    means = [each for row in rows for each in row.effect.levels]
    ends = [v for each in means for v in (each.mean, each.low, each.high)]
    low, high = padded(ends)
    low = max(low, 0.0) if min(map(_or_zero, ends), default=0.0) >= 0 else low
    scale = Scale(low, high, 112, WIDTH - 12)
    parts: list[str] = []
    y = 4.0
    for row in rows:
        y += 16
        kind = "factor" if row.is_told else "factor weak"
        parts.append(text(8, y, shortened(row.factor, 180), kind))
        parts.append(text(WIDTH - 8, y, row.text, "" if row.is_told else "weak", "end"))
        for each in thinned(row.effect.levels, _MOST_LEVELS):
            y += 17
            parts.append(_level(each, row, response, scale, y))
        y += 14
    places = [(value, tick_text(value, response)) for value in ticks(low, high)]
    axis = bottom_axis(scale, y, places, top=24)
    label = f"{view.title} by level of each factor"
    return picture("effects", label, y + 22, [*axis, *parts])


def _level(each: LevelMean, row: EffectRow, response: Response, scale: Scale, y: float) -> str:
    name = level_text(row.factor, each.level)
    weak = "" if row.is_told else " untold"
    drawn = text(104, y + 4, shortened(name, 92), "tick", "end")
    between = interval_text(each.low, each.high, response)
    if between:
        drawn += across(scale.at(each.low), scale.at(each.high), y, f"whisker soft{weak}")
    drawn += dot(scale.at(each.mean), y, 4, f"dot{weak}")
    tip = f"{row.factor} {name}: {measured_text(each.mean, response)}"
    return tipped(drawn, f"{tip} ({between})" if between else tip)


def interaction_plot(interaction: Interaction, response: Response) -> str:
    """A line for each level of the second factor, over the levels of the first."""
    across_levels = _different(cell.first for cell in interaction.cells)
    lines = _different(cell.second for cell in interaction.cells)
    names = [f"{interaction.second} {level_text(interaction.second, each)}" for each in lines]
    told, taken = legend(names, _LEFT, 14)
    top = 8 + taken + 10
    bottom = top + 160
    low, high = padded((cell.mean for cell in interaction.cells), 0.1)
    low = max(0.0, low) if all(cell.mean >= 0 for cell in interaction.cells) else low
    across_scale = Scale(-0.3, len(across_levels) - 0.7, _LEFT, _RIGHT)
    scale = Scale(low, high, bottom, top)
    places = [
        (float(place), shortened(level_text(interaction.first, each), 320 / len(across_levels)))
        for place, each in enumerate(across_levels)
    ]
    parts = [
        told,
        *left_axis(scale, _LEFT, _RIGHT, ticks(low, high), partial(tick_text, response=response)),
    ]
    parts += bottom_axis(across_scale, bottom, places)
    parts.append(text(_RIGHT, bottom + 31, interaction.first, "unit", "end"))
    for number, second in enumerate(lines):
        kind = min(number, SERIES)
        cells = {c.first: c for c in interaction.cells if c.second == second}
        dots = [
            (across_scale.at(float(place)), scale.at(cells[level].mean), cells[level])
            for place, level in enumerate(across_levels)
            if level in cells
        ]
        parts.append(path([(x, y) for x, y, _ in dots], f"line series-{kind}"))
        for x, y, cell in dots:
            first = f"{interaction.first} {level_text(interaction.first, cell.first)}"
            tip = f"{first}, {names[number]}: {measured_text(cell.mean, response)}"
            parts.append(tipped(dot(x, y, 3.5, f"end-{kind}"), tip))
    label = f"{response.label} over {interaction.first}, a line for each {interaction.second}"
    return picture("interaction", label, bottom + 36, parts)


def curve_plot(view: CurveView) -> str:
    """Throughput over more and more of something, with its knee."""
    curve, response = view.curve, RESPONSES[THROUGHPUT]
    points = [(float(each.level), each) for each in curve.points if _is_number(each.level)]  # type: ignore[arg-type]
    xs = [x for x, _ in points]
    highest = max([e for _, p in points for e in (p.mean, p.high) if is_known(e)], default=1.0)
    across_scale, places = _steps_of(xs, curve.factor)
    scale = Scale(0.0, highest * 1.06, _BOTTOM, _TOP)
    parts = [text(4, 12, "samples/s", "unit")]
    parts += left_axis(scale, _LEFT, _RIGHT, ticks(0.0, highest * 1.06), _RATE)
    parts += bottom_axis(across_scale, _BOTTOM, places)
    parts.append(text(_RIGHT, _BOTTOM + 31, curve.factor, "unit", "end"))
    if curve.knee:
        parts += _knee(curve.knee.level, across_scale, curve.factor)
    drawn = [(across_scale.at(x), scale.at(p.mean), p) for x, p in points]
    parts.append(path([(x, y) for x, y, _ in drawn], "line series-0"))
    for x, y, point in drawn:
        between = interval_text(point.low, point.high, response)
        mark = (
            upright(x, scale.at(point.low), scale.at(point.high), "whisker soft") if between else ""
        )
        is_knee = curve.knee is not None and point.level == curve.knee.level
        mark += dot(x, y, 5 if is_knee else 4, "knee-dot" if is_knee else "dot")
        name = f"{curve.factor} {level_text(curve.factor, point.level)}"
        tip = f"{name}: {measured_text(point.mean, response)}"
        parts.append(tipped(mark, f"{tip} ({between})" if between else tip))
    return picture("curve", f"Throughput over {view.title}. {view.says}", _HEIGHT, parts)


def _steps_of(xs: Sequence[float], factor: str) -> tuple[Scale, list[tuple[float, str]]]:
    """The scale of a curve: each doubling is as wide as the next, where the levels double."""
    is_log = len(xs) > 2 and min(xs) > 0 and all(math.log2(x).is_integer() for x in xs)
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    return (
        Scale(low, high, _LEFT + 14, _RIGHT - 14, is_log),
        [(x, _number_text(factor, x)) for x in xs],
    )


def _knee(level: float, scale: Scale, factor: str) -> Iterator[str]:
    x = scale.at(level)
    words = f"knee: {_number_text(factor, level)}"
    is_left = x + 8 + width_of(words) <= _RIGHT
    yield line(x, _BOTTOM, x, _TOP, "knee")
    at, anchor = (x + 8, "start") if is_left else (x - 8, "end")
    yield text(at, _BOTTOM - 9, words, "knee-text", anchor)


def front_plot(front: Front, configurations: Sequence[Configuration], factors: Sequence[str]
               ) -> str:  # fmt: skip
    """Throughput against what it costs; those that nothing beats are numbered and joined."""
    up, cost = (RESPONSES[key] for key in front.responses[:2])
    best = [each for each in front.best if _has(each, up, cost)]
    names = {each.name for each in best}
    group = front.group.items()
    others = [e for e in configurations if e.name not in names and _has(e, up, cost)]
    others = [e for e in others if all(e.levels.get(name) == level for name, level in group)]
    shown = [*thinned(others, MOST_POINTS), *best]
    low, high = padded((e.values[cost.key] for e in shown), 0.08, 0.02)
    low = max(0.0, low)
    top = max((e.values[up.key] for e in shown), default=1.0) * 1.08
    scale, across_scale = Scale(0.0, top, _BOTTOM, _TOP), Scale(low, high, _LEFT, _RIGHT)
    places = [(value, tick_text(value, cost)) for value in ticks(low, high)]
    parts = [text(4, 12, "samples/s", "unit")]
    parts += left_axis(scale, _LEFT, _RIGHT, ticks(0.0, top), _RATE)
    parts += bottom_axis(across_scale, _BOTTOM, places)
    parts.append(text(_RIGHT, _BOTTOM + 31, cost.label, "unit", "end"))

    def place(each: Configuration) -> tuple[float, float]:
        return across_scale.at(each.values[cost.key]), scale.at(each.values[up.key])

    def tip(each: Configuration) -> str:
        values = ", ".join(measured_text(each.values[r.key], r) for r in (up, cost))
        return f"{levels_text(ordered(each.levels, factors))}: {values}"

    parts += [
        tipped(dot(*place(each), 3.2, "beaten"), tip(each)) for each in thinned(others, MOST_POINTS)
    ]
    if len(front.responses) == 2:
        parts.append(path(_stairs(sorted(map(place, best))), "step"))
    parts += [tipped(dot(*place(each), 5, "front"), tip(each)) for each in best]
    parts += _numbers([place(each) for each in best])
    return picture("front", f"Throughput against {cost.label}", _HEIGHT, parts)


def _stairs(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """To the next cost first, then up to what it buys."""
    steps = list(points[:1])
    for (_, y), (x, after) in pairwise(points):
        steps += [(x, y), (x, after)]
    return steps


def _numbers(points: Sequence[tuple[float, float]]) -> Iterator[str]:
    """A number beside each point, in the order of the table, where there is room for it."""
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in points]
    for number, (x, y) in enumerate(points[:_MOST_NUMBERS], 1):
        wide = width_of(str(number)) + 1
        for dx, dy in (
            (8 + wide / 2, 14),
            (-8 - wide / 2, -6),
            (8 + wide / 2, -6),
            (0, 20),
            (0, -10),
        ):
            box = (x + dx - wide / 2, y + dy - 10, x + dx + wide / 2, y + dy + 1)
            is_inside = box[0] > _LEFT and box[2] < WIDTH and box[3] < _BOTTOM
            if is_inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                yield text(x + dx, y + dy, str(number), "number", "middle")
                break


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def sentinel_plot(blocks: Sequence[BlockLine]) -> str:
    """The rate of the same configuration in every block; those that were flagged are crossed."""
    known = [block for block in blocks if is_known(block.sentinel_rate)]
    calm = thinned([block for block in known if not block.flagged], MOST_POINTS)
    shown = sorted(
        [*calm, *thinned([b for b in known if b.flagged], MOST_POINTS)], key=lambda b: b.number
    )
    rates = [block.sentinel_rate or 0.0 for block in shown]
    low, high = padded(rates, 0.1, _LEAST_SPREAD)
    low = max(0.0, low)
    numbers = [block.number for block in shown] or [0, 1]
    across_scale = Scale(numbers[0], numbers[-1], _LEFT + 14, _RIGHT - 14)
    scale = Scale(low, high, _BOTTOM, _TOP)
    parts = [text(4, 12, "samples/s", "unit")]
    parts += left_axis(scale, _LEFT, _RIGHT, ticks(low, high), _RATE)
    whole = [t for t in ticks(numbers[0], numbers[-1], 6) if float(t).is_integer()] or numbers
    parts += bottom_axis(across_scale, _BOTTOM, [(t, f"{t:g}") for t in whole])
    parts.append(text(_RIGHT, _BOTTOM + 31, "block", "unit", "end"))
    places = [(across_scale.at(b.number), scale.at(r)) for b, r in zip(shown, rates, strict=True)]
    parts.append(path(places, "line series-6"))
    for block, (x, y) in zip(shown, places, strict=True):
        mark = cross(x, y, 4.5, "flagged") if block.flagged else dot(x, y, 3.5, "dot")
        parts.append(tipped(mark, _block_tip(block)))
    flagged = sum(block.flagged for block in blocks)
    label = f"Rate of the sentinel over {len(blocks)} blocks, {flagged} of them flagged"
    return picture("sentinel", label, _HEIGHT, parts)


def _block_tip(block: BlockLine) -> str:
    rate = f"block {block.number}: {rate_text(block.sentinel_rate)} /s"
    return f"{rate}, {'; '.join(block.reasons) or 'flagged'}" if block.flagged else rate


def _different(levels: Iterator[Level]) -> list[Level]:
    return list(dict.fromkeys(levels))


def _has(each: Configuration, *responses: Response) -> bool:
    return all(is_known(each.values.get(response.key)) for response in responses)


def _or_zero(value: float) -> float:
    return value if is_known(value) else 0.0


def _is_number(level: Level) -> bool:
    return isinstance(level, int | float) and not isinstance(level, bool)


def _number_text(factor: str, value: float) -> str:
    whole = int(value) if float(value).is_integer() else value
    return level_text(factor, whole)
