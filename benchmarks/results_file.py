"""Write the figures of a benchmark with the machine, versions, date and command."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from stepscope.capture.environment import environment_record
from stepscope.records.codec import to_json

RESULTS = Path(__file__).parent / "results"
PACKAGES = (
    "stepscope",
    "numpy",
    "pyarrow",
    "torch",
    "torchvision",
    "psutil",
    "psrecord",
    "nvidia-ml-py",
)


def write(
    name: str,
    figures: dict[str, Any],
    folder: Path = RESULTS,
    measured_on: dict[str, Any] | None = None,
) -> Path:
    """Write `<folder>/<date>_<name>_<cores>c.json`, by default in `results/`.

    `measured_on` is the environment of the measured machine, if it is not this one.
    """
    here = to_json(environment_record([], Path.cwd(), None))
    environment = measured_on or here
    cores = (environment.get("cpu") or {}).get("logical") or os.cpu_count()
    result = {
        "benchmark": name,
        "date": date.today().isoformat(),
        "command": _command(),
        "machine": {
            "cpu": environment.get("cpu"),
            "memory": environment.get("memory"),
            "os": environment.get("os"),
            "cgroup": (environment.get("cgroup") or {}).get("version"),
            "gpus": environment.get("gpus"),
        },
        "versions": _versions_of(measured_on) if measured_on else _versions(),
        "git": (here.get("git") or {}).get("commit"),
        "figures": figures,
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{result['date']}_{name}_{cores}c.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def _command() -> str:
    """Return the command line without the paths of this machine."""
    program, *words = sys.argv
    hidden = [
        "DIR" if before == "--out" or word.startswith("/") else word
        for before, word in pairwise(["", *words])
    ]
    return " ".join(["python", os.path.relpath(program), *hidden])


def _versions_of(environment: dict[str, Any]) -> dict[str, str]:
    """Return the versions in the environment of another machine."""
    python = (environment.get("python") or {}).get("version")
    return {"python": str(python), **(environment.get("versions") or {})}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except Exception:  # not installed
            continue
    return versions
