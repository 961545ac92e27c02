"""Rules of a design: `workers > 2 * cpus` says which combinations are left out.

A small language, parsed by Python's parser: names of settings and limits, numbers, quoted texts,
true, false and none, + - * / // %, comparisons, `in [...]`, and, or, not, min and max. Nothing else
of Python is let in, and what kinds of values are compared is checked when a rule is read.

What is not set ("as much as there is") is unknown (None here): a comparison with it is neither true
nor false, and a rule that depends on it does not apply. Only `cpus == none` asks for just that. A
division by 0 is unknown, too.
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
from stepscope.errors import BadDesign, StepscopeError
from stepscope.studies.trial_spec import DEFAULTS, NAMES, SIZES
from stepscope.trials.limits.spec import parse_size
from stepscope.workloads.spec import DATA, PARTS, SETTINGS, nearest, setting_type

MOST_CHARACTERS = 1000
_QUITE_ALIKE = 0.75

Settings = Mapping[str, Level]
Value = Callable[[Settings], Any]
Kind = Literal["number", "size", "text", "truth", "nothing"]

_KIND_WORDS = {
    "number": "a number",
    "size": "a size",
    "text": "text",
    "truth": "true or false",
    "nothing": "nothing",
}
_WORDS = {"true": True, "false": False, "none": None}
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
    (r"&&|\|\|", "Write `and`, `or`"),
    (r"![^=]", "Write `not`"),
    (r"=>|=<", "Write `>=` or `<=`"),
    (r"(?<![<>=!])=(?!=)", "Equal is written =="),
    (r"\d\s*[kmgt]i?b?\b", 'A size stands in quotes: "8GiB"'),
)
"""What people write who know another language."""


class BadRule(BadDesign):
    """A rule that cannot be understood, and where in its text."""

    def __init__(self, what: str, hint: str = "", column: int = 0, line: int = 0) -> None:
        super().__init__(f"line {line}, column {column + 1} of the rule: {what}", hint)
        self.what = what
        self.column = column


@dataclass(frozen=True)
class Rule:
    """Which combinations are left out. `make_rule` checks one at once."""

    text: str
    line: int
    because: str = ""

    def skips(self, settings: Settings) -> bool:
        """Whether a combination is left out; settings that it does not name have their default."""
        return self._condition(settings) is True

    @property
    def why(self) -> str:
        """What is told of a combination that it leaves out."""
        return f"{self.plain}: {self.because}" if self.because else self.plain

    @cached_property
    def plain(self) -> str:
        """Its text, however it was spaced."""
        return " ".join(self.text.split())

    @cached_property
    def _condition(self) -> Value:
        return _Reader(self.text, self.line).condition()


def make_rule(text: str, line: int, because: str) -> Rule:
    """A checked rule; BadRule says what is wrong with it, and where."""
    rule = Rule(text, line, because)
    _ = rule._condition
    return rule


@dataclass(frozen=True)
class _Part:
    """A part of a rule: of what kind it is, and how to get its value."""

    kind: Kind
    value: Value
    node: ast.expr
    name: str = ""
    """Where it is just a setting or a limit."""
    text: str | None = None
    """Where it is just a quoted text."""


class _Reader:
    """Turns the text of a rule into functions of settings, one for each part of it."""

    def __init__(self, text: str, line: int) -> None:
        flat = re.sub(r"\s", " ", text)
        self.text = flat.strip()
        self.indent = len(flat) - len(flat.lstrip())
        self.line = line

    def condition(self) -> Value:
        if not self.text:
            raise BadRule("the rule is empty", "For example: workers > 2 * cpus", 0, self.line)
        if len(self.text) > MOST_CHARACTERS:
            too_long = f"the rule has more than {MOST_CHARACTERS} characters"
            raise BadRule(too_long, "Make several of it", 0, self.line)
        column, hint = self.indent, ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(self.text, mode="eval").body
            return self._truth(tree).value
        except SyntaxError as error:
            column += min(max((error.offset or 1) - 1, 0), len(self.text) - 1)
            hint = next((h for slip, h in _SLIPS if re.search(slip, self.text, re.I)), "")
        except (ValueError, MemoryError, RecursionError):
            pass
        raise BadRule("this cannot be understood", hint, column, self.line)

    def _wrong(self, node: ast.expr, what: str, hint: str = "") -> BadRule:
        before = self.text.encode()[: node.col_offset].decode(errors="ignore")
        return BadRule(what, hint, self.indent + len(before), self.line)

    def _read(self, node: ast.expr) -> _Part:
        match node:
            case ast.Name(id=word) if word in _WORDS:
                return _constant(node, _WORDS[word])
            case ast.Name(id=name) if name in NAMES:
                return _setting(node, name)
            case ast.Name(id=name):
                what = f"there is no setting or limit {name!r}"
                raise self._wrong(node, what, _name_hint(name))
            case ast.Constant(value=None | bool() | int() | float() | str() as value):
                return _constant(node, value)
            case ast.BoolOp(op=op, values=values):
                parts = [self._truth(each).value for each in values]
                join = _all_hold if isinstance(op, ast.And) else _any_holds
                return _Part("truth", lambda settings: join(p(settings) for p in parts), node)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                inner = self._truth(operand).value
                return _Part("truth", lambda settings: _opposite(inner(settings)), node)
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
                    what = f"{name} is of two values or more"
                    raise self._wrong(node, what, f"{name}(workers, 2)")
                numbers = self._numbers(*args)
                return _Part(_size_if_any(*numbers), _known(_FUNCTIONS[name], *numbers), node)
            case ast.Compare(left=left, ops=ops, comparators=others):
                nodes = zip([left, *others], ops, others, strict=False)
                pairs = [self._comparison(*each) for each in nodes]
                return _Part("truth", lambda settings: _all_hold(p(settings) for p in pairs), node)
        source = ast.get_source_segment(self.text, node) or ""
        raise self._wrong(
            node,
            f"{source[:40]!r} has no place in a rule",
            "A rule has names, numbers, quoted texts, + - * / // %, comparisons, in [...], "
            "and, or, not, min and max",
        )

    def _truth(self, node: ast.expr) -> _Part:
        part = self._read(node)
        if part.kind == "truth":
            return part
        name = part.name or "it"
        hint = {"text": f'{name} == "..."', "nothing": "cpus == none"}.get(part.kind, f"{name} > 0")
        raise self._wrong(
            node,
            f"this is {_KIND_WORDS[part.kind]}, and neither true nor false",
            f"Compare it with something: {hint}",
        )

    def _numbers(self, *nodes: ast.expr) -> list[_Part]:
        parts = self._with_sizes(*nodes)
        for part in parts:
            if part.kind not in ("number", "size"):
                what = f"this is {_KIND_WORDS[part.kind]}: only numbers can be computed with"
                raise self._wrong(part.node, what)
        return parts

    def _with_sizes(self, *nodes: ast.expr) -> list[_Part]:
        """Beside a size, a quoted text is one too: "8GiB"."""
        parts = [self._read(node) for node in nodes]
        if _size_if_any(*parts) == "number":
            return parts
        for at, part in enumerate(parts):
            if part.text is not None:
                try:
                    parts[at] = replace(_constant(part.node, parse_size(part.text)), kind="size")
                except StepscopeError as error:
                    raise self._wrong(part.node, error.message, error.hint) from None
        return parts

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Value:
        if isinstance(op, ast.In | ast.NotIn):
            return self._membership(left, right, isinstance(op, ast.In))
        if type(op) not in _COMPARISONS:
            raise self._wrong(right, "`is` has no place in a rule", "Write == or !=")
        work = _COMPARISONS[type(op)]
        first, second = self._with_sizes(left, right)
        self._check_comparable(first, second, in_order=not isinstance(op, ast.Eq | ast.NotEq))
        if "nothing" in (first.kind, second.kind):
            return lambda settings: work(first.value(settings), second.value(settings))
        return _known(work, first, second)

    def _membership(self, left: ast.expr, right: ast.expr, inside: bool) -> Value:
        if not isinstance(right, ast.List | ast.Tuple | ast.Set):
            raise self._wrong(right, "`in` wants a list", "For example: workers in [0, 2]")
        first, *others = self._with_sizes(left, *right.elts)
        for other in others:
            self._check_comparable(first, other, in_order=False)
        equal = [_known(operator.eq, first, each) for each in others if each.kind != "nothing"]
        asks_for_nothing = len(equal) < len(others)

        def is_in(settings: Settings) -> bool | None:
            if first.value(settings) is None:
                found = True if asks_for_nothing else None
            else:
                found = _any_holds(each(settings) for each in equal)
            return found if inside else _opposite(found)

        return is_in

    def _check_comparable(self, first: _Part, second: _Part, in_order: bool) -> None:
        kinds = {"number" if part.kind == "size" else part.kind for part in (first, second)}
        if len(kinds) > 1 and ("nothing" not in kinds or in_order):
            texts = [part.text for part in (first, second) if part.text is not None]
            is_quoted_number = texts and re.fullmatch(r"-?\d+(\.\d*)?", texts[0])
            raise self._wrong(
                second.node,
                f"{_KIND_WORDS[first.kind]} cannot be compared with {_KIND_WORDS[second.kind]}",
                "Leave the quotes out" if is_quoted_number else "",
            )
        if in_order and kinds != {"number"}:
            raise self._wrong(second.node, "only numbers are less or more", "Write == or !=")
        for named, other in ((first, second), (second, first)):
            setting, text = SETTINGS.get(named.name), other.text
            if setting is None or not setting.choices or text is None:
                continue
            if text not in setting.choices and not setting.also(text):
                what = f"{named.name} is never {text!r}"
                raise self._wrong(other.node, what, nearest(text, setting.choices))


def _constant(node: ast.expr, value: Any) -> _Part:
    kinds: dict[type, Kind] = {type(None): "nothing", bool: "truth", str: "text"}
    text = value if isinstance(value, str) else None
    return _Part(kinds.get(type(value), "number"), lambda settings: value, node, text=text)


def _size_if_any(*parts: _Part) -> Kind:
    return "size" if any(part.kind == "size" for part in parts) else "number"


def _setting(node: ast.expr, name: str) -> _Part:
    types = str(setting_type(name)) if name in SETTINGS else ""
    kind: Kind = "truth" if "bool" in types else "number"
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
    known = (*NAMES, *_WORDS, *_FUNCTIONS)
    quoted = f'Text stands in quotes: "{name}"'
    if name in _TEXTS or not difflib.get_close_matches(name, known, cutoff=0.5):
        return quoted
    is_slip = difflib.get_close_matches(name, known, cutoff=_QUITE_ALIKE)
    return nearest(name, known) if is_slip else f"{nearest(name, known)} {quoted}"


def _known(work: Callable[..., Any], *parts: _Part) -> Value:
    """What is made of values; unknown where one of them is, or where it cannot be computed."""
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


def _opposite(holds: bool | None) -> bool | None:
    return None if holds is None else not holds


def _all_hold(parts: Iterable[bool | None]) -> bool | None:
    holds = list(parts)
    return False if False in holds else None if None in holds else True


def _any_holds(parts: Iterable[bool | None]) -> bool | None:
    return _opposite(_all_hold(map(_opposite, parts)))
