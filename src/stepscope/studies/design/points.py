"""The combinations of a design: which are tried, which are not, and why."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from stepscope.analysis.study.records import Factor, Level
from stepscope.errors import BadDesign, StepscopeError
from stepscope.studies.design.records import Design, DesignPoints, SkippedPoint
from stepscope.studies.design.rules import Rule
from stepscope.studies.trial_spec import SIZES, TrialSpec, in_design_words, levels_text, make_spec

MOST_COMBINATIONS = 100_000
_MOST_DRAWS_EACH = 50
_SAME = "it is the same trial as another one"


@dataclass
class _Sorted:
    """Combinations that were looked at: those that can be tried, and the others."""

    specs: dict[int, TrialSpec] = field(default_factory=dict)
    """By the number of the combination, in the order of the design."""
    skipped: list[SkippedPoint] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    """Why combinations are not a workload."""
    rules: set[Rule] = field(default_factory=set)
    """That skipped something."""
    trials: set[object] = field(default_factory=set)
    same: int = 0


def points_of(design: Design) -> DesignPoints:
    """What a design tries. BadDesign where nothing is left, or there is too much of it."""
    total = math.prod(len(factor.levels) for factor in design.factors)
    if total > MOST_COMBINATIONS:
        return _points_of_many(design, total)
    found = _Sorted()
    for number in range(total):
        _sort_in(design, number, found)
    specs = list(found.specs.values())
    if not specs:
        raise _nothing_left(design, found, total)
    remarks = []
    for rule in design.rules:
        skipped = ({**design.fixed, **point.levels} for point in found.skipped)
        if rule not in found.rules and not any(map(rule.skips, skipped)):
            remarks.append(f"`{rule.plain}` in line {rule.line} skips nothing")
    if found.same == 1:
        remarks.append("1 combination is the same trial as another one, and not tried again")
    elif found.same:
        remarks.append(
            f"{found.same} combinations are the same trials as others, and not tried again"
        )
    chosen = specs
    if design.sample is not None and design.sample >= len(specs):
        remarks.append(f"random {design.sample}: all {len(specs)} combinations are tried")
    elif design.sample is not None:
        # By hashes: the same everywhere, and those that were drawn stay when others are added.
        def drawn(spec: TrialSpec) -> bytes:
            return hashlib.sha256(f"{design.seed} {spec.key}".encode()).digest()

        keys = {spec.key for spec in sorted(specs, key=drawn)[: design.sample]}
        chosen = [spec for spec in specs if spec.key in keys]
    not_chosen = len(specs) - len(chosen)
    return DesignPoints(tuple(chosen), tuple(found.skipped), total, not_chosen, tuple(remarks))


def _points_of_many(design: Design, total: int) -> DesignPoints:
    """Too many to look at each: some are drawn, until there are enough that can be tried."""
    if design.sample is None or design.sample > MOST_COMBINATIONS:
        raise BadDesign(
            f"{_place(design)}{total:,} combinations are too many to look at",
            f"At most {MOST_COMBINATIONS:,}: give fewer levels, or choose: {{random: 100}}",
        )
    found, seen, chance = _Sorted(), set(), random.Random(design.seed)
    for _ in range(_MOST_DRAWS_EACH * design.sample + 1000):
        number = int(chance.random() * total)
        if number in seen:
            continue
        seen.add(number)
        _sort_in(design, number, found)
        if len(found.specs) == design.sample:
            break
    looked_at = len(found.specs) + len(found.skipped)
    if not found.specs:
        ((why, number),) = Counter(point.why for point in found.skipped).most_common(1)
        raise BadDesign(
            f"{_place(design)}of {total:,} combinations, {looked_at:,} were drawn, and none can be "
            f"tried; of {number:,}: {why}"
        )
    return DesignPoints(
        chosen=tuple(found.specs[number] for number in sorted(found.specs)),
        skipped=tuple(found.skipped),
        combinations=total,
        not_chosen=total - looked_at,
        remarks=(f"of {total:,} combinations, {looked_at:,} were drawn and looked at",),
    )


def _sort_in(design: Design, number: int, found: _Sorted) -> None:
    levels: dict[str, Level] = {}
    place = number
    for factor in reversed(design.factors):  # the last varies fastest
        place, index = divmod(place, len(factor.levels))
        levels = {factor.name: factor.levels[index], **levels}
    settings = {**design.fixed, **levels}
    rule = next((rule for rule in design.rules if rule.skips(settings)), None)
    if rule is not None:
        found.rules.add(rule)
        found.skipped.append(SkippedPoint(levels, rule.why))
        return
    try:
        spec = make_spec(settings)
    except StepscopeError as error:
        why = in_design_words(str(error))
        found.refusals[why] += 1
        found.skipped.append(SkippedPoint(levels, why))
        return
    trial = (spec.workload, spec.limits)
    if trial in found.trials:
        found.same += 1
        found.skipped.append(SkippedPoint(levels, _SAME))
    else:
        found.trials.add(trial)
        found.specs[number] = spec


def _nothing_left(design: Design, found: _Sorted, total: int) -> BadDesign:
    """Each reason with how many combinations it takes away, by itself."""
    if found.refusals and not found.rules:
        ((why, number),) = found.refusals.most_common(1)
        of = "each" if number == total else f"{number}"
        return BadDesign(
            f"{_place(design)}none of the {total} combinations can be tried; of {of}: {why}"
        )
    lines = [f"{_place(design)}of {total} combinations none is left to try"]
    for rule in design.rules:
        number = sum(rule.skips({**design.fixed, **point.levels}) for point in found.skipped)
        if number:
            lines.append(f"{_place(design, rule)}`{rule.plain}` skips {number} of them")
    lines += [f"{number}: {why}" for why, number in found.refusals.most_common(3)]
    return BadDesign("\n".join(lines))


def _place(design: Design, rule: Rule | None = None) -> str:
    if design.file is None:
        return f"line {rule.line}: " if rule else ""
    return f"{design.file}:{rule.line}: " if rule else f"{design.file}: "


def default_reference(
    design: Design, points: DesignPoints, lacks: Callable[[TrialSpec], str] = lambda spec: ""
) -> TrialSpec:
    """The reference trial: the middle of everything, but for what the design says.

    Where that is not allowed, or `lacks` something here, the nearest that is; of equally near ones
    the one that needs less memory.
    """
    said = dict(design.reference or {})
    wanted = {factor.name: _middle(factor) for factor in design.factors} | said

    def distance(spec: TrialSpec) -> tuple[int, float]:
        differ = sum(spec.get(factor.name) != wanted[factor.name] for factor in design.factors)
        return differ, _as_number(spec.get("batch_size"))

    def candidates() -> Iterator[dict[str, Level]]:
        yield wanted
        for spec in sorted(points.chosen, key=distance):
            yield {factor.name: spec.get(factor.name) for factor in design.factors} | said

    why = ""
    for levels in candidates():
        settings = {**design.fixed, **levels}
        try:
            spec = make_spec(settings)
        except StepscopeError as error:
            why = why or f"it cannot be tried: {in_design_words(str(error))}"
            continue
        problem = lacks(spec)
        if rule := next((rule for rule in design.rules if rule.skips(settings)), None):
            problem = f"it is skipped by `{rule.plain}` in line {rule.line}"
        if not problem:
            return spec
        why = why or problem
    named = f" with {levels_text(said)}" if said else ""
    raise BadDesign(
        f"{_place(design)}the sentinel{named}: {why}",
        "Say other settings for it, or `sentinel: none`",
    )


def _middle(factor: Factor) -> Level:
    """Of an even number, what needs less memory: the lower, but the higher of memory limits."""
    levels: Sequence[Level] = factor.levels
    if all(level is None or _is_number(level) for level in levels):
        levels = sorted(levels, key=_as_number)
    return levels[len(levels) // 2 if factor.name in SIZES else (len(levels) - 1) // 2]


def _is_number(level: Level) -> bool:
    return isinstance(level, int | float) and not isinstance(level, bool)


def _as_number(level: Level) -> float:
    """What is not set is as much as there is."""
    return float(level) if _is_number(level) and level is not None else math.inf
