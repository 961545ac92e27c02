"""Cache of fit results, keyed by everything they depend on: model, source, versions, GPU, settings.

Each result is a JSON file in the state folder. Unreadable files are ignored, and results that may
be due to an accident are not stored.
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
from stepscope.fit.memory_budget import host_memory_free
from stepscope.fit.request import FitRequest
from stepscope.fit.result import ChosenGpu, FitResult, NoteKind, Verdict
from stepscope.records.codec import dumps, loads, to_json
from stepscope.runs.files import replace_atomically
from stepscope.state import state_folder
from stepscope.workloads.custom import find_custom
from stepscope.workloads.spec import NOT_FOR_FIT, Workload

_IRRELEVANT = (*NOT_FOR_FIT, "seed", "page_cache")
_AMPLE_FREE_BYTES = 2 << 30
"""With this much more free memory than requested, the amount of free memory does not matter."""
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
"""Prefixes of environment variables that affect allocators or kernels."""
_SOURCE_SUFFIXES = (".py", ".json", ".yaml", ".yml", ".toml")
_SKIPPED_FOLDERS = ("site-packages", "node_modules", "__pycache__")
_MARKERS = ({"pyvenv.cfg"}, {"run.json", "events"}, {"study.json", "ledger"})
"""Files that mark folders without user code: environments, runs, studies."""
_MAX_FILES, _MAX_BYTES, _MAX_ENTRIES = 500, 20_000_000, 50_000
"""Limits for reading the user's folder: it may be the home directory, or contain the data."""
_ACCIDENTS = (NoteKind.BATCH_FAILED, NoteKind.EDGE_UNSTABLE)
_MAX_RESULTS = 200


def key_of(request: FitRequest, gpu: ChosenGpu | None) -> str:
    settings = to_json(request.workload)
    limits = replace(request.limits, stall_timeout_s=0.0)
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    # Free memory is rounded, and ignored if it is ample for the request.
    if gpu is None:
        free = None if limits.memory is not None else host_memory_free() >> 28
        machine: list[object] = [os.cpu_count(), free]
    else:
        is_ample = (
            limits.gpu_memory is not None
            and gpu.free_bytes - _AMPLE_FREE_BYTES >= limits.gpu_memory
        )
        machine = [
            gpu.name,
            gpu.total_bytes,
            gpu.driver,
            None if is_ample else gpu.free_bytes >> 26,
        ]
    parts = {
        "settings": {name: settings[name] for name in settings if name not in _IRRELEVANT},
        "source": _source(request.workload),
        "limits": to_json(limits),
        "request": [
            request.headroom,
            request.headroom_share,
            request.predict_for,
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
    """Return a digest of the user's file and of the files in its folder and below."""
    if not workload.is_custom:
        return ""
    main = find_custom(workload.model).file
    digest, budget = hashlib.sha256(), _MAX_BYTES
    for count, file in enumerate(_source_files(main)):
        if count == _MAX_FILES:
            break
        with contextlib.suppress(OSError):
            size = file.stat().st_size
            if file == main or size <= budget:
                digest.update(f"{file} {size} ".encode(errors="surrogateescape"))
                digest.update(file.read_bytes())
                budget -= size
    return digest.hexdigest()


def _source_files(main: Path) -> Iterator[Path]:
    """Yield source files, the nearest first: a large subfolder must not exhaust the limits."""
    yield main
    folders, seen = deque([main.parent]), 0
    while folders and seen < _MAX_ENTRIES:
        folder = folders.popleft()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        seen += len(entries)
        names = {entry.name for entry in entries}
        if folder != main.parent and any(marker <= names for marker in _MARKERS):
            continue
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if not entry.name.startswith(".") and entry.name not in _SKIPPED_FOLDERS:
                    folders.append(folder / entry.name)
            elif entry.name.endswith(_SOURCE_SUFFIXES) and folder / entry.name != main:
                yield folder / entry.name


def load(key: str) -> FitResult | None:
    try:
        fit = loads(FitResult, _file(key).read_bytes())
    except (OSError, ValueError):
        return None
    return replace(fit, from_cache=True)


def store(key: str, fit: FitResult) -> None:
    """Store a result, unless another run may give a different one."""
    if fit.verdict == Verdict.UNKNOWN or any(note.kind in _ACCIDENTS for note in fit.notes):
        return
    file = _file(key)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_atomically(file, dumps(fit) + "\n")
        files = sorted(file.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)
        for oldest in files[:-_MAX_RESULTS]:
            oldest.unlink(missing_ok=True)


def _file(key: str) -> Path:
    return state_folder() / "fits" / f"{key}.json"
