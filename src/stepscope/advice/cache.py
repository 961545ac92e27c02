"""Answers that were found before, by what they depend on: model, shapes, versions, GPU, settings.

A JSON file for each in the state folder. Nothing depends on it: what cannot be read or written is
measured again. So is what an accident may have had a part in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import types
import typing
from collections import deque
from collections.abc import Iterator, Mapping
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
_PACKAGES = (
    "torch", "torchvision", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    "transformers", "lightning", "timm",
)  # fmt: skip
_ENVIRONMENT = ("PYTORCH_", "CUDNN_", "CUBLAS_", "NVIDIA_TF32", "MALLOC_")
"""How variables begin that change allocators or kernels."""
_CODE = (".py", ".json", ".yaml", ".yml", ".toml")
_NOT_OURS = ("site-packages", "node_modules", "__pycache__")
_MARKS = ({"pyvenv.cfg"}, {"run.json", "events"}, {"study.json", "ledger"})
"""What is in folders without code of the user's: environments, runs, studies."""
_MOST_FILES, _MOST_BYTES, _MOST_SEEN = 500, 20_000_000, 50_000
"""Of a user's folder: it may be a home, or hold the data."""
_ACCIDENTS = ("fails for another reason", "nothing was heard", "did not hold still")
_MOST_KEPT = 200


def key_of(workload: Workload, settings: Mapping[str, Any]) -> str:
    """What must be the same for an answer to be the same."""
    knobs = {k: v for k, v in workload.as_dict().items() if k not in _NOT_TOLD_APART}
    told = {
        "knobs": knobs,
        "source": _source(workload),
        "settings": dict(settings),
        "versions": [_version(package) for package in _PACKAGES],
        "environment": {k: v for k, v in os.environ.items() if k.startswith(_ENVIRONMENT)},
        "stepscope": stepscope.__version__,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _source(workload: Workload) -> str:
    """A user's files, as they are: the one that is named, and those beside and below it."""
    if not workload.is_own:
        return ""
    named = find_own(workload.model).file
    digest, left = hashlib.sha256(), _MOST_BYTES
    for count, file in enumerate(_files_of(named)):
        if count == _MOST_FILES:
            break
        with contextlib.suppress(OSError):
            size = file.stat().st_size
            if file == named or size <= left:
                digest.update(f"{file} {size} ".encode(errors="surrogateescape"))
                digest.update(file.read_bytes())
                left -= size
    return digest.hexdigest()


def _files_of(named: Path) -> Iterator[Path]:
    """Code and settings, the nearest first, so that a large folder cannot hide what is near."""
    yield named
    folders, seen = deque([named.parent]), 0
    while folders and seen < _MOST_SEEN:
        folder = folders.popleft()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        seen += len(entries)
        names = {entry.name for entry in entries}
        if folder != named.parent and any(mark <= names for mark in _MARKS):
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith(".") and entry.name not in _NOT_OURS:
                    folders.append(folder / entry.name)
            elif entry.name.endswith(_CODE) and folder / entry.name != named:
                yield folder / entry.name


def recall(key: str) -> Fit | None:
    try:
        told = json.loads(_file(key).read_text(encoding="utf-8"))
        fit: Fit = _built(Fit, told)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return dataclasses.replace(fit, cached=fit.made)


def remember(key: str, fit: Fit) -> None:
    """Unless another time may give another answer."""
    if fit.verdict == "cannot tell" or _had_an_accident(fit):
        return
    file = _file(key)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(file, json.dumps(fit.as_dict(), default=str) + "\n")
        _forget_the_oldest(file.parent)


def _had_an_accident(fit: Fit) -> bool:
    """Whether a probe ended otherwise than well, or for want of memory."""
    answers = [batch for batch in (fit.largest, fit.fast) if batch is not None]
    said = [*fit.notes, *(batch.why_above for batch in answers)]
    return any(words in text for text in said for words in _ACCIDENTS) or any(
        told.kind in ("error", "timeout", "killed", "workload") for told in fit.proof
    )


def _forget_the_oldest(folder: Path) -> None:
    files = sorted(folder.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for file in files[:-_MOST_KEPT]:
        file.unlink(missing_ok=True)


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
