"""Rules of a design in words: `workers > 2 * cpus` says which combinations are left out.

A small language of its own, read with Python's parser: names of knobs and limits, numbers, quoted
texts, true, false and none, + - * / // %, comparisons, `in [...]`, and, or, not, min and max.
Nothing else of Python is let in, and what kinds of things are compared is checked at once.

What is not set ("as much as there is") is not known: a comparison with it is neither true nor
false, and a rule that hangs on it does not apply. Only `cpus == none` asks for just that. A
division by 0 is not known either.
"""

from __future__ import annotations

import ast
import difflib
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from stepscope.analysis.study.records import Level
from stepscope.errors import BadDesign, StepscopeError
from stepscope.studies.spec import DEFAULTS, NAMES, SIZES
from stepscope.trials.limits import parse_size
from stepscope.workloads.spec import DATA, KNOBS, PARTS, knob_type, nearest

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
_EQUALITY: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_ORDER: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max}
_TEXTS = frozenset((*DATA, *PARTS, *(text for knob in KNOBS.values() for text in knob.choices)))
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
    """Of the design's file."""
    because: str = ""

    def skips(self, settings: Settings) -> bool:
        """Whether a combination is left out; what is not in it is as it would be anyway."""
        return self._condition.holds(settings) is True

    @property
    def names(self) -> frozenset[str]:
        """The knobs and limits that it looks at."""
        return self._condition.names

    @property
    def why(self) -> str:
        """What is told of a combination that it leaves out."""
        return f"{self.plain}: {self.because}" if self.because else self.plain

    @cached_property
    def plain(self) -> str:
        """Its text, however it was spaced."""
        return " ".join(self.text.split())

    @cached_property
    def _condition(self) -> _Condition:
        return _Reader(self.text, self.line).condition()


def make_rule(text: str, line: int, because: str, known_names: Collection[str] = NAMES) -> Rule:
    """A checked rule; BadRule says what is wrong with it, and where."""
    condition = _Reader(text, line, known_names).condition()
    rule = Rule(text, line, because)
    rule.__dict__["_condition"] = condition
    return rule


@dataclass(frozen=True)
class _Condition:
    """A rule that was understood. It holds, or does not, or it is not known (None)."""

    names: frozenset[str]
    holds: Callable[[Settings], bool | None]


@dataclass(frozen=True)
class _Part:
    """A part of a rule: of what kind it is, and how to get its value."""

    kind: Kind
    value: Value
    node: ast.expr
    name: str = ""
    """Where it is just a knob or a limit."""
    text: str | None = None
    """Where it is just a quoted text."""

    @property
    def is_number(self) -> bool:
        return self.kind in ("number", "size")


