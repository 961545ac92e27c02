"""Reads the file of a study. All that is wrong with it is told at once, line by line."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from yaml import MappingNode, Node, ScalarNode, SequenceNode

from stepscope.analysis.study.records import Factor, Level
from stepscope.errors import BadWorkload, StepscopeError
from stepscope.studies.design import nodes
from stepscope.studies.design.records import Budget, Design
from stepscope.studies.design.rules import BadRule, Rule, make_rule
from stepscope.studies.trial_spec import (
    NAMES,
    checked_level,
    in_design_words,
    level_text,
    make_spec,
)
from stepscope.workloads.code_place import is_place, parse_place
from stepscope.workloads.own import find_own
from stepscope.workloads.spec import SETTINGS, nearest, setting_type

KEYS = (
    "name",
    "workload",
    "fixed",
    "factors",
    "skip",
    "repeats",
    "choose",
    "seed",
    "budget",
    "blocks",
    "oom",
)
_NAME = re.compile(r"\w(?:[\w .+-]{0,98}[\w+-])?")
MOST_REPEATS = 1000
_UNITS = {
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
}
_PART = re.compile(r"\s*(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})\s*([a-z]*)\s*", re.IGNORECASE)
_SHARE = re.compile(r"(\d{1,9}(?:\.\d{0,12})?|\.\d{1,12})(?:\s*/\s*(\d{1,9})|\s*(%))?")
_DURATION_FORMS = "Give 90s, 30 min, 2h, 1.5h, 1h30m, or seconds"


def read_design(path: Path, is_kept: bool = False) -> Design:
    """The study that a file describes; BadDesign lists what is wrong with it.

    Of one that was kept in the folder of its study, the files that it names may be elsewhere.
    """
    text, root, trouble = nodes.open_design(path)
    design = _DesignReader(root, trouble, None if is_kept else path.parent).design()
    trouble.raise_if_any()
    return dataclasses.replace(design, name=design.name or path.stem, file=path, text=text)


def trials_text(design: Design) -> str:
    """The same for the same trials: whatever the spacing, the comments, the budget, the repeats."""
    trials = {
        "fixed": dict(design.fixed),
        "factors": [[factor.name, list(factor.levels)] for factor in design.factors],
        "rules": sorted(ast.unparse(ast.parse(rule.plain, mode="eval")) for rule in design.rules),
        "sample": design.sample,
        "seed": design.seed,
        "sentinel": dict(design.reference or {}) if design.with_reference else None,
    }
    return json.dumps(trials, sort_keys=True)


class _DesignReader:
    """Reads one key of the file after the other, and goes on when one is wrong."""

    def __init__(self, root: Node, trouble: nodes.Trouble, base: Path | None) -> None:
        """`base` is where the user's own files are looked for; a kept design has none."""
        self._root = root
        self._trouble = trouble
        self._wrong = trouble.at
        self._base = base
        self._found: dict[str, Node] = {}

    def design(self) -> Design:
        for name, key, node in nodes.entries(self._root, self._trouble, "a study"):
            if name in KEYS:
                self._found[name] = node
            else:
                hint = f"Put {name} under fixed or factors" if name in NAMES else ""
                self._wrong(key, f"a study has no {name!r}", hint or nearest(name, KEYS))
        if not isinstance(self._root, MappingNode):
            self._trouble.raise_if_any()
        fixed, factors = self._settings()
        rules = self._said("skip")
        items = rules.value if isinstance(rules, SequenceNode) else [rules] if rules else []
        return Design(
            name=self._name(),
            fixed=fixed,
            factors=factors,
            rules=tuple(rule for item in items if (rule := self._rule(item))),
            repeats=self._whole(self._said("repeats"), "repeats", 1, 1, MOST_REPEATS),
            seed=self._whole(self._said("seed"), "seed", 0, 0),
            sample=self._sample(),
            budget=self._budget(),
            **self._blocks(),
            **self._oom(),
        )

    def _said(self, key: str) -> Node | None:
        node = self._found.get(key)
        return None if node is None or nodes.is_nothing(node) else node

    def _parts(self, node: Node | None, what: str, *known: str) -> dict[str, Node]:
        named = nodes.entries(node, self._trouble, what, known) if node else ()
        return {name: value for name, _, value in named}

    def _name(self) -> str:
        node = self._said("name")
        text = node.value if isinstance(node, ScalarNode) else self._trouble.file.stem
        if (node is None or isinstance(node, ScalarNode)) and _NAME.fullmatch(text):
            return str(text)
        self._wrong(
            node or self._root,
            f"{text!r} cannot name a study: it names a folder",
            "Use letters, digits, spaces and . _ + -, at most 100 (name: ...)",
        )
        return ""

    def _settings(self) -> tuple[dict[str, Level], tuple[Factor, ...]]:
        """What all trials have, and what is varied; the model is one or the other."""
        node = self._found.get("factors")
        fixed = self._places(self._found.get("fixed"), "fixed")
        varied = self._places(node, "factors")
        if node is None or nodes.is_nothing(node) or not node.value:
            hint = "For example, factors: {batch_size: [32, 128]}"
            self._wrong(node or self._root, "there are no factors: nothing would be varied", hint)
        for name in varied.keys() & fixed.keys():
            what = f"{name} is fixed already, in line {fixed[name].start_mark.line + 1}"
            self._wrong(varied[name], what, "Leave one of them out")
        factors = tuple(Factor(name, self._levels(name, each)) for name, each in varied.items())
        workload, has_model = self._said("workload"), "model" in {**varied, **fixed}
        settings: dict[str, Level] = {}
        if workload is not None:
            settings.update(("model", level) for level in self._level("model", workload))
            if has_model:
                what = "the model is said twice: by workload, and by model"
                self._wrong(workload, what, "Leave workload out where model is a factor")
        elif not has_model:
            hint = "Say which: `workload: cnn`, or vary `model`"
            self._wrong(self._root, "there is no workload", hint)
        settings |= self._one_of_each(fixed)
        if "model" in settings and not self._trouble.found:
            try:  # what is fixed may be wrong by itself, whatever is varied
                make_spec(settings)
            except StepscopeError as error:
                what, hint = in_design_words(error.message), in_design_words(error.hint)
                self._wrong(self._found.get("fixed", self._root), what, hint)
        return settings, factors

    def _places(self, node: Node | None, what: str) -> dict[str, Node]:
        """The settings and limits of a section, with the nodes of their values."""
        found: dict[str, Node] = {}
        if node is None:
            return found
        for name, place, value in nodes.entries(node, self._trouble, what):
            if name in NAMES:
                found[name] = value
            else:
                self._wrong(place, f"there is no setting or limit {name!r}", nearest(name, NAMES))
        return found

    def _one_of_each(self, places: Mapping[str, Node]) -> dict[str, Level]:
        settings: dict[str, Level] = {}
        for name, node in places.items():
            if isinstance(node, SequenceNode):
                what = f"{name} should be one value here, not a list"
                self._wrong(node, what, "Lists are for factors")
            else:
                settings.update((name, level) for level in self._level(name, node))
        return settings

    def _levels(self, name: str, node: Node) -> tuple[Level, ...]:
        """All levels of a factor."""
        if not isinstance(node, SequenceNode):
            said = node.value if isinstance(node, ScalarNode) else ""
            hint = f"Put it under fixed, or in a list: [{said}]" if said else "[32, 128]"
            what = f"the levels of {name} are a list, not {nodes.in_words(node)}"
            self._wrong(node, what, hint)
            return ()
        if not node.value:
            self._wrong(node, f"{name} has no levels", "Give some, or leave it out")
        levels: dict[Level, None] = {}
        for each in node.value:
            for level in self._level(name, each):
                if level in levels:
                    self._wrong(each, f"{name} {level_text(name, level)} is there twice")
                levels[level] = None
        return tuple(levels)

    def _level(self, name: str, node: Node) -> Iterator[Level]:
        """A checked level; nothing where it is not one, and that is told."""
        kind = setting_type(name) if name in SETTINGS else None
        is_text = name == "model" or str in (kind, *typing.get_args(kind))
        value = None
        try:
            value = nodes.value_of(node, is_text)
            if name == "model" and self._base is not None and is_place(str(value)):
                _check_own(str(value), self._base)
            yield checked_level(name, value)
        except nodes.NoValue as error:
            self._wrong(node, error.what, error.hint)
        except StepscopeError as error:
            self._wrong(node, *_as_written(name, node, value, error))

    def _rule(self, node: Node) -> Rule | None:
        when: Node | None = node
        because = ""
        if not isinstance(node, ScalarNode):
            parts = self._parts(node, "a rule", "when", "because")
            when = parts.get("when")
            if when is None and isinstance(node, MappingNode):
                self._wrong(node, "a rule says when", "{when: workers > 2, because: ...}")
            reason = parts.get("because")
            if isinstance(reason, ScalarNode):
                because = str(reason.value)
            elif reason is not None:
                self._wrong(reason, "because should be a text")
            if when is None:
                return None
        if not (isinstance(when, ScalarNode) and when.tag.endswith(":str")):
            self._wrong(when or node, "this is no rule", "For example: workers > 2 * cpus")
            return None
        try:
            return make_rule(when.value, when.start_mark.line + 1, because)
        except BadRule as error:
            on_one_line = when.start_mark.line == when.end_mark.line
            shift = error.column + (not nodes.is_plain(when)) if on_one_line else 0
            self._wrong(when, error.what, error.hint, shift)
            return None

    def _whole(
        self, node: Node | None, what: str, default: int, least: int, most: int = 1 << 62
    ) -> int:
        value = None if node is None or nodes.is_nothing(node) else self._value(node)
        if value is None or node is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        bound = f" and at most {most:,}" if most < 1 << 62 else ""
        self._wrong(node, f"{what} should be a whole number, at least {least}{bound}")
        return default

    def _value(self, node: Node) -> Any:
        try:
            return nodes.value_of(node)
        except nodes.NoValue as error:
            self._wrong(node, error.what, error.hint)
            return None

    def _parsed(self, node: Node | None, parse: Callable[[str], float], hint: str) -> float | None:
        """What is made of the text of a value, whatever YAML takes it for."""
        if node is None:
            return None
        try:
            if not (isinstance(node, ScalarNode) and node.value):
                raise ValueError(f"one value is wanted here, not {nodes.in_words(node)}")
            return parse(node.value)
        except ValueError as error:
            self._wrong(node, str(error), hint)
            return None

    def _sample(self) -> int | None:
        node = self._said("choose")
        if node is None or (isinstance(node, ScalarNode) and node.value == "full"):
            return None
        if not isinstance(node, MappingNode) or not node.value:
            self._wrong(node, "this is no choice of combinations", "Give full or {random: 40}")
            return None
        parts = self._parts(node, "choose", "random")
        return self._whole(parts["random"], "random", 1, 1) if "random" in parts else None

    def _budget(self) -> Budget:
        node = self._said("budget")
        if isinstance(node, ScalarNode):
            return Budget(self._parsed(node, parse_duration, _DURATION_FORMS))
        parts = self._parts(node, "budget", "time", "trials")
        seconds = self._parsed(parts.get("time"), parse_duration, _DURATION_FORMS)
        trials = self._whole(parts["trials"], "trials", 1, 1) if "trials" in parts else None
        return Budget(seconds, trials)

    def _blocks(self) -> dict[str, Any]:
        parts = self._parts(self._said("blocks"), "blocks", "size", "reruns", "sentinel")
        settings: dict[str, Any] = {
            "block": self._whole(parts.get("size"), "size", 8, 1),
            "reruns": self._whole(parts.get("reruns"), "reruns", 1, 0),
        }
        reference = parts.get("sentinel")
        if isinstance(reference, ScalarNode):
            settings["with_reference"] = False
            if self._value(reference) not in (None, False, "none"):
                hint = "sentinel: {batch_size: 32}"
                self._wrong(reference, "the sentinel is none, or settings", hint)
        elif reference is not None:
            settings["reference"] = self._one_of_each(self._places(reference, "the sentinel"))
        return settings

    def _oom(self) -> dict[str, Any]:
        parts = self._parts(self._said("oom"), "oom", "skip", "test")
        settings: dict[str, Any] = {}
        if "skip" in parts:
            settings["skip_dominated"] = self._value(parts["skip"])
            if not isinstance(settings["skip_dominated"], bool):
                self._wrong(parts["skip"], "skip is true or false")
        if "test" in parts:
            share = self._parsed(parts["test"], parse_share, "Give 1/2, 0.5 or 50%")
            settings["tested_share"] = share or 0.0
        return settings


