"""Answers that were found before, by what they depend on: model, shapes, versions, GPU, settings.

A JSON file for each in the state folder. Nothing depends on it: what cannot be read or written is
measured again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import stepscope
from stepscope.advice.answer import Fit
from stepscope.runs.paths import replace_atomically
from stepscope.trials.spread import state_folder
from stepscope.workloads.own import find_own
from stepscope.workloads.spec import Workload

_NOT_TOLD_APART = ("batch_size", "epochs", "steps", "seconds", "seed", "cache")
_PACKAGES = ("torch", "torchvision")
_MOST_FILES = 200


def key_of(workload: Workload, settings: Mapping[str, Any]) -> str:
    """What must be the same for an answer to be the same."""
    knobs = {k: v for k, v in workload.as_dict().items() if k not in _NOT_TOLD_APART}
    told = {
        "knobs": knobs,
        "source": _source(workload),
        "settings": dict(settings),
        "versions": [_version(package) for package in _PACKAGES],
        "stepscope": stepscope.__version__,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _source(workload: Workload) -> str:
    """A user's files, as they are: those beside the one that is named, too."""
    if not workload.is_own:
        return ""
    folder = find_own(workload.model).file.parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py"))[:_MOST_FILES]:
        with contextlib.suppress(OSError):
            digest.update(file.read_bytes())
    return digest.hexdigest()


def recall(key: str) -> Fit | None:
    try:
        told = json.loads(_file(key).read_text(encoding="utf-8"))
        fit: Fit = _built(Fit, told)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return dataclasses.replace(fit, cached=fit.made)


def remember(key: str, fit: Fit) -> None:
    file = _file(key)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(file, json.dumps(fit.as_dict(), default=str) + "\n")


def _file(key: str) -> Path:
    return state_folder() / "fits" / f"{key}.json"


def _built(kind: Any, told: Any) -> Any:
    """A record from what JSON has of it."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{name: _built(hints[name], value) for name, value in told.items()})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if told is None:
            return None
        return _built(next(each for each in arguments if each is not type(None)), told)
    if origin is tuple:
        of = arguments if arguments[-1] is not Ellipsis else (arguments[0],) * len(told)
        return tuple(_built(each, value) for each, value in zip(of, told, strict=True))
    return told
