"""The scopes of a user's file, and how to write outside of one what a name in it stands for."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from stepscope.workloads.source import ASKS, is_main_guard

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_MOVES = {"to", "cuda", "cpu", "train"}
"""Methods that give the model itself: where it is trained is said by the knobs."""


class Unknown(Exception):
    """An expression with something in it that the module does not have."""


@dataclass(frozen=True)
class Scope:
    """Statements that run together, and what the names are made with that they assign."""

    body: list[ast.stmt]
    values: dict[str, ast.expr] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", dict(_first_values(_inside(self.body))))

    def calls(self) -> Iterator[ast.Call]:
        return (node for node in _inside(self.body) if isinstance(node, ast.Call))

    def loops(self) -> list[ast.For]:
        """Those that train."""
        return [
            node
            for node in _inside(self.body)
            if isinstance(node, ast.For) and any(called(c) == "backward" for c in calls_in(node))
        ]

    @property
    def is_training(self) -> bool:
        return bool(self.loops()) or any(
            parameters_in(call) is not None or called(call) in ("DataLoader", "fit")
            for call in self.calls()
        )


def _inside(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All in some statements, in order, without what is defined there and runs elsewhere."""
    for node in body:
        if isinstance(node, _DEFINITIONS) or is_main_guard(node):
            continue
        yield node
        yield from _inside(ast.iter_child_nodes(node))


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    return (part for part in ast.walk(node) if isinstance(part, ast.Call))


def called(call: ast.Call) -> str:
    """What is called, without whose it is."""
    return ast.unparse(call.func).rpartition(".")[2]


def argument_of(call: ast.Call, name: str, at: int | None = None) -> ast.expr | None:
    if at is not None and len(call.args) > at:
        return call.args[at]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def parameters_in(call: ast.Call) -> ast.expr | None:
    """The model whose parameters are given to what is called, if that looks like an optimizer."""
    given = argument_of(call, "params", 0)
    if (
        isinstance(given, ast.Call)
        and isinstance(given.func, ast.Attribute)
        and given.func.attr == "parameters"
        and called(call)[:1].isupper()
    ):
        return given.func.value
    return None


def _first_values(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Names with their first values: `model = model.to(device)` is no other model."""
    seen: set[str] = set()
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            for name, value in _paired(target, node.value):
                if name not in seen:
                    seen.add(name)
                    yield name, value


def _paired(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, its in zip(target.elts, value.elts, strict=False):
            yield from _paired(one, its)


class Resolver(ast.NodeTransformer):
    """Turns an expression of a scope into one that only needs what the module has."""

    def __init__(self, known: set[str], values: dict[str, ast.expr]) -> None:
        self._known = known
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._known:
            return node
        if node.id not in self._values:
            raise Unknown
        others = {name: value for name, value in self._values.items() if name != node.id}
        resolved: ast.expr = Resolver(self._known, others).visit(
            copy.deepcopy(self._values[node.id])
        )
        return resolved

    def visit_Call(self, node: ast.Call) -> ast.expr:
        if called(node) in ASKS:
            raise Unknown
        if isinstance(node.func, ast.Attribute) and node.func.attr in _MOVES:
            moved: ast.expr = self.visit(node.func.value)
            return moved
        node.func = self.visit(node.func)
        node.args = [self._or_open(argument) for argument in node.args]
        for keyword in node.keywords:
            keyword.value = self._or_open(keyword.value)
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.expr:
        own = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
        node.body = Resolver(self._known | own, self._values).visit(node.body)
        return node

    def _or_open(self, node: ast.expr) -> ast.expr:
        try:
            resolved: ast.expr = self.visit(node)
        except Unknown:
            return ast.Constant(...)
        return resolved
