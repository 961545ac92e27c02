"""Rules of a design: `workers > 2 * cpus` selects the combinations to skip.

The language is a small part of Python: names of settings and limits, numbers, quoted text, true,
false and none, + - * / // %, comparisons, `in [...]`, and, or, not, min and max. Everything else is
rejected, and the types of compared values are checked when a rule is read.

A limit or setting that is not set is unknown (None). A comparison with it is neither true nor
false, and a rule that depends on it does not apply; only `cpus == none` tests for it. A division by
0 is unknown too.
"""

from __future__ import annotations

import ast
import difflib
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from stepscope.analysis.study.records import Level
from stepscope.errors import DesignError, StepscopeError
from stepscope.studies.trial_spec import DEFAULTS, NAMES, SIZES
from stepscope.trials.limits.spec import parse_size
from stepscope.workloads.spec import (
    DATA,
    PARTS,
    SETTINGS,
    close_names,
    nearest,
    setting_type,
)

MAX_CHARACTERS = 1000
_SIMILAR = 0.75

Settings = Mapping[str, Level]
Value = Callable[[Settings], Any]
Kind = Literal["number", "size", "text", "boolean", "none"]

_KIND_LABELS = {
    "number": "a number",
    "size": "a size",
    "text": "text",
    "boolean": "a boolean",
    "none": "none",
}
_CONSTANTS = {"true": True, "false": False, "none": None}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max}
_TEXTS = frozenset((*DATA, *PARTS, *(text for each in SETTINGS.values() for text in each.choices)))
_SLIPS = (
    (r"&&|\|\|", "Use `and` or `or`"),
    (r"![^=]", "Use `not`"),
    (r"=>|=<", "Use `>=` or `<=`"),
    (r"(?<![<>=!])=(?!=)", "Use == to test for equality"),
    (r"\d\s*[kmgt]i?b?\b", 'Put sizes in quotes: "8GiB"'),
)
"""Syntax of other languages, with the correction."""


class RuleError(DesignError):
    """An invalid rule, with the column of the problem in its text."""

    def __init__(self, problem: str, hint: str = "", column: int = 0, line: int = 0) -> None:
        super().__init__(f"Line {line}, column {column + 1} of the rule: {problem}", hint)
        self.problem = problem
        self.column = column


@dataclass(frozen=True)
class Rule:
    """Selects the combinations to skip. `make_rule` also checks its text."""

    text: str
    line: int
    reason: str = ""

    def skips(self, settings: Settings) -> bool:
        """Return whether a combination is skipped; missing settings have their defaults."""
        return self._condition(settings) is True

    @property
    def why(self) -> str:
        """The reason that is reported for a combination that the rule skips."""
        return f"{self.plain}: {self.reason}" if self.reason else self.plain

    @cached_property
    def plain(self) -> str:
        """The text of the rule with normalized spacing."""
        return " ".join(self.text.split())

    @cached_property
    def _condition(self) -> Value:
        return _Reader(self.text, self.line).condition()


def make_rule(text: str, line: int, reason: str) -> Rule:
    """Return a checked rule; raise RuleError if it is invalid."""
    rule = Rule(text, line, reason)
    _ = rule._condition
    return rule


@dataclass(frozen=True)
class _Part:
    """A part of a rule: its type, and the function that returns its value."""

    kind: Kind
    value: Value
    node: ast.expr
    name: str = ""
    """Set if the part is just a setting or limit."""
    text: str | None = None
    """Set if the part is just quoted text."""


