"""A user's own workload: where its function is, and whether its file can be imported at all.

All of it is told from the source, without running it, and before anything is started: a file that
would train when imported is not imported. Standard library only.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TypeGuard

from stepscope.errors import BadWorkload
from stepscope.workloads.skeleton import skeleton_of
from stepscope.workloads.spec import nearest

USUAL_NAME = "workload"

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FITTED = re.compile(r"model|net|learn")


@dataclass(frozen=True)
class OwnPlace:
    """A function in a file of the user's."""

    file: Path
    function: str
    module_name: str | None = None
    """How it is imported, if it was named `package.module`; else as Python does with a script."""

    @property
    def shown(self) -> str:
        """The file as its user would name it."""
        return _shown(self.file)


def is_place(model: str) -> bool:
    """Whether a model is a place in a user's code, complete or not, rather than a name of ours."""
    return ":" in model or "/" in model or model.endswith(".py")


def find_own(model: str) -> OwnPlace:
    """The place that `FILE.py:FUNCTION` or `package.module:FUNCTION` names, once it was checked."""
    named, _, function = model.rpartition(":") if ":" in model else (model, "", "")
    is_file = named.endswith(".py") or "/" in named
    file = _existing(Path(named)) if is_file else _module_file(named)
    tree = _parsed(file)
    names = _names(tree)
    line = would_train(tree)
    if line is not None:
        raise _trains_at_import(tree, named, function, line)
    if not function:
        raise _no_function_given(tree, named)
    if function not in names and "*" not in names:
        raise _no_such_function(tree, named, function)
    return OwnPlace(file, function, None if is_file else named)


def would_train(tree: ast.Module) -> int | None:
    """The line that starts a training when the file is imported, if there is one.

    Calls are followed into functions of the same file, not into other files: a training that is
    not seen here is stopped when it comes to its first step.
    """
    look = _Look(tree)
    found = next(filter(None, map(look.training, tree.body)), None)
    return found.lineno if found else None


def skeleton(file: Path, function: str = USUAL_NAME) -> str:
    """A function to paste into a file, filled with the models and data sets that are in there."""
    tree = _parsed(file)
    return skeleton_of(tree, function, would_train(tree))


def _existing(path: Path) -> Path:
    if path.is_file() and path.suffix == ".py":
        return path.resolve()
    if path.exists():
        raise BadWorkload(f"{path} is no Python file", "Its name must end in .py")
    folder = path.parent
    if not folder.is_dir():
        raise BadWorkload(f"There is no folder {folder}", f"You are in {Path.cwd()}")
    others = [other.name for other in folder.glob("*.py")]
    hint = nearest(path.name, others) if others else f"There is no Python in {folder.resolve()}"
    raise BadWorkload(f"There is no file {path}", hint)


def _module_file(name: str) -> Path:
    """The source of a module. Packages above it are looked into, not imported: that runs them."""
    top, *below = name.split(".")
    spec = _spec(top)
    if spec is None:
        raise _no_module(top)
    if not below:
        return _source(name, [Path(str(spec.origin))])
    folders = [Path(place, *below) for place in spec.submodule_search_locations or ()]
    files = [file for at in folders for file in (at / "__init__.py", at.with_name(f"{at.name}.py"))]
    return _source(name, files)


def _spec(top: str) -> ModuleSpec | None:
    places = [os.getcwd(), *sys.path]
    return next(filter(None, (finder.find_spec(top, places) for finder in sys.meta_path)), None)


def _source(name: str, files: list[Path]) -> Path:
    for file in files:
        if file.is_file() and file.suffix == ".py":
            return file.resolve()
    raise _no_module(name)


def _no_module(name: str) -> BadWorkload:
    return BadWorkload(
        f"There is no module {name!r} with Python source",
        "Modules are looked for from the folder you are in, as `python -m` does. "
        "A file is named with its ending: path/train.py:workload",
    )


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise BadWorkload(f"{_shown(file)}:{error.lineno}: SyntaxError: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise BadWorkload(f"{_shown(file)} cannot be read: {error}") from None


def _shown(file: Path) -> str:
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)


def _names(tree: ast.Module) -> set[str]:
    """What a module has once it is imported; `*` where it takes all names of another."""
    return {name for node in _run_at_import(tree.body) for name in _bound_by(node)}


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    nodes = (node for node in _run_at_import(tree.body) if isinstance(node, _FUNCTIONS))
    return {node.name: node for node in nodes}


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
        yield from (name.asname or name.name for name in node.names)
    elif isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        yield from (target.id for target in targets if isinstance(target, ast.Name))


def _is_main_guard(node: ast.AST) -> TypeGuard[ast.If]:
    """`if __name__ == "__main__":`, either way round, and with more conditions."""
    if not isinstance(node, ast.If):
        return False
    parts = list(ast.walk(node.test))
    return any(isinstance(part, ast.Eq) for part in parts) and any(
        isinstance(part, ast.Name) and part.id == "__name__" for part in parts
    )


class _Look:
    """Follows what runs when a module is imported, in search of something that trains."""

    def __init__(self, tree: ast.Module) -> None:
        self._functions = _functions(tree)
        self._trainers = {
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func).endswith("Trainer")
            for name in _bound_by(node)
        }
        self._followed: set[tuple[str, bool]] = set()

    def training(self, node: ast.AST, looping: bool = False) -> ast.Call | None:
        """The call that trains, or that of a function which does."""
        if isinstance(node, (*_FUNCTIONS, ast.Lambda)):
            return None
        looping = looping or isinstance(node, (*_LOOPS, *_COMPREHENSIONS))
        if isinstance(node, ast.Call) and (
            self._trains(node, looping) or self._leads_to_training(node, looping)
        ):
            return node
        parts = node.orelse if _is_main_guard(node) else ast.iter_child_nodes(node)
        return next(filter(None, (self.training(part, looping) for part in parts)), None)

    def _leads_to_training(self, call: ast.Call, looping: bool) -> bool:
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        if name not in self._functions or (name, looping) in self._followed:
            return False
        self._followed.add((name, looping))
        return any(self.training(part, looping) for part in self._functions[name].body)

    def _trains(self, call: ast.Call, looping: bool) -> bool:
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


def _trains_at_import(tree: ast.Module, named: str, function: str, line: int) -> BadWorkload:
    has_it = function in _functions(tree)
    code = skeleton_of(tree, None if has_it else function or USUAL_NAME, line)
    return BadWorkload(
        f"{named} would start to train as soon as it is imported, at line {line}",
        f"Change it like this:\n\n{code}",
    )


def _no_function_given(tree: ast.Module, named: str) -> BadWorkload:
    if USUAL_NAME in _functions(tree):
        return BadWorkload(f"{named} is a file, not a function", f"Give {named}:{USUAL_NAME}")
    return BadWorkload(
        f"{named} is a file, not a function",
        f"Put a function like this into it and give {named}:{USUAL_NAME}\n\n"
        + skeleton_of(tree, USUAL_NAME),
    )


def _no_such_function(tree: ast.Module, named: str, function: str) -> BadWorkload:
    missing = f"There is no function {function!r} in {named}"
    alike = difflib.get_close_matches(function, _functions(tree), cutoff=0.5)
    if alike:
        return BadWorkload(missing, f"Did you mean {' or '.join(alike)}?")
    return BadWorkload(missing, f"Put one like this into it:\n\n{skeleton_of(tree, function)}")
