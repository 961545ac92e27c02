"""Reads the design file of a study and reports all of its problems at once, with their lines."""

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
from stepscope.errors import StepscopeError, WorkloadError
from stepscope.studies.design import nodes
from stepscope.studies.design.records import Budget, Design
from stepscope.studies.design.rules import Rule, RuleError, make_rule
from stepscope.studies.trial_spec import (
    NAMES,
    checked_level,
    level_text,
    make_spec,
    with_setting_names,
)
from stepscope.workloads.code_reference import is_reference, parse_reference
from stepscope.workloads.custom import find_custom
from stepscope.workloads.spec import SETTINGS, check_model, nearest, setting_type

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
MAX_REPEATS = 1000
_UNBOUNDED = 1 << 62
_UNITS = {
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
}
_PART = re.compile(r"\s*(\d{1,12}(?:\.\d{0,9})?|\.\d{1,9})\s*([a-z]*)\s*", re.IGNORECASE)
_SHARE = re.compile(r"(\d{1,9}(?:\.\d{0,12})?|\.\d{1,12})(?:\s*/\s*(\d{1,9})|\s*(%))?")
_DURATION_FORMS = "Use 90s, 30 min, 2h, 1.5h, 1h30m or a number of seconds"


def read_design(path: Path, is_kept: bool = False) -> Design:
    """Read a design file; raise DesignError with the list of its problems.

    With `is_kept`, the file is the copy in a study folder, and the files that it names are not
    looked up.
    """
    text, root, problems = nodes.open_design(path, is_kept)
    design = _DesignReader(root, problems, None if is_kept else path.parent).design()
    problems.raise_if_any()
    return dataclasses.replace(design, name=design.name or path.stem, file=path, text=text)


def trials_text(design: Design) -> str:
    """Return a text that is equal for designs with the same trials.

    Spacing, comments, budget and repeats do not change it.
    """
    trials = {
        "fixed": dict(design.fixed),
        "factors": [[factor.name, list(factor.levels)] for factor in design.factors],
        "rules": sorted(ast.unparse(ast.parse(rule.plain, mode="eval")) for rule in design.rules),
        "sample": design.sample,
        "seed": design.seed,
        "reference": dict(design.reference or {}) if design.with_reference else None,
    }
    return json.dumps(trials, sort_keys=True)