def _check_own(model: str, base: Path) -> None:
    """A user's function is looked for at once, without running its file."""
    place = parse_place(model)
    try:
        here = Path(place.source).exists() and not (base / place.source).exists()
        find_own(str(base / model) if place.is_file and not here else model)
    except (OSError, ValueError) as error:
        raise BadWorkload(f"{model!r} cannot be looked for: {error}") from None


def _as_written(name: str, node: Node, value: Any, error: StepscopeError) -> tuple[str, str]:
    """What is wrong with a level, in the words of the file rather than of Python."""
    raw = node.value if isinstance(node, ScalarNode) else ""
    shown = raw if len(raw) <= 60 else f"{raw[:57]}..."
    what, hint = in_design_words(error.message), in_design_words(error.hint)
    if value is None:
        return f"{name} cannot be nothing", "Leave it out for what it usually is"
    if not isinstance(value, str):
        what = what.replace(repr(value), shown).replace(f" {value} ", f" {shown} ")
    if isinstance(value, bool) and shown not in ("true", "false"):
        hint = hint or f"YAML reads {shown} as {str(value).lower()}: put it in quotes if it is text"
    if isinstance(value, str) and isinstance(node, ScalarNode) and not nodes.is_plain(node):
        is_bare = re.fullmatch(r"[-+]?\d+(\.\d*)?|true|false|yes|no", value)
        hint = hint or ("Leave the quotes out" if is_bare else "")
    return what, hint