class _Reader:
    """Compiles the text of a rule into functions of the settings."""

    def __init__(self, text: str, line: int) -> None:
        flat = re.sub(r"\s", " ", text)
        self.text = flat.strip()
        self.indent = len(flat) - len(flat.lstrip())
        self.line = line

    def condition(self) -> Value:
        if not self.text:
            raise RuleError("The rule is empty", "For example, workers > 2 * cpus", 0, self.line)
        if len(self.text) > MAX_CHARACTERS:
            too_long = f"The rule is longer than {MAX_CHARACTERS} characters"
            raise RuleError(too_long, "Split it into several rules", 0, self.line)
        column, hint = self.indent, ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(self.text, mode="eval").body
            return self._boolean(tree).value
        except SyntaxError as error:
            column += min(max((error.offset or 1) - 1, 0), len(self.text) - 1)
            hint = next((h for slip, h in _SLIPS if re.search(slip, self.text, re.I)), "")
        except (ValueError, MemoryError, RecursionError):
            pass
        raise RuleError("Syntax error", hint, column, self.line)

    def _error(self, node: ast.expr, problem: str, hint: str = "") -> RuleError:
        before = self.text.encode()[: node.col_offset].decode(errors="ignore")
        return RuleError(problem, hint, self.indent + len(before), self.line)

    def _read(self, node: ast.expr) -> _Part:
        match node:
            case ast.Name(id=word) if word in _CONSTANTS:
                return _constant(node, _CONSTANTS[word])
            case ast.Name(id=name) if name in NAMES:
                return _setting(node, name)
            case ast.Name(id=name):
                problem = f"Unknown setting or limit {name!r}"
                raise self._error(node, problem, _name_hint(name))
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return _constant(node, value)
            case ast.BoolOp(op=op, values=values):
                parts = [self._boolean(each).value for each in values]
                join = _all_hold if isinstance(op, ast.And) else _any_holds
                return _Part("boolean", lambda settings: join(p(settings) for p in parts), node)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._boolean(operand).value
                return _Part("boolean", lambda settings: _negated(inner(settings)), node)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                (part,) = self._numbers(operand)
                work = operator.neg if isinstance(sign, ast.USub) else operator.pos
                return _Part(part.kind, _known(work, part), node)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                one, other = self._numbers(left, right)
                is_ratio = isinstance(op, ast.Div | ast.FloorDiv) and one.kind == other.kind
                kind: Kind = "number" if is_ratio else _size_if_any(one, other)
                return _Part(kind, _known(_ARITHMETIC[type(op)], one, other), node)
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=args, keywords=[]):
                if len(args) < 2:
                    problem = f"`{name}` needs at least two values"
                    raise self._error(node, problem, f"For example, {name}(workers, 2)")
                numbers = self._numbers(*args)
                return _Part(_size_if_any(*numbers), _known(_FUNCTIONS[name], *numbers), node)
            case ast.Compare(left=left, ops=ops, comparators=others):
                nodes = zip([left, *others], ops, others, strict=False)
                pairs = [self._comparison(*each) for each in nodes]
                return _Part(
                    "boolean", lambda settings: _all_hold(p(settings) for p in pairs), node
                )
        source = ast.get_source_segment(self.text, node) or ""
        raise self._error(
            node,
            f"{source[:40]!r} is not allowed in a rule",
            "Use names, numbers, quoted text, + - * / // %, comparisons, in [...], and, or, not, "
            "min and max",
        )

    def _boolean(self, node: ast.expr) -> _Part:
        part = self._read(node)
        if part.kind == "boolean":
            return part
        name = part.name or "..."
        example = {"text": f'{name} == "..."', "none": "cpus == none"}.get(part.kind, f"{name} > 0")
        raise self._error(
            node,
            f"Expected a condition, found {_KIND_LABELS[part.kind]}",
            f"Compare it with a value, for example {example}",
        )

    def _numbers(self, *nodes: ast.expr) -> list[_Part]:
        parts = self._with_sizes(*nodes)
        for part in parts:
            if part.kind not in ("number", "size"):
                found = _KIND_LABELS[part.kind]
                raise self._error(part.node, f"Expected a number, found {found}")
        return parts

    def _with_sizes(self, *nodes: ast.expr) -> list[_Part]:
        """Read parts; quoted text that is combined with a size is parsed as a size: "8GiB"."""
        parts = [self._read(node) for node in nodes]
        if _size_if_any(*parts) == "number":
            return parts
        for at, part in enumerate(parts):
            if part.text is not None:
                try:
                    parts[at] = replace(_constant(part.node, parse_size(part.text)), kind="size")
                except StepscopeError as error:
                    raise self._error(part.node, error.message, error.hint) from None
        return parts

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Value:
        if isinstance(op, ast.In | ast.NotIn):
            return self._membership(left, right, isinstance(op, ast.In))
        if type(op) not in _COMPARISONS:
            raise self._error(right, "`is` is not allowed in a rule", "Use == or !=")
        work = _COMPARISONS[type(op)]
        first, second = self._with_sizes(left, right)
        self._check_comparable(first, second, in_order=not isinstance(op, ast.Eq | ast.NotEq))
        if "none" in (first.kind, second.kind):
            return lambda settings: work(first.value(settings), second.value(settings))
        return _known(work, first, second)

    def _membership(self, left: ast.expr, right: ast.expr, inside: bool) -> Value:
        if not isinstance(right, ast.List | ast.Tuple | ast.Set):
            raise self._error(right, "`in` needs a list", "For example, workers in [0, 2]")
        first, *others = self._with_sizes(left, *right.elts)
        for other in others:
            self._check_comparable(first, other, in_order=False)
        equal = [_known(operator.eq, first, each) for each in others if each.kind != "none"]
        includes_none = len(equal) < len(others)

        def is_in(settings: Settings) -> bool | None:
            if first.value(settings) is None:
                is_inside = True if includes_none else None
            else:
                is_inside = _any_holds(each(settings) for each in equal)
            return is_inside if inside else _negated(is_inside)

        return is_in

    def _check_comparable(self, first: _Part, second: _Part, in_order: bool) -> None:
        kinds = {"number" if part.kind == "size" else part.kind for part in (first, second)}
        if len(kinds) > 1 and ("none" not in kinds or in_order):
            texts = [part.text for part in (first, second) if part.text is not None]
            is_quoted_number = texts and re.fullmatch(r"-?\d+(\.\d*)?", texts[0])
            raise self._error(
                second.node,
                f"Cannot compare {_KIND_LABELS[first.kind]} with {_KIND_LABELS[second.kind]}",
                "Remove the quotes" if is_quoted_number else "",
            )
        if in_order and kinds != {"number"}:
            problem = "Only numbers can be compared with <, <=, > or >="
            raise self._error(second.node, problem, "Use == or !=")
        for named, other in ((first, second), (second, first)):
            setting, text = SETTINGS.get(named.name), other.text
            if setting is None or not setting.choices or text is None:
                continue
            if text not in setting.choices and not setting.also(text):
                problem = f"Unknown {named.name} {text!r}"
                raise self._error(other.node, problem, nearest(text, setting.choices))