class _DesignReader:
    """Reads the keys of a file one by one and continues after a problem."""

    def __init__(self, root: Node, problems: nodes.Problems, base: Path | None) -> None:
        """`base` is the folder that custom workloads are relative to; None skips their lookup."""
        self._root = root
        self._problems = problems
        self._report = problems.at
        self._base = base
        self._values: dict[str, Node] = {}

    def design(self) -> Design:
        for name, key, node in nodes.entries(self._root, self._problems, "the design"):
            if name in KEYS:
                self._values[name] = node
            else:
                hint = f"Move `{name}` to `fixed` or `factors`" if name in NAMES else ""
                self._report(key, f"Unknown key {name!r}", hint or nearest(name, KEYS))
        if not isinstance(self._root, MappingNode):
            self._problems.raise_if_any()
        fixed, factors = self._settings()
        rules = self._value_node("skip")
        items = rules.value if isinstance(rules, SequenceNode) else [rules] if rules else []
        return Design(
            name=self._name(),
            fixed=fixed,
            factors=factors,
            rules=tuple(rule for item in items if (rule := self._rule(item))),
            repeats=self._integer(self._value_node("repeats"), "repeats", 1, 1, MAX_REPEATS),
            seed=self._integer(self._value_node("seed"), "seed", 0, 0),
            sample=self._sample(),
            budget=self._budget(),
            **self._blocks(),
            **self._oom(),
        )

    def _value_node(self, key: str) -> Node | None:
        """Return the node of a top-level key; None if it is missing or null."""
        node = self._values.get(key)
        return None if node is None or nodes.is_null(node) else node

    def _parts(self, node: Node | None, what: str, *known: str) -> dict[str, Node]:
        entries = nodes.entries(node, self._problems, what, known) if node else ()
        return {name: value for name, _, value in entries}

    def _name(self) -> str:
        node = self._value_node("name")
        text = node.value if isinstance(node, ScalarNode) else self._problems.file.stem
        if (node is None or isinstance(node, ScalarNode)) and _NAME.fullmatch(text):
            return str(text)
        self._report(
            node or self._root,
            f"Invalid study name {text!r}: it is also the name of a folder",
            "Set `name` to at most 100 letters, digits, spaces and . _ + -",
        )
        return ""

    def _settings(self) -> tuple[dict[str, Level], tuple[Factor, ...]]:
        """Return the fixed settings and the factors; `model` is in one of them."""
        node = self._values.get("factors")
        fixed = self._section(self._values.get("fixed"), "`fixed`")
        varied = self._section(node, "`factors`")
        if node is None or nodes.is_null(node) or not node.value:
            problem = "is missing" if node is None else "is empty"
            self._report(
                node or self._root,
                f"`factors` {problem}: a study needs at least one factor",
                "For example, `factors: {batch_size: [32, 128]}`",
            )
        for name in varied.keys() & fixed.keys():
            line = fixed[name].start_mark.line + 1
            message = f"`{name}` is set in both `fixed` (line {line}) and `factors`"
            self._report(varied[name], message, "Remove one of them")
        factors = tuple(Factor(name, self._levels(name, each)) for name, each in varied.items())
        workload, has_model = self._value_node("workload"), "model" in {**varied, **fixed}
        settings: dict[str, Level] = {}
        if workload is not None:
            settings.update(("model", level) for level in self._level("model", workload))
            if has_model:
                message = "The model is set by both `workload` and `model`"
                self._report(workload, message, "Remove `workload` if `model` is a factor")
        elif not has_model:
            hint = "Set it, for example `workload: cnn`, or vary `model`"
            self._report(self._root, "`workload` is missing", hint)
        settings |= self._single_levels(fixed)
        if "model" in settings and not self._problems.found:
            try:  # the fixed settings may be invalid whatever the levels of the factors are
                make_spec(settings)
            except StepscopeError as error:
                message, hint = with_setting_names(error.message), with_setting_names(error.hint)
                self._report(self._values.get("fixed", self._root), message, hint)
        return settings, factors

    def _section(self, node: Node | None, what: str) -> dict[str, Node]:
        """Return the value nodes of the settings and limits of a section."""
        values: dict[str, Node] = {}
        if node is None:
            return values
        for name, key, value in nodes.entries(node, self._problems, what):
            if name in NAMES:
                values[name] = value
            else:
                self._report(key, f"Unknown setting or limit {name!r}", nearest(name, NAMES))
        return values

    def _single_levels(self, values: Mapping[str, Node]) -> dict[str, Level]:
        settings: dict[str, Level] = {}
        for name, node in values.items():
            if isinstance(node, SequenceNode):
                message = f"Expected a single value for `{name}`, found a list"
                self._report(node, message, "Move it to `factors` to vary it")
            else:
                settings.update((name, level) for level in self._level(name, node))
        return settings

    def _levels(self, name: str, node: Node) -> tuple[Level, ...]:
        if not isinstance(node, SequenceNode):
            raw = node.value if isinstance(node, ScalarNode) else ""
            hint = f"Move it to `fixed`, or write [{raw}]" if raw else "For example, [32, 128]"
            message = f"Expected a list of levels for `{name}`, found {nodes.node_type(node)}"
            self._report(node, message, hint)
            return ()
        if not node.value:
            self._report(node, f"`{name}` has no levels", f"Add levels, or remove `{name}`")
        levels: dict[Level, None] = {}
        for each in node.value:
            for level in self._level(name, each):
                if level in levels:
                    self._report(each, f"Duplicate level {level_text(name, level)} of `{name}`")
                levels[level] = None
        return tuple(levels)

    def _level(self, name: str, node: Node) -> Iterator[Level]:
        """Yield the level of a node; report a problem and yield nothing if it is invalid."""
        kind = setting_type(name) if name in SETTINGS else None
        is_text = name == "model" or str in (kind, *typing.get_args(kind))
        value = None
        try:
            value = nodes.value_of(node, is_text)
            if name == "model" and self._base is not None and is_reference(str(value)):
                _check_custom(str(value), self._base)
            elif name == "model" and self._base is not None and isinstance(value, str):
                check_model(value, self._framework())
            yield checked_level(name, value)
        except nodes.InvalidValue as error:
            self._report(node, error.message, error.hint)
        except StepscopeError as error:
            self._report(node, *_as_written(name, node, value, error))

    def _framework(self) -> str:
        """The framework of all trials; empty if it is a factor."""
        for section in (self._values.get("fixed"), self._values.get("factors")):
            for key, value in section.value if isinstance(section, MappingNode) else ():
                if key.value == "framework":
                    return str(value.value) if isinstance(value, ScalarNode) else ""
        return "torch"

    def _rule(self, node: Node) -> Rule | None:
        when: Node | None = node
        reason = ""
        if not isinstance(node, ScalarNode):
            parts = self._parts(node, "a rule", "when", "reason")
            when = parts.get("when")
            if when is None and isinstance(node, MappingNode):
                hint = "For example, {when: workers > 2, reason: ...}"
                self._report(node, "`when` is missing from the rule", hint)
            reason_node = parts.get("reason")
            if isinstance(reason_node, ScalarNode):
                reason = str(reason_node.value)
            elif reason_node is not None:
                found = nodes.node_type(reason_node)
                self._report(reason_node, f"Expected text for `reason`, found {found}")
            if when is None:
                return None
        if not (isinstance(when, ScalarNode) and when.tag.endswith(":str")):
            found = nodes.node_type(when or node)
            hint = "For example, workers > 2 * cpus"
            self._report(when or node, f"Expected a rule, found {found}", hint)
            return None
        try:
            return make_rule(when.value, when.start_mark.line + 1, reason)
        except RuleError as error:
            on_one_line = when.start_mark.line == when.end_mark.line
            shift = error.column + (not nodes.is_plain(when)) if on_one_line else 0
            self._report(when, error.problem, error.hint, shift)
            return None

    def _integer(
        self, node: Node | None, name: str, default: int, least: int, most: int = _UNBOUNDED
    ) -> int:
        value = None if node is None or nodes.is_null(node) else self._value(node)
        if value is None or node is None:
            return default
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
            return value
        bounds = f"of at least {least}" if most == _UNBOUNDED else f"from {least} to {most:,}"
        self._report(node, f"`{name}` must be an integer {bounds}")
        return default

    def _value(self, node: Node) -> Any:
        try:
            return nodes.value_of(node)
        except nodes.InvalidValue as error:
            self._report(node, error.message, error.hint)
            return None

    def _parsed(self, node: Node | None, parse: Callable[[str], float], hint: str) -> float | None:
        """Parse the text of a scalar, whatever type YAML gives it."""
        if node is None:
            return None
        try:
            if not (isinstance(node, ScalarNode) and node.value):
                raise ValueError(f"Expected a single value, found {nodes.node_type(node)}")
            return parse(node.value)
        except ValueError as error:
            self._report(node, str(error), hint)
            return None

    def _sample(self) -> int | None:
        node = self._value_node("choose")
        if node is None or (isinstance(node, ScalarNode) and node.value == "full"):
            return None
        if not isinstance(node, MappingNode) or not node.value:
            self._report(node, "Invalid value for `choose`", "Use full or {random: 40}")
            return None
        parts = self._parts(node, "`choose`", "random")
        return self._integer(parts["random"], "random", 1, 1) if "random" in parts else None

    def _budget(self) -> Budget:
        node = self._value_node("budget")
        if isinstance(node, ScalarNode):
            return Budget(self._parsed(node, parse_duration, _DURATION_FORMS))
        parts = self._parts(node, "`budget`", "time", "trials")
        seconds = self._parsed(parts.get("time"), parse_duration, _DURATION_FORMS)
        trials = self._integer(parts["trials"], "trials", 1, 1) if "trials" in parts else None
        return Budget(seconds, trials)

    def _blocks(self) -> dict[str, Any]:
        node = self._value_node("blocks")
        parts = self._parts(node, "`blocks`", "size", "reruns", "reference")
        settings: dict[str, Any] = {
            "block": self._integer(parts.get("size"), "size", 8, 1),
            "reruns": self._integer(parts.get("reruns"), "reruns", 1, 0),
        }
        reference = parts.get("reference")
        if isinstance(reference, ScalarNode):
            settings["with_reference"] = False
            if self._value(reference) not in (None, False, "none"):
                hint = "For example, `reference: {batch_size: 32}`"
                self._report(reference, "`reference` must be `none` or a mapping", hint)
        elif reference is not None:
            settings["reference"] = self._single_levels(self._section(reference, "`reference`"))
        return settings

    def _oom(self) -> dict[str, Any]:
        parts = self._parts(self._value_node("oom"), "`oom`", "skip", "test")
        settings: dict[str, Any] = {}
        if "skip" in parts:
            settings["skip_dominated"] = self._value(parts["skip"])
            if not isinstance(settings["skip_dominated"], bool):
                self._report(parts["skip"], "`skip` must be true or false")
        if "test" in parts:
            share = self._parsed(parts["test"], parse_share, "Use 1/2, 0.5 or 50%")
            settings["tested_share"] = share or 0.0
        return settings


