"""The combinations of a design: which ones are run, and why others are skipped."""

from __future__ import annotations

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from stepscope.analysis.study.records import Factor, Level
from stepscope.errors import DesignError, StepscopeError
from stepscope.studies.design.records import Design, DesignPoints, SkippedPoint
from stepscope.studies.design.rules import Rule
from stepscope.studies.trial_spec import (
    SIZES,
    TrialSpec,
    levels_text,
    make_spec,
    with_setting_names,
)

MAX_COMBINATIONS = 100_000
_MAX_CHECKS = 5_000_000
"""Rules times combinations: a few seconds."""
_MAX_DRAWS_EACH = 50
_DUPLICATE = "the same trial as another combination"


@dataclass
class _Checked:
    """Combinations that were checked: those that can be run, and those that are skipped."""

    specs: dict[int, TrialSpec] = field(default_factory=dict)
    """By the number of the combination in the order of the design."""
    skipped: list[SkippedPoint] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    """Reasons why combinations are not a valid workload."""
    rules: set[Rule] = field(default_factory=set)
    """Rules that skipped a combination."""
    trials: set[object] = field(default_factory=set)
    duplicates: int = 0


def points_of(design: Design) -> DesignPoints:
    """Return the combinations of a design; raise DesignError if there are none or too many."""
    total = math.prod(len(factor.levels) for factor in design.factors)
    is_many = total > MAX_COMBINATIONS
    to_check = design.sample or 0 if is_many else total
    if to_check * len(design.rules) > _MAX_CHECKS:
        raise DesignError(
            f"{_place(design)}{len(design.rules):,} rules are too many for {to_check:,} "
            "combinations",
            "Use fewer rules or levels",
        )
    if is_many:
        return _points_of_many(design, total)
    checked = _Checked()
    for number in range(total):
        _check(design, number, checked)
    specs = list(checked.specs.values())
    if not specs:
        raise _none_left(design, checked, total)
    remarks = []
    for rule in design.rules:
        skipped = ({**design.fixed, **point.levels} for point in checked.skipped)
        if rule not in checked.rules and not any(map(rule.skips, skipped)):
            remarks.append(f"the rule `{rule.plain}` on line {rule.line} skips nothing")
    if checked.duplicates == 1:
        remarks.append("1 combination is the same trial as another one and is not run again")
    elif checked.duplicates:
        remarks.append(
            f"{checked.duplicates} combinations are the same trials as others and are not run again"
        )
    chosen = specs
    if design.sample is not None and design.sample >= len(specs):
        remarks.append(f"`random: {design.sample}` selects all {len(specs)} combinations")
    elif design.sample is not None:
        # Ordered by hash: the draw is the same on every machine, and a larger sample extends it.
        def draw_order(spec: TrialSpec) -> bytes:
            return hashlib.sha256(f"{design.seed} {spec.key}".encode()).digest()

        keys = {spec.key for spec in sorted(specs, key=draw_order)[: design.sample]}
        chosen = [spec for spec in specs if spec.key in keys]
    not_chosen = len(specs) - len(chosen)
    return DesignPoints(tuple(chosen), tuple(checked.skipped), total, not_chosen, tuple(remarks))


def _points_of_many(design: Design, total: int) -> DesignPoints:
    """Draw combinations at random until enough of them can be run: there are too many to check."""
    if design.sample is None or design.sample > MAX_COMBINATIONS:
        raise DesignError(
            f"{_place(design)}{total:,} combinations exceed the maximum of {MAX_COMBINATIONS:,}",
            "Use fewer levels, or `choose: {random: 100}`",
        )
    checked, seen, generator = _Checked(), set(), random.Random(design.seed)
    for _ in range(_MAX_DRAWS_EACH * design.sample + 1000):
        number = int(generator.random() * total)
        if number in seen:
            continue
        seen.add(number)
        _check(design, number, checked)
        if len(checked.specs) == design.sample:
            break
    drawn = len(checked.specs) + len(checked.skipped)
    if not checked.specs:
        ((why, number),) = Counter(point.why for point in checked.skipped).most_common(1)
        raise DesignError(
            f"{_place(design)}{drawn:,} of {total:,} combinations were drawn at random, and none "
            f"of them can be run. Reason for {number:,} of them: {why}"
        )
    return DesignPoints(
        chosen=tuple(checked.specs[number] for number in sorted(checked.specs)),
        skipped=tuple(checked.skipped),
        combinations=total,
        not_chosen=total - drawn,
        remarks=(f"{drawn:,} of {total:,} combinations were drawn at random and checked",),
    )