def _constant(node: ast.expr, value: Any) -> _Part:
    kinds: dict[type, Kind] = {type(None): "none", bool: "boolean", str: "text"}
    text = value if isinstance(value, str) else None
    return _Part(kinds.get(type(value), "number"), lambda settings: value, node, text=text)


def _size_if_any(*parts: _Part) -> Kind:
    return "size" if any(part.kind == "size" for part in parts) else "number"


def _setting(node: ast.expr, name: str) -> _Part:
    types = str(setting_type(name)) if name in SETTINGS else ""
    kind: Kind = "boolean" if "bool" in types else "number"
    if name == "model" or "str" in types:
        kind = "text"
    elif name in SIZES:
        kind = "size"
    default = DEFAULTS.get(name)

    def value(settings: Settings) -> Level:
        level = settings.get(name, default)
        return len(level.split(",")) if name == "gpus" and isinstance(level, str) else level

    return _Part(kind, value, node, name=name)


def _name_hint(name: str) -> str:
    known = (*NAMES, *_CONSTANTS, *_FUNCTIONS)
    quoted = f'Put text in quotes: "{name}"'
    if name in _TEXTS or not close_names(name, known):
        return quoted
    is_slip = difflib.get_close_matches(name, known, cutoff=_SIMILAR)
    return nearest(name, known) if is_slip else f"{nearest(name, known)} {quoted}"


def _known(work: Callable[..., Any], *parts: _Part) -> Value:
    """Apply a function to values; None if one of them is unknown or the result is undefined."""
    getters = [part.value for part in parts]

    def value(settings: Settings) -> Any:
        values = [getter(settings) for getter in getters]
        if None in values:
            return None
        try:
            return work(*values)
        except ArithmeticError:
            return None

    return value


def _negated(holds: bool | None) -> bool | None:
    return None if holds is None else not holds


def _all_hold(parts: Iterable[bool | None]) -> bool | None:
    holds = list(parts)
    return False if False in holds else None if None in holds else True


def _any_holds(parts: Iterable[bool | None]) -> bool | None:
    return _negated(_all_hold(map(_negated, parts)))
