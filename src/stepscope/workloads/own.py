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
import traceback
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from stepscope.errors import BadWorkload
from stepscope.workloads.skeleton import skeleton_of
from stepscope.workloads.source import functions_in, names_in, would_train
from stepscope.workloads.spec import nearest

USUAL_NAME = "workload"

_HINTS = (
    (
        r"stack expects each tensor to be equal size",
        'Samples differ in size: return a "collate" function that pads them, or crop them',
    ),
    (
        r"default_collate: batch must contain tensors",
        "A sample holds what is no tensor, number or text: convert it in the data set, or return a "
        '"collate" function that does',
    ),
    (
        r"(not enough|too many) values to unpack",
        'A batch has the parts that a sample has, stacked, unless you return a "collate" function',
    ),
    (
        r"expected scalar type|must have the same dtype",
        "Batches keep the number types of the samples: convert these in the data set, say with "
        "x.float() or y.long()",
    ),
    (
        r"Expected all tensors to be on the same device",
        "The model and the batches are moved to the device: make other tensors there too "
        "(device=x.device), or buffers of the model",
    ),
    (
        r"Target -?\d+ is out of bounds",
        "A label is no class of the model: labels go from 0 to the number of its outputs minus 1",
    ),
    (
        r"index out of range in self",
        "An Embedding got a number that it has no row for: give it more, or check the tokens",
    ),
)
"""Mistakes that many make with a workload of their own, by the words of the error."""
_IN_A_TRACEBACK = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


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
    names = names_in(tree.body)
    line = would_train(tree)
    if line is not None:
        raise _trains_at_import(tree, named, function, line)
    if not function:
        raise _no_function_given(tree, named)
    if function not in names and "*" not in names:
        raise _no_such_function(tree, named, function)
    return OwnPlace(file, function, None if is_file else named)


def skeleton(file: Path, function: str = USUAL_NAME) -> str:
    """A function to paste into a file, filled with the models and data sets that are in there."""
    return skeleton_of(_parsed(file), function)


def where_in(error: BaseException, file: Path) -> str | None:
    """How far into a user's file an error goes back: `train.py:28 in step`.

    One from a loader's worker has the worker's traceback as text in its message.
    """
    told = [(name, int(line), within) for name, line, within in _IN_A_TRACEBACK.findall(str(error))]
    walked = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    for frames in (told, walked):
        for name, line, within in reversed(frames):
            if Path(name).resolve() == file.resolve():
                return f"{_shown(file)}:{line}" + (f" in {within}" if within[0] != "<" else "")
    return where_in(error.__cause__, file) if error.__cause__ else None


def hint_for(error: BaseException) -> str:
    """What to do about an error of a user's workload, where it is one that many know."""
    text = str(error)
    return next((hint for words, hint in _HINTS if re.search(words, text, re.MULTILINE)), "")


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


def _trains_at_import(tree: ast.Module, named: str, function: str, line: int) -> BadWorkload:
    has_it = function in functions_in(tree)
    code = skeleton_of(tree, None if has_it else function or USUAL_NAME, guard=True)
    return BadWorkload(
        f"{named} would start to train as soon as it is imported, at line {line}",
        f"Change it like this:\n\n{code}",
    )


def _no_function_given(tree: ast.Module, named: str) -> BadWorkload:
    if USUAL_NAME in functions_in(tree):
        return BadWorkload(f"{named} is a file, not a function", f"Give {named}:{USUAL_NAME}")
    return BadWorkload(
        f"{named} is a file, not a function",
        f"Put a function like this into it and give {named}:{USUAL_NAME}\n\n"
        + skeleton_of(tree, USUAL_NAME, guard=True),
    )


def _no_such_function(tree: ast.Module, named: str, function: str) -> BadWorkload:
    missing = f"There is no function {function!r} in {named}"
    alike = difflib.get_close_matches(function, functions_in(tree))
    if alike:
        return BadWorkload(missing, f"Did you mean {' or '.join(alike)}?")
    code = skeleton_of(tree, function, guard=True)
    return BadWorkload(missing, f"Put one like this into it:\n\n{code}")
