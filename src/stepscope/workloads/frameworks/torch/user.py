"""A user's own workload: imports the file, calls the function, takes what it returns.

The file is imported as Python would run it as a script: its folder comes first on the path, and its
module has the name of the file, so that a data set pickles into worker processes that are spawned.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stepscope.errors import BadWorkload, StepscopeError
from stepscope.workloads.frameworks.torch.parts import Built
from stepscope.workloads.frameworks.torch.returned import built_from
from stepscope.workloads.own import OwnPlace, find_own, hint_for, skeleton, where_in
from stepscope.workloads.spec import KNOBS, Workload, nearest, option_name

_GUARD = '`if __name__ == "__main__":`'


def load_own(workload: Workload) -> Built:
    """The user's model, loss and data; BadWorkload says what is wrong with them, and where."""
    place = find_own(workload.model)
    with _answered_for(place, "it is imported"):
        module = _imported(place)
    function = getattr(module, place.function, None)
    if not callable(function):
        raise BadWorkload(f"{place.function!r} in {place.shown} is no function")
    with _answered_for(place, f"{place.function}() is called"):
        parameters = inspect.signature(function).parameters
        returned = function(**_knobs_for(parameters, workload, place))
    return built_from(returned, workload, place, used=frozenset(parameters))


def _imported(place: OwnPlace) -> ModuleType:
    """The module, whose name nobody else may have: workers would find the other one."""
    name = place.module_name or place.file.stem
    sys.path.insert(0, str(Path.cwd() if place.module_name else place.file.parent))
    sys.argv = [str(place.file)]  # also for workers: what started us is no option of theirs
    importlib.invalidate_caches()
    if place.module_name is None and "." in name:
        raise BadWorkload(f"{place.file.name} cannot be imported", "Rename it: one dot is enough")
    module = importlib.import_module(name)
    found = getattr(module, "__file__", None)
    if found is None or not os.path.samefile(found, place.file):
        raise BadWorkload(
            f"{place.shown} has the name of another module: {found or 'one of Python itself'}",
            "Rename the file",
        )
    return module


def _knobs_for(
    parameters: Mapping[str, inspect.Parameter], workload: Workload, place: OwnPlace
) -> dict[str, Any]:
    """The knobs that a signature names; one that was not set leaves the function its default."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    knobs = {name: getattr(workload, name) for name in KNOBS} if takes_all else {}
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        value = getattr(workload, name) if name in KNOBS else None
        if value is not None:
            knobs[name] = value
        elif parameter.default is parameter.empty:
            raise _nothing_for(name, place)
        else:
            knobs.pop(name, None)
    return knobs


def _nothing_for(name: str, place: OwnPlace) -> BadWorkload:
    call = f"{place.function}() of {place.shown}"
    if name in KNOBS:
        return BadWorkload(
            f"{call} wants {name}, which was not set", f"Give {option_name(name)}, or a default"
        )
    return BadWorkload(
        f"{call} wants {name!r}, which is no knob", f"Give it a default. {nearest(name, KNOBS)}"
    )


class _Training(BaseException):
    """Thrown into a user's code that trains: no `except Exception` of theirs shall catch it."""


def _stop_training(*_: object) -> None:
    raise _Training


@contextmanager
def _answered_for(place: OwnPlace, when: str) -> Iterator[None]:
    """Turns what goes wrong in the user's code into a sentence with a line. Nothing trains in here.

    Running out of memory stays what it is: that is a result of the trial.
    """
    hook = register_optimizer_step_pre_hook(_stop_training)
    try:
        yield
    except (StepscopeError, KeyboardInterrupt, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except _Training as error:
        raise BadWorkload(
            f"{_line(error, place)}: this trains when {when}",
            f"Put it under {_GUARD}, and let the function return what is trained:\n\n"
            + skeleton(place.file, place.function),
        ) from None
    except SystemExit as error:
        raise BadWorkload(
            f"{_line(error, place)}: this ends Python when {when} (exit code {error.code})",
            f"If it reads options: put that under {_GUARD}",
        ) from None
    except Exception as error:
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise BadWorkload(f"{_line(error, place)}: {said}", _hint(error)) from error
    finally:
        hook.remove()


def _line(error: BaseException, place: OwnPlace) -> str:
    return where_in(error, place.file) or place.shown


def _hint(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"Install it for the Python that stepscope runs in: {sys.executable}"
    if isinstance(error, ImportError) and "relative import" in str(error):
        return "A file of a package is named as a module: package.module:workload"
    return hint_for(error)
