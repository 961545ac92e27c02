"""Reads the source of a user's file: which names it has, and whether it would train when it is
imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TypeGuard

Function = ast.FunctionDef | ast.AsyncFunctionDef

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SKELETON = """def {function}():
    return {{
        "model": ...,  # what is trained
        "loss": ...,  # a function of the model's output and the target
        "data": ...,  # a Dataset, not yet in batches
    }}
"""


def names_at_import(tree: ast.Module) -> set[str]:
    """What the module has once it is imported; `*` where it takes all names of another."""
    return {name for node in _run_at_import(tree.body) for name in _bound_by(node)}


def functions_in(tree: ast.Module) -> dict[str, Function]:
    nodes = (node for node in _run_at_import(tree.body) if isinstance(node, _FUNCTIONS))
    return {node.name: node for node in nodes}


def training_lines(tree: ast.Module) -> tuple[int, int] | None:
    """Where the first statement begins that trains when the file is imported, and the line of the
    call in it that does; None where nothing trains.

    Calls are followed into functions of the same file, not into other files: a training that is
    not seen here is stopped when it comes to its first step.
    """
    functions = functions_in(tree)
    trainers = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        if ast.unparse(node.value.func).endswith("Trainer")
        for name in _bound_by(node)
    }
    followed: set[tuple[str, bool]] = set()

    def find(node: ast.AST, in_loop: bool) -> ast.Call | None:
        if isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            return None
        in_loop = in_loop or isinstance(node, (*_LOOPS, *_COMPREHENSIONS))
        if isinstance(node, ast.Call):
            if _trains(node, in_loop, trainers):
                return node
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            if name in functions and (name, in_loop) not in followed:
                followed.add((name, in_loop))  # once is enough: it may call itself
                if any(find(part, in_loop) for part in functions[name].body):
                    return node
        parts = node.orelse if _is_main_guard(node) else ast.iter_child_nodes(node)
        return next(filter(None, (find(part, in_loop) for part in parts)), None)

    for statement in tree.body:
        if call := find(statement, in_loop=False):
            return statement.lineno, call.lineno
    return None


def skeleton(function: str | None, training_line: int | None = None) -> str:
    """Source of a function with that name, and of a place for what should not run at import."""
    parts = [_SKELETON.format(function=function)] if function else []
    if training_line is not None:
        place = f"    ...  # move line {training_line} and what follows here\n"
        parts.append(f'if __name__ == "__main__":\n{place}')
    return "\n\n".join(parts)


def _run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, also those within `if`, `try`, `with` and loops."""
    for node in body:
        yield node
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            continue
        for field in ("body", "orelse", "finalbody"):
            if not (field == "body" and _is_main_guard(node)):
                yield from _run_at_import(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _run_at_import(handler.body)


def _bound_by(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from ((name.asname or name.name).partition(".")[0] for name in node.names)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            for part in ast.walk(target):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id


def _is_main_guard(node: ast.AST) -> TypeGuard[ast.If]:
    """`if __name__ == "__main__":`, either way round, and with more conditions."""
    if not isinstance(node, ast.If):
        return False
    parts = list(ast.walk(node.test))
    return any(isinstance(part, ast.Eq) for part in parts) and any(
        isinstance(part, ast.Name) and part.id == "__name__" for part in parts
    )


def _trains(call: ast.Call, in_loop: bool, trainers: set[str]) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    verb, owner = call.func.attr, ast.unparse(call.func.value)
    if verb == "backward":
        return in_loop
    if verb == "step":
        return in_loop and "opt" in owner.lower()
    if verb in ("fit", "train") and ("trainer" in owner.lower() or owner in trainers):
        return True
    return verb in ("fit", "fit_one_cycle") and bool(re.search(r"model|net|learn", owner.lower()))
