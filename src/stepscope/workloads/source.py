"""What a user's file does when it is imported, told from its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import TypeGuard

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_FUNCTIONS, ast.ClassDef, ast.Import, ast.ImportFrom)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FITTED = re.compile(r"model|net|learn")
ASKS = ("parse_args", "parse_known_args", "input")
"""Calls for which somebody must be there: with options, or to answer."""


def run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those within `if`, `try`, `with` and loops."""
    for node in body:
        yield node
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            continue
        for field in ("body", "orelse", "finalbody"):
            if not (field == "body" and is_main_guard(node)):
                yield from run_at_import(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from run_at_import(handler.body)


def names_in(body: list[ast.stmt]) -> set[str]:
    """What a module has once it is imported; `*` where it takes all names of another."""
    return {name for node in run_at_import(body) for name in bound_by(node)}


def functions_in(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = (node for node in run_at_import(tree.body) if isinstance(node, _FUNCTIONS))
    return {node.name: node for node in nodes}


def bound_by(node: ast.stmt) -> Iterator[str]:
    """The names that a statement gives something to."""
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((name.asname or name.name).partition(".")[0] for name in node.names)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            yield from (
                part.id
                for part in ast.walk(target)
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            )


def is_main_guard(node: ast.AST) -> TypeGuard[ast.If]:
    """`if __name__ == "__main__":`, either way round, and with more conditions."""
    if not isinstance(node, ast.If):
        return False
    parts = list(ast.walk(node.test))
    return any(isinstance(part, ast.Eq) for part in parts) and any(
        isinstance(part, ast.Name) and part.id == "__name__" for part in parts
    )


def would_train(tree: ast.Module) -> int | None:
    """The line that starts a training when the file is imported, if there is one.

    Calls are followed into functions of the same file, not into other files: a training that is
    not seen here is stopped when it comes to its first step.
    """
    look = _Look(tree, _Trains(tree))
    found = next(filter(None, map(look.call_in, tree.body)), None)
    return found.lineno if found else None


def asks_at_import(tree: ast.Module) -> dict[int, str]:
    """The lines that read options or wait for an answer when the file is imported."""
    look = _Look(tree, lambda call, _: ast.unparse(call.func).rpartition(".")[2] in ASKS)
    found = filter(None, map(look.call_in, tree.body))
    return {call.lineno: f"{ast.unparse(call.func)}()" for call in found}


def training_block(tree: ast.Module) -> list[ast.stmt]:
    """The statements to be moved so that an import trains nothing.

    From the one that trains on, all that is neither a definition nor an import: what comes after a
    training, say to save it, needs what was made in there.
    """
    look = _Look(tree, _Trains(tree))
    for at, node in enumerate(tree.body):
        if look.call_in(node):
            return [
                statement
                for statement in tree.body[at:]
                if not isinstance(statement, _DEFINITIONS) and not is_main_guard(statement)
            ]
    return []


class _Look:
    """Follows what runs when a module is imported, in search of a call."""

    def __init__(self, tree: ast.Module, is_sought: Callable[[ast.Call, bool], bool]) -> None:
        self._functions = functions_in(tree)
        self._is_sought = is_sought
        self._followed: dict[tuple[str, bool], bool] = {}

    def call_in(self, node: ast.AST, looping: bool = False) -> ast.Call | None:
        """The call itself, or that of a function which comes to it."""
        if isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            return None
        looping = looping or isinstance(node, (*_LOOPS, *_COMPREHENSIONS))
        if isinstance(node, ast.Call) and (
            self._is_sought(node, looping) or self._leads_to_it(node, looping)
        ):
            return node
        parts = node.orelse if is_main_guard(node) else ast.iter_child_nodes(node)
        return next(filter(None, (self.call_in(part, looping) for part in parts)), None)

    def _leads_to_it(self, call: ast.Call, looping: bool) -> bool:
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name not in self._functions:
            return False
        if (name, looping) not in self._followed:
            self._followed[name, looping] = False  # while it is followed: it may call itself
            body = self._functions[name].body
            self._followed[name, looping] = any(self.call_in(part, looping) for part in body)
        return self._followed[name, looping]


class _Trains:
    """Whether a call is one that trains."""

    def __init__(self, tree: ast.Module) -> None:
        self._trainers = {
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func).endswith("Trainer")
            for name in bound_by(node)
        }

    def __call__(self, call: ast.Call, looping: bool) -> bool:
        if not isinstance(call.func, ast.Attribute):
            return False
        verb, owner = call.func.attr, ast.unparse(call.func.value)
        if verb == "backward":
            return looping
        if verb == "step":
            return looping and "opt" in owner.lower()
        if verb in ("fit", "train") and ("trainer" in owner.lower() or owner in self._trainers):
            return True
        return verb in ("fit", "fit_one_cycle") and bool(_FITTED.search(owner.lower()))