class _Reader:
    """Turns the text of a rule into functions, one for each part of it."""

    def __init__(self, text: str, line: int, known: Collection[str] = NAMES) -> None:
        self.text = re.sub(r"\s", " ", text)
        self.line = line
        self.known = known
        self.names: set[str] = set()

    def condition(self) -> _Condition:
        part = self._truth(self._parsed())
        return _Condition(frozenset(self.names), part.value)

    def _parsed(self) -> ast.expr:
        if not self.text.strip():
            raise BadRule("the rule is empty", "For example: workers > 2 * cpus", 0, self.line)
        if len(self.text) > MOST_CHARACTERS:
            too_long = f"the rule has more than {MOST_CHARACTERS} characters"
            raise BadRule(too_long, "Make several of it", 0, self.line)
        start = len(self.text) - len(self.text.lstrip())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self.text.strip(), mode="eval").body
        except SyntaxError as error:
            at = min(start + max((error.offset or 1) - 1, 0), len(self.text) - 1)
            raise BadRule("this cannot be understood", self._slip(), at, self.line) from None
        except (ValueError, MemoryError, RecursionError):
            raise BadRule("this cannot be understood", "", start, self.line) from None

    def _slip(self) -> str:
        return next((hint for slip, hint in _SLIPS if re.search(slip, self.text, re.I)), "")

    def _wrong(self, node: ast.expr, what: str, hint: str = "") -> BadRule:
        start = len(self.text) - len(self.text.lstrip())
        before = self.text.strip().encode()[: node.col_offset]
        return BadRule(what, hint, start + len(before.decode(errors="ignore")), self.line)

    def _read(self, node: ast.expr) -> _Part:
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.Constant):
            return self._constant(node, node.value)
        if isinstance(node, ast.BoolOp):
            return self._and_or(node)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.BinOp):
            return self._arithmetic(node)
        if isinstance(node, ast.Compare):
            return self._comparisons(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        raise self._forbidden(node)

    def _forbidden(self, node: ast.expr) -> BadRule:
        part = ast.get_source_segment(self.text.strip(), node) or ""
        return self._wrong(
            node,
            f"{part[:40]!r} has no place in a rule",
            "A rule has names, numbers, quoted texts, + - * / // %, comparisons, in [...], "
            "and, or, not, min and max",
        )

    def _name(self, node: ast.Name) -> _Part:
        if node.id in _WORDS:
            return self._constant(node, _WORDS[node.id])
        if node.id not in self.known:
            raise self._wrong(
                node, f"there is no knob or limit {node.id!r}", self._name_hint(node.id)
            )
        self.names.add(node.id)
        return _Part(_kind_of(node.id), _getter(node.id), node, name=node.id)

    def _name_hint(self, name: str) -> str:
        known = (*self.known, *_WORDS, *_FUNCTIONS)
        quoted = f'Text stands in quotes: "{name}"'
        if difflib.get_close_matches(name, known, cutoff=_QUITE_ALIKE) and name not in _TEXTS:
            return nearest(name, known)
        alike = nearest(name, known)
        return f"{alike} {quoted}" if alike.startswith("Did") and name not in _TEXTS else quoted

    def _constant(self, node: ast.expr, value: object) -> _Part:
        if value is None:
            return _Part("nothing", lambda settings: None, node)
        if isinstance(value, bool):
            return _Part("truth", lambda settings: value, node)
        if isinstance(value, int | float):
            return _Part("number", lambda settings: value, node)
        if isinstance(value, str):
            return _Part("text", lambda settings: value, node, text=value)
        raise self._forbidden(node)

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

    def _and_or(self, node: ast.BoolOp) -> _Part:
        values = [self._truth(each).value for each in node.values]
        join = _all_hold if isinstance(node.op, ast.And) else _any_holds
        return _Part("truth", lambda settings: join(value(settings) for value in values), node)

    def _unary(self, node: ast.UnaryOp) -> _Part:
        if isinstance(node.op, ast.Not):
            inner = self._truth(node.operand).value
            return _Part("truth", lambda settings: _opposite(inner(settings)), node)
        if isinstance(node.op, ast.USub | ast.UAdd):
            sign = -1 if isinstance(node.op, ast.USub) else 1
            part = self._numbers([self._read(node.operand)])[0]
            return _Part(part.kind, _known(lambda value: sign * value, part.value), node)
        raise self._forbidden(node)

    def _arithmetic(self, node: ast.BinOp) -> _Part:
        work = _ARITHMETIC.get(type(node.op))
        if work is None:
            raise self._forbidden(node)
        left, right = self._numbers([self._read(node.left), self._read(node.right)])
        is_share = isinstance(node.op, ast.Div | ast.FloorDiv) and left.kind == right.kind
        kind: Kind = "size" if "size" in (left.kind, right.kind) and not is_share else "number"
        return _Part(kind, _known(work, left.value, right.value), node)

    def _call(self, node: ast.Call) -> _Part:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in _FUNCTIONS or node.keywords:
            raise self._forbidden(node)
        if len(node.args) < 2:
            raise self._wrong(node, f"{name} is of two values or more", f"{name}(workers, 2)")
        parts = self._numbers([self._read(each) for each in node.args])
        kind: Kind = "size" if any(part.kind == "size" for part in parts) else "number"
        return _Part(kind, _known(_FUNCTIONS[name], *(part.value for part in parts)), node)

    def _numbers(self, parts: Sequence[_Part]) -> list[_Part]:
        """To be computed with, sizes in quotes among them."""
        parts = self._with_sizes(parts)
        for part in parts:
            if not part.is_number:
                raise self._wrong(
                    part.node,
                    f"this is {_KIND_WORDS[part.kind]}: only numbers can be computed with",
                )
        return list(parts)

    def _with_sizes(self, parts: Sequence[_Part]) -> list[_Part]:
        """Beside a size, a quoted text is one too: "8GiB"."""
        if not any(part.kind == "size" for part in parts):
            return list(parts)
        return [part if part.text is None else self._size(part) for part in parts]

    def _size(self, part: _Part) -> _Part:
        try:
            size = parse_size(part.text or "")
        except StepscopeError as error:
            raise self._wrong(part.node, error.message, error.hint) from None
        return _Part("size", lambda settings: size, part.node)

    def _comparisons(self, node: ast.Compare) -> _Part:
        nodes = [node.left, *node.comparators]
        pairs = [
            self._comparison(left, op, right)
            for left, op, right in zip(nodes, node.ops, nodes[1:], strict=False)
        ]
        return _Part("truth", lambda settings: _all_hold(pair(settings) for pair in pairs), node)

    def _comparison(
        self, left: ast.expr, op: ast.cmpop, right: ast.expr
    ) -> Callable[[Settings], bool | None]:
        if isinstance(op, ast.In | ast.NotIn):
            return self._membership(left, right, isinstance(op, ast.In))
        work = _EQUALITY.get(type(op)) or _ORDER.get(type(op))
        if work is None:
            raise self._wrong(right, "`is` has no place in a rule", "Write == or !=")
        first, second = self._with_sizes([self._read(left), self._read(right)])
        self._check_comparable(first, second, in_order=type(op) in _ORDER)
        if "nothing" in (first.kind, second.kind):
            return lambda settings: work(first.value(settings), second.value(settings))
        return _known(work, first.value, second.value)

    def _membership(
        self, left: ast.expr, right: ast.expr, inside: bool
    ) -> Callable[[Settings], bool | None]:
        if not isinstance(right, ast.List | ast.Tuple | ast.Set):
            raise self._wrong(right, "`in` wants a list", "For example: workers in [0, 2]")
        first, *others = self._with_sizes([self._read(left), *map(self._read, right.elts)])
        for other in others:
            self._check_comparable(first, other, in_order=False)
        asks_for_nothing = any(other.kind == "nothing" for other in others)

        def is_in(settings: Settings) -> bool | None:
            value = first.value(settings)
            if value is None:
                found = True if asks_for_nothing else None
            else:
                found = _any_holds(_equal(value, other.value(settings)) for other in others
                                   if other.kind != "nothing")  # fmt: skip
            return found if inside else _opposite(found)

        return is_in

    def _check_comparable(self, first: _Part, second: _Part, in_order: bool) -> None:
        kinds = {"number" if part.is_number else part.kind for part in (first, second)}
        if len(kinds) > 1 and ("nothing" not in kinds or in_order):
            raise self._wrong(
                second.node,
                f"{_KIND_WORDS[first.kind]} cannot be compared with {_KIND_WORDS[second.kind]}",
                "Leave the quotes out" if _is_quoted_number(first, second) else "",
            )
        if in_order and kinds != {"number"}:
            raise self._wrong(second.node, "only numbers are less or more", "Write == or !=")
        for named, other in ((first, second), (second, first)):
            self._check_choice(named, other)

    def _check_choice(self, named: _Part, other: _Part) -> None:
        knob = KNOBS.get(named.name)
        choices = knob.choices if knob and not knob.or_module else ()
        if choices and other.text is not None and other.text not in choices:
            raise self._wrong(
                other.node, f"{named.name} is never {other.text!r}", nearest(other.text, choices)
            )


def _kind_of(name: str) -> Kind:
    if name in SIZES:
        return "size"
    if name not in KNOBS:
        return "text" if name == "model" else "number"
    kinds = str(knob_type(name))
    return "text" if "str" in kinds else "truth" if "bool" in kinds else "number"


def _getter(name: str) -> Callable[[Settings], Level]:
    usual = DEFAULTS.get(name)
    if name == "gpus":
        return lambda settings: _gpu_count(settings.get(name, usual))
    return lambda settings: settings.get(name, usual)


def _gpu_count(gpus: Level) -> Level:
    """How many, also where it was said which."""
    return len(gpus.split(",")) if isinstance(gpus, str) else gpus


def _known(
    work: Callable[..., Any], *parts: Callable[[Settings], Any]
) -> Callable[[Settings], Any]:
    """What is made of values, or None where one of them is not known."""

    def value(settings: Settings) -> Any:
        values = [part(settings) for part in parts]
        if None in values:
            return None
        try:
            return work(*values)
        except ArithmeticError:
            return None

    return value


def _equal(first: Any, second: Any) -> bool | None:
    return None if second is None else first == second


def _opposite(holds: bool | None) -> bool | None:
    return None if holds is None else not holds


def _all_hold(parts: Iterable[bool | None]) -> bool | None:
    holds = list(parts)
    return False if False in holds else None if None in holds else True


def _any_holds(parts: Iterable[bool | None]) -> bool | None:
    return _opposite(_all_hold(map(_opposite, parts)))


def _is_quoted_number(first: _Part, second: _Part) -> bool:
    texts = [part.text for part in (first, second) if part.text is not None]
    return bool(texts) and bool(re.fullmatch(r"-?\d+(\.\d*)?", texts[0]))
