"""The combinations of a design: which are tried, which are not, and why."""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stepscope.analysis.study.records import Factor, Level
from stepscope.errors import BadDesign, StepscopeError
from stepscope.studies.constraints import Rule
from stepscope.studies.design import Design, Left, Points
from stepscope.studies.spec import SIZES, Spec, in_design_words, levels_text, make_spec

MOST_COMBINATIONS = 100_000
_MOST_DRAWS_EACH = 50
_SAME = "it is the same trial as another one"

Indexes = tuple[int, ...]
"""Of a combination: the number of the level of each factor."""


@dataclass
class _Sorted:
    """Combinations that were looked at: those that can be tried, and the others."""

    specs: list[Spec] = field(default_factory=list)
    indexes: list[Indexes] = field(default_factory=list)
    skipped: list[Left] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    used: set[Rule] = field(default_factory=set)
    keys: set[object] = field(default_factory=set)
    same: int = 0


def points_of(design: Design) -> Points:
    """What a design tries. BadDesign where nothing is left, or there is too much of it."""
    total = math.prod(len(factor.levels) for factor in design.factors)
    if total > MOST_COMBINATIONS:
        return _points_of_many(design, total)
    found = _Sorted()
    for indexes in _all_indexes(design):
        _sort_in(design, indexes, found)
    if not found.specs:
        raise _nothing_left(design, found, total)
    chosen, remarks = _chosen(design, found)
    return Points(
        chosen=tuple(found.specs[number] for number in chosen),
        skipped=tuple(found.skipped),
        combinations=total,
        not_chosen=len(found.specs) - len(chosen),
        remarks=(*_remarks(design, found), *remarks),
    )


def default_sentinel(
    design: Design, points: Points, lacks: Callable[[Spec], str] = lambda spec: ""
) -> Spec:
    """What every block begins with: the middle of everything, but for what the design says.

    Where that is not allowed, or `lacks` something here, the nearest that is. Of equal ones the one
    that needs less memory.
    """
    said = dict(design.sentinel or {})
    wanted = {factor.name: _middle(factor) for factor in design.factors} | said
    middle = _allowed(design, wanted)
    if middle is not None and not lacks(middle):
        return middle
    for spec in sorted(points.chosen, key=lambda spec: _distance(design, wanted, spec)):
        levels = {factor.name: spec.get(factor.name) for factor in design.factors}
        near = _allowed(design, levels | said)
        if near is not None and not lacks(near):
            return near
    why = lacks(middle) if middle is not None else _why_not(design, wanted)
    raise BadDesign(
        f"{_shown(design)}the sentinel{_with(said)}: {why}",
        "Say other settings for it, or `sentinel: none`",
    )


def _all_indexes(design: Design) -> Iterator[Indexes]:
    return itertools.product(*(range(len(factor.levels)) for factor in design.factors))


def _levels(design: Design, indexes: Indexes) -> dict[str, Level]:
    return {
        factor.name: factor.levels[index]
        for factor, index in zip(design.factors, indexes, strict=True)
    }


def _sort_in(design: Design, indexes: Indexes, found: _Sorted) -> None:
    levels = _levels(design, indexes)
    settings = {**design.fixed, **levels}
    rule = next((rule for rule in design.rules if rule.skips(settings)), None)
    if rule is not None:
        found.used.add(rule)
        found.skipped.append(Left(levels, rule.why))
        return
    try:
        spec = make_spec(settings)
    except StepscopeError as error:
        why = in_design_words(str(error))
        found.refusals[why] += 1
        found.skipped.append(Left(levels, why))
        return
    what = (spec.workload, spec.limits)
    if what in found.keys:
        found.same += 1
        found.skipped.append(Left(levels, _SAME))
        return
    found.keys.add(what)
    found.specs.append(spec)
    found.indexes.append(indexes)


def _nothing_left(design: Design, found: _Sorted, total: int) -> BadDesign:
    """Each reason with how many combinations it takes away, by itself."""
    if found.refusals and not found.used:
        ((why, number),) = found.refusals.most_common(1)
        of = "each" if number == total else f"{number}"
        return BadDesign(
            f"{_shown(design)}none of the {total} combinations can be tried; of {of}: {why}"
        )
    everything = [{**design.fixed, **_levels(design, each)} for each in _all_indexes(design)]
    reasons = [
        f"{_shown(design, rule)}`{rule.plain}` skips {number} of them"
        for rule in design.rules
        if (number := sum(rule.skips(settings) for settings in everything))
    ]
    reasons += [f"{number}: {why}" for why, number in found.refusals.most_common(3)]
    return BadDesign(
        "\n".join([f"{_shown(design)}of {total} combinations none is left to try", *reasons])
    )


def _shown(design: Design, rule: Rule | None = None) -> str:
    if design.file is None:
        return f"line {rule.line}: " if rule else ""
    return f"{design.file}:{rule.line}: " if rule else f"{design.file}: "


def _remarks(design: Design, found: _Sorted) -> Iterator[str]:
    for rule in design.rules:
        if rule not in found.used and not _would_skip(design, rule, found):
            yield f"`{rule.plain}` in line {rule.line} skips nothing"
    if found.same == 1:
        yield "1 combination is the same trial as another one, and not tried again"
    elif found.same:
        yield f"{found.same} combinations are the same trials as others, and not tried again"


