"""Answers of before, by all that they depend on: model, source, versions, GPU, settings.

A JSON file for each in the state folder. What cannot be read or written is measured again; an
answer that an accident may have had a part in is not kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import stepscope
from stepscope.fit.answer import ChosenGpu, Fit, NoteKind, Verdict
from stepscope.fit.memory_budget import host_memory_free
from stepscope.fit.request import FitRequest
from stepscope.records.codec import dumps, loads, to_json
from stepscope.runs.paths import replace_atomically
from stepscope.trials.state import state_folder
from stepscope.workloads.own import find_own
from stepscope.workloads.spec import NOT_FOR_FIT, Workload

_IRRELEVANT = (*NOT_FOR_FIT, "seed", "cache")
_ENOUGH_MORE = 2 << 30
"""So much more free memory than requested, context included, is enough."""
_PACKAGES = (
    "torch",
    "torchvision",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "transformers",
    "lightning",
    "timm",
)
_ENVIRONMENT = ("PYTORCH_", "CUDNN_", "CUBLAS_", "NVIDIA_TF32", "MALLOC_")
"""Prefixes of variables that change allocators or kernels."""
_CODE = (".py", ".json", ".yaml", ".yml", ".toml")
_NOT_OURS = ("site-packages", "node_modules", "__pycache__")
_MARKS = ({"pyvenv.cfg"}, {"run.json", "events"}, {"study.json", "ledger"})
"""Files in folders without code of the user: environments, runs, studies."""
_MOST_FILES, _MOST_BYTES, _MOST_SEEN = 500, 20_000_000, 50_000
"""Of a user's folder: it may be the home directory, or hold the data."""
_ACCIDENTS = (NoteKind.BATCH_FAILED, NoteKind.EDGE_UNSTABLE)
_MOST_KEPT = 200


def key_of(request: FitRequest, gpu: ChosenGpu | None) -> str:
    settings = to_json(request.workload)
    limits = replace(request.limits, stall_timeout_s=0.0)
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    # Free memory counts roughly; where it is enough for what was requested, not at all.
    if gpu is None:
        free = None if limits.memory is not None else host_memory_free() >> 28
        machine: list[object] = [os.cpu_count(), free]
    else:
        is_enough = limits.gpu_memory is not None and gpu.free - _ENOUGH_MORE >= limits.gpu_memory
        machine = [gpu.name, gpu.total, gpu.driver, None if is_enough else gpu.free >> 26]
    parts = {
        "settings": {name: settings[name] for name in settings if name not in _IRRELEVANT},
        "source": _source(request.workload),
        "limits": to_json(limits),
        "request": [
            request.headroom,
            request.headroom_share,
            request.cards,
            request.method,
            request.estimate,
        ],
        "machine": machine,
        "versions": versions,
        "environment": {k: v for k, v in os.environ.items() if k.startswith(_ENVIRONMENT)},
        "stepscope": stepscope.__version__,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]


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
        fit = loads(Fit, _file(key).read_bytes())
    except (OSError, ValueError):
        return None
    return replace(fit, cached=fit.made)


def remember(key: str, fit: Fit) -> None:
    """Unless another time may give another answer."""
    if fit.verdict == Verdict.CANNOT_TELL or any(note.kind in _ACCIDENTS for note in fit.notes):
        return
    file = _file(key)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(file, dumps(fit) + "\n")
        files = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for oldest in files[:-_MOST_KEPT]:
            oldest.unlink(missing_ok=True)


def _file(key: str) -> Path:
    return state_folder() / "fits" / f"{key}.json"
