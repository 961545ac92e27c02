"""Frameworks by the value of the setting `framework`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import WorkloadError
from stepscope.workloads.code_reference import parse_reference

if TYPE_CHECKING:
    from stepscope.workloads.frameworks.contract import Framework

DEFAULT_NAME = "FRAMEWORK"
"""Default name of the adapter in a user's file or module."""


def _torch() -> Framework:
    from stepscope.workloads.frameworks.torch.adapter import TorchFramework

    return TorchFramework()


FRAMEWORKS: dict[str, Callable[[], Framework]] = {"torch": _torch}


def is_user_adapter(setting: str) -> bool:
    """Whether the setting has the form `FILE.py:NAME` or `package.module:NAME`."""
    source, name = parse_reference(setting)
    is_module = "." in source and source.replace(".", "").isidentifier()
    return (source.endswith(".py") or is_module) and (name or DEFAULT_NAME).isidentifier()


def framework_name(setting: str) -> str:
    """The name for messages. User adapters are not imported for it."""
    return FRAMEWORKS[setting]().name if setting in FRAMEWORKS else setting


def get_framework(setting: str) -> Framework:
    """Return the adapter. Call it only in a process that trains: it imports user adapters."""
    if setting in FRAMEWORKS:
        return FRAMEWORKS[setting]()
    reference = parse_reference(setting)
    module_name, name = reference.source, reference.name or DEFAULT_NAME
    if reference.is_file:
        file = Path(reference.source)
        if not file.is_file():
            raise WorkloadError(f"No such file: {file}", f"The current folder is {Path.cwd()}")
        sys.path.insert(0, str(file.resolve().parent))
        module_name = file.stem
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise WorkloadError(
                f"No module {error.name!r} for `--framework {setting}`",
                "Add the folder that contains it to PYTHONPATH",
            ) from None
        raise
    adapter: Framework | None = getattr(module, name, None)
    if adapter is None:
        raise WorkloadError(
            f"No adapter {name!r} in {reference.source}",
            "Name the adapter object: --framework FILE.py:NAME",
        )
    return adapter
