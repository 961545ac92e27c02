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
from pathlib import Path

from stepscope.errors import BadWorkload
from stepscope.workloads.code_place import parse_place
from stepscope.workloads.spec import Workload, nearest
from stepscope.workloads.user_file import functions_in, names_at_import, skeleton_of, training_line

USUAL_NAME = "workload"

# fmt: off
_HINTS = {
    r"stack expects each tensor to be equal size":
        'Samples differ in size: return a "collate" function that pads them, or crop them',
    r"default_collate: batch must contain tensors":
        "A sample holds what is no tensor, number or text: convert it in the data set, or return a "
        '"collate" function that does',
    r"(not enough|too many) values to unpack":
        'A batch has the parts that a sample has, stacked, unless you return a "collate" function',
    r"expected scalar type|must have the same dtype":
        "Batches keep the number types of the samples: convert these in the data set, say with "
        "x.float() or y.long()",
    r"Expected all tensors to be on the same device":
        "The model and the batches are moved to the device: make other tensors there too "
        "(device=x.device), or buffers of the model",
    r"Target -?\d+ is out of bounds":
        "A label is no class of the model: labels go from 0 to the number of its outputs minus 1",
    r"index out of range in self":
        "An Embedding got a number that it has no row for: give it more, or check the tokens",
    r"attempted relative import":
        "A file of a package is named as a module: package.module:workload",
}
# fmt: on
"""Mistakes that many make with a workload of their own, by the words of the error."""
_IN_A_TRACEBACK = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)


@dataclass(frozen=True)
class OwnPlace:
    file: Path
    function: str
    module_name: str | None = None
    """How it is imported, if it was named `package.module`; else as Python does with a script."""

    @property
    def shown(self) -> str:
        return shown(self.file)


def find_own(model: str) -> OwnPlace:
    """The place that `FILE.py:FUNCTION` or `package.module:FUNCTION` names, once it was checked."""
    place = parse_place(model)
    named, function = place
    file = _existing(Path(named)) if place.is_file else _module_file(named)
    tree = _parsed(file)
    functions, line = functions_in(tree), training_line(tree)
    if line is not None:
        missing = None if function in functions else function or USUAL_NAME
        raise BadWorkload(
            f"{named} would start to train as soon as it is imported, at line {line}",
            f"Change it like this:\n\n{skeleton_of(tree, missing)}",
        )
    if not function:
        hint = f"Give {named}:{USUAL_NAME}"
        if USUAL_NAME not in functions:
            code = skeleton_of(tree, USUAL_NAME)
            hint = f"Put a function like this into it and give {named}:{USUAL_NAME}\n\n{code}"
        raise BadWorkload(f"{named} is a file, not a function", hint)
    if not {function, "*"} & names_at_import(tree):
        close = difflib.get_close_matches(function, functions)
        hint = f"Put one like this into it:\n\n{skeleton_of(tree, function)}"
        if close:
            hint = f"Did you mean {' or '.join(close)}?"
        raise BadWorkload(f"There is no function {function!r} in {named}", hint)
    return OwnPlace(file, function, None if place.is_file else named)


def skeleton(file: Path, function: str = USUAL_NAME) -> str:
    """A function to paste into a file, filled with the models and data sets that are in there."""
    return skeleton_of(_parsed(file), function)


def where_in(error: BaseException, file: Path) -> str | None:
    """How far into a user's file an error goes back: `train.py:28 in step`.

    One from a loader's worker has the worker's traceback as text in its message.
    """
    in_text = [(name, int(line), at) for name, line, at in _IN_A_TRACEBACK.findall(str(error))]
    walked = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    for frames in (in_text, walked):
        for name, line, within in reversed(frames):
            if Path(name).resolve() == file.resolve():
                return f"{shown(file)}:{line}" + (f" in {within}" if within[0] != "<" else "")
    return where_in(error.__cause__, file) if error.__cause__ else None


def own_line(error: BaseException, workload: Workload) -> str | None:
    return where_in(error, find_own(workload.model).file) if workload.is_own else None


def error_text(error: BaseException, where: str | None) -> str:
    """`train.py:28 in step: ValueError: what it says`."""
    return ": ".join(filter(None, (where, type(error).__name__, str(error).strip())))


def explain(error: BaseException, workload: Workload) -> tuple[str, str]:
    if isinstance(error, BadWorkload):
        return error.message, error.hint
    return error_text(error, own_line(error, workload)), hint_for(error)


def hint_for(error: BaseException) -> str:
    """What to do about an error of a user's workload, where it is one that many know."""
    return next((hint for words, hint in _HINTS.items() if re.search(words, str(error))), "")


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
    places = [os.getcwd(), *sys.path]
    specs = (finder.find_spec(top, places) for finder in sys.meta_path)
    spec = next(filter(None, specs), None)
    if spec is not None and not below:
        files = [Path(str(spec.origin))]
    else:
        name = name if spec else top
        folders = [Path(at, *below) for at in (spec and spec.submodule_search_locations) or ()]
        files = [f for at in folders for f in (at / "__init__.py", at.with_name(f"{at.name}.py"))]
    for file in files:
        if file.is_file() and file.suffix == ".py":
            return file.resolve()
    raise BadWorkload(
        f"There is no module {name!r} with Python source",
        "Modules are looked for from the folder you are in, as `python -m` does. "
        "A file is named with its ending: path/train.py:workload",
    )


def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        raise BadWorkload(f"{shown(file)}:{error.lineno}: SyntaxError: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise BadWorkload(f"{shown(file)} cannot be read: {error}") from None


def shown(file: Path) -> str:
    """A file as its user would name it."""
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)
