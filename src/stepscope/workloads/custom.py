"""Custom workloads: find the function, and check that its file can be imported.

All checks read the source and run nothing: a file that would train at import is never imported.
Standard library only.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path

from stepscope.errors import WorkloadError
from stepscope.runs.files import read_regular
from stepscope.workloads.code_reference import parse_reference
from stepscope.workloads.spec import Workload, close_names, did_you_mean, nearest
from stepscope.workloads.user_file import functions_in, names_at_import, skeleton_of, training_line

DEFAULT_FUNCTION = "workload"

# fmt: off
_HINTS = {
    r"stack expects each tensor to be equal size":
        'Samples differ in size: return a "collate" function that pads them, or crop them',
    r"default_collate: batch must contain tensors":
        "A sample contains something other than tensors, numbers and strings: convert it in the "
        'dataset, or return a "collate" function that does',
    r"(not enough|too many) values to unpack":
        'A batch has the same parts as a sample, stacked, unless you return a "collate" function',
    r"expected scalar type|must have the same dtype":
        "Batches keep the data types of the samples: convert them in the dataset, for example "
        "with x.float() or y.long()",
    r"Expected all tensors to be on the same device":
        "stepscope moves the model and the batches to the device: create other tensors there too "
        "(device=x.device), or register them as buffers of the model",
    r"Target -?\d+ is out of bounds":
        "A label is out of range: labels go from 0 to the number of model outputs minus 1",
    r"index out of range in self":
        "An index is out of range for an Embedding: increase num_embeddings, or check the tokens",
    r"attempted relative import":
        "Refer to a file in a package by its module name: package.module:workload",
}
# fmt: on
"""Hints for frequent mistakes, by a pattern of PyTorch's or Python's error message."""
_MAX_SOURCE_BYTES = 16 << 20
_TRACEBACK_LINE = re.compile(r'^ *File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_STEPSCOPE = Path(__file__).parents[1]
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}
_BATCH_TEXT = "_stepscope_batch"


@dataclass(frozen=True)
class CustomWorkload:
    file: Path
    function: str
    module_name: str | None = None
    """The module to import, for `package.module:NAME`; None: the file is imported like a script."""

    @property
    def shown(self) -> str:
        return shown(self.file)

    @property
    def location(self) -> str:
        """`train.py:12 in workload`: the line of the function, if it is defined in this file."""
        definition = functions_in(_parse(self.file)).get(self.function)
        line = f":{definition.lineno}" if definition else ""
        return f"{self.shown}{line} in {self.function}"


def find_custom(model: str) -> CustomWorkload:
    """Return the function that `FILE.py:FUNCTION` or `package.module:FUNCTION` names, checked."""
    reference = parse_reference(model)
    source, function = reference
    file = _existing_file(Path(source)) if reference.is_file else _module_file(source)
    tree = _parse(file)
    functions, line = functions_in(tree), training_line(tree)
    if line is not None:
        missing = None if function in functions else function or DEFAULT_FUNCTION
        raise WorkloadError(
            f"Importing {source} would start training (line {line})",
            f"Change it as follows:\n\n{skeleton_of(tree, missing)}",
        )
    if not function:
        hint = f"Use {source}:{DEFAULT_FUNCTION}"
        if DEFAULT_FUNCTION not in functions:
            code = skeleton_of(tree, DEFAULT_FUNCTION)
            hint = f"Add a function such as this one, and use {source}:{DEFAULT_FUNCTION}\n\n{code}"
        raise WorkloadError(f"{source} is a file, not a function", hint)
    if not {function, "*"} & names_at_import(tree):
        hint = f"Add a function such as this one:\n\n{skeleton_of(tree, function)}"
        if close_names(function, functions):
            hint = nearest(function, functions)
        raise WorkloadError(f"No function {function!r} in {source}", hint)
    return CustomWorkload(file, function, None if reference.is_file else source)


def skeleton(file: Path, function: str = DEFAULT_FUNCTION) -> str:
    """A function to paste into the file, filled in with the models and datasets of the file."""
    return skeleton_of(_parse(file), function)


def where_in(error: BaseException, file: Path) -> str | None:
    """The innermost line of user code that raised an error: `train.py:28 in step`.

    User code is what is in the folder of the file, or in the current folder. The message of a
    loader worker's error contains the traceback of the worker.
    """
    in_message = [(name, int(line), at) for name, line, at in _TRACEBACK_LINE.findall(str(error))]
    in_traceback = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    roots = (file.resolve().parent, Path.cwd())
    for frames in (in_message, in_traceback):
        for name, line, function in reversed(frames):
            path = Path(name).resolve()
            if path == file.resolve() or _is_user_code(path, roots):
                return f"{shown(path)}:{line}" + (f" in {function}" if function[0] != "<" else "")
    return where_in(error.__cause__, file) if error.__cause__ else None


def _is_user_code(path: Path, roots: tuple[Path, ...]) -> bool:
    return (
        path.name[0] != "<"  # such as <frozen importlib._bootstrap>
        and any(path.is_relative_to(root) for root in roots)
        and not path.is_relative_to(_STEPSCOPE)
        and not path.is_relative_to(_STANDARD_LIBRARY)
        and not _INSTALLED & {*path.parts}
    )


def note_batch(error: BaseException, batch: str) -> None:
    """Record the shapes of the batch with which a step of a custom workload failed."""
    if not hasattr(error, _BATCH_TEXT):
        setattr(error, _BATCH_TEXT, batch)


def error_location(error: BaseException, workload: Workload) -> str | None:
    """The line of user code that raised an error, with the shapes of the batch if a step failed.

    If no user code was running when a step failed, for example in an nn.Sequential, it is the
    function of the workload.
    """
    if not workload.is_custom:
        return None
    custom = find_custom(workload.model)
    where = where_in(error, custom.file)
    batch = getattr(error, _BATCH_TEXT, None)
    return f"{where or custom.location}, {batch}" if batch else where


def error_text(error: BaseException, where: str | None) -> str:
    """`train.py:28 in step: ValueError: message`."""
    return ": ".join(filter(None, (where, type(error).__name__, str(error).strip())))


def describe_error(error: BaseException, workload: Workload) -> tuple[str, str]:
    """Message and hint."""
    if isinstance(error, WorkloadError):
        return error.message, error.hint
    return error_text(error, error_location(error, workload)), hint_for(error)


def hint_for(error: BaseException) -> str:
    """What to do about an error of a custom workload, if it is a frequent mistake."""
    return next((hint for words, hint in _HINTS.items() if re.search(words, str(error))), "")


def _existing_file(path: Path) -> Path:
    if path.is_file() and path.suffix == ".py":
        return path.resolve()
    if path.exists():
        raise WorkloadError(f"{path} is not a Python file", "Its name must end in .py")
    folder = path.parent
    if not folder.is_dir():
        raise WorkloadError(f"No such folder: {folder}", f"The current folder is {Path.cwd()}")
    others = [other.name for other in folder.glob("*.py")]
    hint = f"There are no Python files in {folder.resolve()}"
    if path.stem.endswith(".py") and path.stem in others:
        hint = f"To use a function in a file, write '{path.with_suffix('')}:{path.suffix[1:]}'"
    elif others:
        close = close_names(path.stem, [other.removesuffix(".py") for other in others])
        hint = f"The Python files in {folder.resolve()} are {', '.join(sorted(others))}"
        if close:
            hint = did_you_mean([f"{stem}.py" for stem in close])
    raise WorkloadError(f"No such file: {path}", hint)


def _module_file(name: str) -> Path:
    """The source file of a module. Parent packages are not imported, since that would run them."""
    top, *below = name.split(".")
    search_path = [os.getcwd(), *sys.path]
    specs = (finder.find_spec(top, search_path) for finder in sys.meta_path)
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
    raise WorkloadError(
        f"No Python source found for module {name!r}",
        "Modules are looked up from the current folder, as with `python -m`. "
        "To refer to a file, include its suffix: path/train.py:workload",
    )


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(read_regular(file, _MAX_SOURCE_BYTES), str(file))
    except SyntaxError as error:
        raise WorkloadError(f"{shown(file)}:{error.lineno}: SyntaxError: {error.msg}") from None
    except (OSError, ValueError) as error:
        raise WorkloadError(f"{shown(file)} cannot be read: {error}") from None


def shown(file: Path) -> str:
    """A path relative to the current folder if it is below it."""
    return str(file.relative_to(Path.cwd())) if file.is_relative_to(Path.cwd()) else str(file)
