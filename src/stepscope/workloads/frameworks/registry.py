"""Frameworks by the name that the setting `framework` has for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.errors import BadWorkload
from stepscope.workloads.code_place import parse_place

if TYPE_CHECKING:
    from stepscope.workloads.frameworks.contract import Framework

DEFAULT_NAME = "FRAMEWORK"
"""The adapter in a user's file or module, where no other is named."""


def _torch() -> Framework:
    from stepscope.workloads.frameworks.torch.adapter import TorchFramework

    return TorchFramework()


FRAMEWORKS: dict[str, Callable[[], Framework]] = {"torch": _torch}


def is_user_adapter(setting: str) -> bool:
    """Whether it has the form `FILE.py:NAME` or `package.module:NAME`."""
    source, name = parse_place(setting)
    is_module = "." in source and source.replace(".", "").isidentifier()
    return (source.endswith(".py") or is_module) and (name or DEFAULT_NAME).isidentifier()


def framework_name(setting: str) -> str:
    """For messages; nothing of a user's is imported for it."""
    return FRAMEWORKS[setting]().name if setting in FRAMEWORKS else setting


def get_framework(setting: str) -> Framework:
    """The adapter. One of a user is imported: call it only in a process that trains."""
    if setting in FRAMEWORKS:
        return FRAMEWORKS[setting]()
    place = parse_place(setting)
    module_name, name = place.source, place.name or DEFAULT_NAME
    if place.is_file:
        file = Path(place.source)
        if not file.is_file():
            raise BadWorkload(f"There is no file {file}", f"You are in {Path.cwd()}")
        sys.path.insert(0, str(file.resolve().parent))
        module_name = file.stem
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and f"{module_name}.".startswith(f"{error.name}."):
            raise BadWorkload(
                f"There is no module {error.name} to train with", "Name its place in PYTHONPATH"
            ) from None
        raise
    adapter: Framework | None = getattr(module, name, None)
    if adapter is None:
        raise BadWorkload(
            f"There is no {name} in {place.source}",
            "Name the object that is the adapter: --framework FILE.py:NAME",
        )
    return adapter