def _check_custom(model: str, base: Path) -> None:
    """Check that the function of a custom workload exists, without running its file."""
    place = parse_reference(model)
    try:
        here = Path(place.source).exists() and not (base / place.source).exists()
        find_custom(str(base / model) if place.is_file and not here else model)
    except (OSError, ValueError, RecursionError, MemoryError) as error:
        raise WorkloadError(f"Cannot look up {model!r}: {error}") from None


def _as_written(name: str, node: Node, value: Any, error: StepscopeError) -> tuple[str, str]:
    """Return the message and hint for an invalid level, with the value as the file has it."""
    raw = node.value if isinstance(node, ScalarNode) else ""
    shown = raw if len(raw) <= 60 else f"{raw[:57]}..."
    message, hint = with_setting_names(error.message), with_setting_names(error.hint)
    if value is None:
        return f"`{name}` must not be null", "Remove it to use the default"
    if not isinstance(value, str):
        message = message.replace(repr(value), shown).replace(f" {value} ", f" {shown} ")
    if isinstance(value, bool) and shown not in ("true", "false"):
        hint = hint or f"YAML reads {shown} as {str(value).lower()}: put it in quotes if it is text"
    if isinstance(value, str) and isinstance(node, ScalarNode) and not nodes.is_plain(node):
        is_bare = re.fullmatch(r"[-+]?\d+(\.\d*)?|true|false|yes|no", value)
        hint = hint or ("Remove the quotes" if is_bare else "")
    return message, hint


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as `1h30m` or `90`; raise ValueError if invalid."""
    parts, end = [], 0
    while end < len(text):
        match = _PART.match(text, end)
        if match is None or match.end() == end:
            raise ValueError(f"Invalid duration {text!r}")
        parts.append((float(match[1]), match[2].lower()))
        end = match.end()
    if not parts or (len(parts) > 1 and any(not unit for _, unit in parts)):
        raise ValueError(f"Invalid duration {text!r}")
    try:
        seconds = sum(number * _UNITS[unit] for number, unit in parts)
    except KeyError as unit:
        raise ValueError(f"Invalid duration {text!r}: unknown unit {unit}") from None
    if not seconds > 0:
        raise ValueError(f"Invalid duration {text!r}: it must be greater than 0")
    return seconds


def parse_share(text: str) -> float:
    """Return a share from 0 to 1, written as `1/2`, `0.5` or `50%`; raise ValueError if invalid."""
    match = _SHARE.fullmatch(text.strip())
    if match is None or (match[2] is not None and int(match[2]) == 0):
        raise ValueError(f"Invalid share {text!r}")
    share = Fraction(match[1]) / (int(match[2]) if match[2] else 100 if match[3] else 1)
    if share > 1:
        raise ValueError(f"Invalid share {text!r}: it must not be greater than 1")
    return float(share)