def parse_duration(text: str) -> float:
    """Seconds of `1h30m`, `90`; ValueError where it is no time, or none at all."""
    parts, end = [], 0
    while end < len(text):
        found = _PART.match(text, end)
        if found is None or found.end() == end:
            raise ValueError(f"{text!r} is no time")
        parts.append((float(found[1]), found[2].lower()))
        end = found.end()
    if not parts or (len(parts) > 1 and any(not unit for _, unit in parts)):
        raise ValueError(f"{text!r} is no time")
    try:
        seconds = sum(number * _UNITS[unit] for number, unit in parts)
    except KeyError as unit:
        raise ValueError(f"{text!r} is no time: there is no unit {unit}") from None
    if not seconds > 0:
        raise ValueError(f"{text!r} is no time at all")
    return seconds


def parse_share(text: str) -> float:
    """A part of a whole, 0 to 1: `1/2`, `0.5`, `50%`; ValueError where it is none."""
    found = _SHARE.fullmatch(text.strip())
    if found is None or (found[2] is not None and int(found[2]) == 0):
        raise ValueError(f"{text!r} is no part of a whole")
    share = Fraction(found[1]) / (int(found[2]) if found[2] else 100 if found[3] else 1)
    if share > 1:
        raise ValueError(f"{text!r} is more than all")
    return float(share)
