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
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stepscope.errors import BadWorkload, StepscopeError
from stepscope.workloads.frameworks.torch.models import Built
from stepscope.workloads.frameworks.torch.returned import built_from
from stepscope.workloads.own import OwnPlace, error_text, find_own, hint_for, skeleton, where_in
from stepscope.workloads.spec import SETTINGS, Workload, nearest, option_name

_GUARD = '`if __name__ == "__main__":`'


def load_own(workload: Workload) -> Built:
    """The user's model, loss and data; BadWorkload says what is wrong with them, and where."""
    place = find_own(workload.model)
    with _answered_for(place, "it is imported"):
        # Nobody else may have its name: workers would find the other one.
        name = place.module_name or place.file.stem
        if place.module_name is None and "." in name:
            refused = f"{place.file.name} cannot be imported"
            raise BadWorkload(refused, "Rename it: one dot is enough")
        sys.path.insert(0, str(Path.cwd() if place.module_name else place.file.parent))
        sys.argv = [str(place.file)]  # also for workers: what started us is no option of theirs
        importlib.invalidate_caches()
        module = importlib.import_module(name)
        found = getattr(module, "__file__", None)
        if found is None or not os.path.samefile(found, place.file):
            other = found or "one of Python itself"
            refused = f"{place.shown} has the name of another module: {other}"
            raise BadWorkload(refused, "Rename the file")
    function = getattr(module, place.function, None)
    if not callable(function):
        raise BadWorkload(f"{place.function!r} in {place.shown} is no function")
    with _answered_for(place, f"{place.function}() is called"):
        parameters = inspect.signature(function).parameters
        returned = function(**_settings_for(parameters, workload, place))
    return built_from(returned, workload, place, used=frozenset(parameters))


def _settings_for(
    parameters: Mapping[str, inspect.Parameter], workload: Workload, place: OwnPlace
) -> dict[str, Any]:
    """The settings that a signature names; one that was not set leaves the function its default."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    settings = {name: getattr(workload, name) for name in SETTINGS} if takes_all else {}
    call = f"{place.function}() of {place.shown}"
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        value = getattr(workload, name) if name in SETTINGS else None
        if value is not None:
            settings[name] = value
        elif parameter.default is not parameter.empty:
            settings.pop(name, None)
        elif name in SETTINGS:
            hint = f"Give {option_name(name)}, or a default"
            raise BadWorkload(f"{call} wants {name}, which was not set", hint)
        else:
            hint = f"Give it a default. {nearest(name, SETTINGS)}"
            raise BadWorkload(f"{call} wants {name!r}, which is no setting", hint)
    return settings


class _TrainsTooEarly(BaseException):
    """Thrown into a user's code that trains: no `except Exception` of theirs shall catch it."""


@contextmanager
def _answered_for(place: OwnPlace, when: str) -> Iterator[None]:
    """Turns what goes wrong in the user's code into a sentence with a line. Nothing trains in here.

    Running out of memory stays what it is: that is a result of the trial.
    """

    def stop(*_: object) -> None:
        raise _TrainsTooEarly

    def line(error: BaseException) -> str:
        return where_in(error, place.file) or place.shown

    hook = register_optimizer_step_pre_hook(stop)
    try:
        yield
    except (StepscopeError, KeyboardInterrupt, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except _TrainsTooEarly as error:
        raise BadWorkload(
            f"{line(error)}: this trains when {when}",
            f"Put it under {_GUARD}, and let the function return what is trained:\n\n"
            + skeleton(place.file, place.function),
        ) from None
    except SystemExit as error:
        raise BadWorkload(
            f"{line(error)}: this ends Python when {when} (exit code {error.code})",
            f"If it reads options: put that under {_GUARD}",
        ) from None
    except Exception as error:
        hint = hint_for(error)
        if isinstance(error, ModuleNotFoundError):
            hint = f"Install it for the Python that stepscope runs in: {sys.executable}"
        raise BadWorkload(error_text(error, line(error)), hint) from error
    finally:
        hook.remove()