def _check(design: Design, number: int, checked: _Checked) -> None:
    levels: dict[str, Level] = {}
    place = number
    for factor in reversed(design.factors):  # the last varies fastest
        place, index = divmod(place, len(factor.levels))
        levels = {factor.name: factor.levels[index], **levels}
    settings = {**design.fixed, **levels}
    rule = next((rule for rule in design.rules if rule.skips(settings)), None)
    if rule is not None:
        checked.rules.add(rule)
        checked.skipped.append(SkippedPoint(levels, rule.why))
        return
    try:
        spec = make_spec(settings)
    except StepscopeError as error:
        why = with_setting_names(str(error))
        checked.refusals[why] += 1
        checked.skipped.append(SkippedPoint(levels, why))
        return
    trial = (spec.workload, spec.limits)
    if trial in checked.trials:
        checked.duplicates += 1
        checked.skipped.append(SkippedPoint(levels, _DUPLICATE))
    else:
        checked.trials.add(trial)
        checked.specs[number] = spec


def _none_left(design: Design, checked: _Checked, total: int) -> DesignError:
    """Return an error with the number of combinations that each rule or reason excludes."""
    if checked.refusals and not checked.rules:
        ((why, number),) = checked.refusals.most_common(1)
        them = "all" if number == total else f"{number}"
        return DesignError(
            f"{_place(design)}None of the {total} combinations can be run. Reason for {them} of "
            f"them: {why}"
        )
    lines = [f"{_place(design)}None of the {total} combinations is left to run"]
    for rule in design.rules:
        number = sum(rule.skips({**design.fixed, **point.levels}) for point in checked.skipped)
        if number:
            lines.append(f"{_place(design, rule)}`{rule.plain}` skips {number} of them")
    refusals = checked.refusals.most_common(3)
    lines += [f"{number} of them cannot be run: {why}" for why, number in refusals]
    return DesignError("\n".join(lines))


def _place(design: Design, rule: Rule | None = None) -> str:
    if design.file is None:
        return f"line {rule.line}: " if rule else ""
    return f"{design.file}:{rule.line}: " if rule else f"{design.file}: "


def default_reference(
    design: Design,
    points: DesignPoints,
    unavailable_reason: Callable[[TrialSpec], str] = lambda spec: "",
) -> TrialSpec:
    """Return the reference trial: the middle level of each factor, and the design's own settings.

    If a rule skips it or it is not available on this machine, the nearest combination is used; of
    equally near ones, the one that needs less memory.
    """
    own = dict(design.reference or {})
    wanted = {factor.name: _middle(factor) for factor in design.factors} | own

    def distance(spec: TrialSpec) -> tuple[int, float]:
        differ = sum(spec.get(factor.name) != wanted[factor.name] for factor in design.factors)
        return differ, _as_number(spec.get("batch_size"))

    def candidates() -> Iterator[dict[str, Level]]:
        yield wanted
        for spec in sorted(points.chosen, key=distance):
            yield {factor.name: spec.get(factor.name) for factor in design.factors} | own

    why = ""
    for levels in candidates():
        settings = {**design.fixed, **levels}
        try:
            spec = make_spec(settings)
        except StepscopeError as error:
            why = why or with_setting_names(str(error))
            continue
        problem = unavailable_reason(spec)
        if rule := next((rule for rule in design.rules if rule.skips(settings)), None):
            problem = f"the rule `{rule.plain}` on line {rule.line} skips it"
        if not problem:
            return spec
        why = why or problem
    settings_text = f" ({levels_text(own)})" if own else ""
    raise DesignError(
        f"{_place(design)}The reference trial{settings_text} cannot be run: {why}",
        "Choose other settings in `blocks: {reference: ...}`, or use `reference: none`",
    )


def _middle(factor: Factor) -> Level:
    """Return the middle level; of two, the one that needs less memory (or the higher limit)."""
    levels: Sequence[Level] = factor.levels
    if all(level is None or _is_number(level) for level in levels):
        levels = sorted(levels, key=_as_number)
    return levels[len(levels) // 2 if factor.name in SIZES else (len(levels) - 1) // 2]


def _is_number(level: Level) -> bool:
    return isinstance(level, int | float) and not isinstance(level, bool)


def _as_number(level: Level) -> float:
    """Return a level for sorting; an unset level is unlimited."""
    return float(level) if _is_number(level) and level is not None else math.inf
