"""Custom workloads in PyTorch: import the file, call the function, use what it returns.

The file is imported the way Python runs a script: its folder comes first in sys.path, and the
module has the name of the file, so that spawned loader workers can unpickle the dataset.
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

from stepscope.errors import StepscopeError, WorkloadError
from stepscope.workloads.custom import (
    CustomWorkload,
    error_text,
    find_custom,
    hint_for,
    skeleton,
    where_in,
)
from stepscope.workloads.frameworks.torch.models import Built
from stepscope.workloads.frameworks.torch.returned import built_from
from stepscope.workloads.spec import SETTINGS, Workload, close_names, nearest, option_name

_GUARD = '`if __name__ == "__main__":`'


def load_custom(workload: Workload) -> Built:
    """Load the user's model, loss and data, or raise a WorkloadError with the line at fault."""
    custom = find_custom(workload.model)
    with _user_code(custom, "when the file is imported"):
        # The module name must be unique, or loader workers would import the other module.
        name = custom.module_name or custom.file.stem
        if custom.module_name is None and "." in name:
            raise WorkloadError(
                f"{custom.file.name} cannot be imported: its name contains more than one dot",
                "Rename the file",
            )
        sys.path.insert(0, str(Path.cwd() if custom.module_name else custom.file.parent))
        sys.argv = [str(custom.file)]  # also for workers: the file must not parse our arguments
        importlib.invalidate_caches()
        module = importlib.import_module(name)
        imported = getattr(module, "__file__", None)
        if imported is None or not os.path.samefile(imported, custom.file):
            raise WorkloadError(
                f"{custom.shown} has the same name as another module: "
                f"{imported or 'a built-in module'}",
                "Rename the file",
            )
    function = getattr(module, custom.function, None)
    if not callable(function):
        raise WorkloadError(f"{custom.function!r} in {custom.shown} is not a function")
    with _user_code(custom, f"when {custom.function}() is called"):
        parameters = inspect.signature(function).parameters
        returned = function(**_settings_for(parameters, workload, custom))
    return built_from(returned, workload, custom, used=frozenset(parameters))


def _settings_for(
    parameters: Mapping[str, inspect.Parameter], workload: Workload, custom: CustomWorkload
) -> dict[str, Any]:
    """The settings that a signature names; a setting that is None keeps the function's default."""
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    settings = {name: getattr(workload, name) for name in SETTINGS} if takes_all else {}
    call = f"`{custom.function}()` in {custom.shown}"
    for name, parameter in parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        value = getattr(workload, name) if name in SETTINGS else None
        if value is not None:
            settings[name] = value
        elif parameter.default is not parameter.empty:
            settings.pop(name, None)
        elif name in SETTINGS:
            hint = f"Pass {option_name(name)}, or give the parameter a default value"
            raise WorkloadError(f"{call} needs {name}, which is not set", hint)
        else:
            hint = "Give the parameter a default value"
            if close_names(name, SETTINGS):
                hint += f". {nearest(name, SETTINGS)}"
            raise WorkloadError(f"{call} has a parameter {name!r}, which is not a setting", hint)
    return settings


class _TrainsTooEarly(BaseException):
    """Raised in user code that trains. A BaseException, so that `except Exception` does not catch
    it."""


@contextmanager
def _user_code(custom: CustomWorkload, when: str) -> Iterator[None]:
    """Turn errors in user code into a WorkloadError with the line, and prevent training.

    Running out of memory is not changed: it is a result of the trial.
    """

    def stop(*_: object) -> None:
        raise _TrainsTooEarly

    def line(error: BaseException) -> str:
        return where_in(error, custom.file) or custom.shown

    hook = register_optimizer_step_pre_hook(stop)
    try:
        yield
    except (StepscopeError, KeyboardInterrupt, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except _TrainsTooEarly as error:
        raise WorkloadError(
            f"{line(error)}: this line starts training {when}",
            f"Move this code under {_GUARD}, and return the model and the data:\n\n"
            + skeleton(custom.file, custom.function),
        ) from None
    except SystemExit as error:
        raise WorkloadError(
            f"{line(error)}: this line exits Python {when} (exit code {error.code})",
            f"If this line parses arguments, move it under {_GUARD}",
        ) from None
    except Exception as error:
        hint = hint_for(error)
        if isinstance(error, ModuleNotFoundError):
            hint = f"Install it for the Python that runs stepscope: {sys.executable}"
        raise WorkloadError(error_text(error, line(error)), hint) from error
    finally:
        hook.remove()