def _would_skip(design: Design, rule: Rule, found: _Sorted) -> bool:
    return any(rule.skips({**design.fixed, **left.levels}) for left in found.skipped)


def _chosen(design: Design, found: _Sorted) -> tuple[Sequence[int], tuple[str, ...]]:
    """The numbers of what is tried, in the order of the design."""
    everything = range(len(found.specs))
    choice = design.choice
    if choice.is_full:
        return everything, ()
    if choice.random is not None:
        if choice.random >= len(found.specs):
            all_of_them = f"random {choice.random}: all {len(found.specs)} combinations are tried"
            return everything, (all_of_them,)
        return sorted(_by_chance(found.specs, design.seed)[: choice.random]), ()
    if choice.fraction is None:
        return everything, ()
    import numpy as np

    from stepscope.studies.pointsfraction import fraction_of

    table = np.array(found.indexes, dtype=np.int64)
    order = _by_chance(found.specs, design.seed)
    part = fraction_of(table, design.factors, choice.fraction, order, design.seed)
    return part.rows, part.remarks


def _by_chance(specs: Sequence[Spec], seed: int) -> list[int]:
    """An order by hashes: the same everywhere, and for those that stay when others are added."""
    drawn = [hashlib.sha256(f"{seed} {spec.key}".encode()).digest() for spec in specs]
    return sorted(range(len(specs)), key=drawn.__getitem__)


def _points_of_many(design: Design, total: int) -> Points:
    """Too many to look at each: some are drawn, until there are enough that can be tried."""
    if design.choice.random is None or design.choice.random > MOST_COMBINATIONS:
        raise BadDesign(
            f"{_shown(design)}{total:,} combinations are too many to look at",
            f"At most {MOST_COMBINATIONS:,}: give fewer levels, or choose: {{random: 100}}",
        )
    wanted, found = design.choice.random, _Sorted()
    for number in _drawn_numbers(total, design.seed, _MOST_DRAWS_EACH * wanted + 1000):
        _sort_in(design, _indexes_of(design, number), found)
        if len(found.specs) == wanted:
            break
    if not found.specs:
        raise _none_drawn(design, found, total)
    in_order = sorted(range(len(found.specs)), key=found.indexes.__getitem__)
    looked_at = len(found.specs) + len(found.skipped)
    return Points(
        chosen=tuple(found.specs[number] for number in in_order),
        skipped=tuple(found.skipped),
        combinations=total,
        not_chosen=total - looked_at,
        remarks=(f"of {total:,} combinations, {looked_at:,} were drawn and looked at",),
    )


def _drawn_numbers(total: int, seed: int, most: int) -> Iterator[int]:
    chance, seen = random.Random(seed), set()
    for _ in range(most):
        number = int(chance.random() * total)
        if number not in seen:
            seen.add(number)
            yield number


def _indexes_of(design: Design, number: int) -> Indexes:
    indexes = []
    for factor in reversed(design.factors):
        number, index = divmod(number, len(factor.levels))
        indexes.append(index)
    return tuple(reversed(indexes))


def _none_drawn(design: Design, found: _Sorted, total: int) -> BadDesign:
    ((why, number),) = Counter(left.why for left in found.skipped).most_common(1)
    return BadDesign(
        f"{_shown(design)}of {total:,} combinations, {len(found.skipped):,} were drawn, and none "
        f"can be tried; of {number:,}: {why}"
    )


def _middle(factor: Factor) -> Level:
    """Of even numbers, what needs less memory: the lower one, but of memory limits the higher."""
    levels: Sequence[Level] = factor.levels
    numbers = [level for level in levels if _is_number(level) or level is None]
    if len(numbers) == len(levels):
        levels = sorted(levels, key=_as_number)
    return levels[len(levels) // 2 if factor.name in SIZES else (len(levels) - 1) // 2]


def _is_number(level: Level) -> bool:
    return isinstance(level, int | float) and not isinstance(level, bool)


def _as_number(level: Level) -> float:
    """What is not set is as much as there is."""
    return float(level) if _is_number(level) and level is not None else math.inf


def _allowed(design: Design, levels: Mapping[str, Level]) -> Spec | None:
    settings = {**design.fixed, **levels}
    if any(rule.skips(settings) for rule in design.rules):
        return None
    try:
        return make_spec(settings)
    except StepscopeError:
        return None


def _distance(design: Design, wanted: Mapping[str, Level], spec: Spec) -> tuple[int, float]:
    """In how many factors they differ, then by what would need more memory."""
    differ = sum(spec.get(factor.name) != wanted[factor.name] for factor in design.factors)
    return differ, _as_number(spec.get("batch_size"))


def _with(said: Mapping[str, Level]) -> str:
    return f" with {levels_text(said)}" if said else ""


def _why_not(design: Design, wanted: Mapping[str, Level]) -> str:
    settings = {**design.fixed, **wanted}
    try:
        make_spec(settings)
    except StepscopeError as error:
        return f"it cannot be tried: {in_design_words(str(error))}"
    rule = next(rule for rule in design.rules if rule.skips(settings))
    return f"it is skipped by `{rule.plain}` in line {rule.line}"
