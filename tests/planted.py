"""The scripts with planted bottlenecks: how to run them, and how to record a run for the tests."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data" / "bottlenecks"
RECORDED = FOLDER / "recorded"
"""A run of each script, recorded by `benchmarks/explain.py --record`."""
THIEF = FOLDER / "thief.py"

_KEPT_ENVIRONMENT = ("cpu", "memory", "gpus", "driver", "cgroup", "os")
_GROUP = re.compile(r'/sys/fs/cgroup/[^" ]*')
_SPEED = re.compile(r"^samples/s: ([\d.]+)", re.MULTILINE)


@dataclass(frozen=True)
class Planted:
    """A script and its planted bottleneck."""

    name: str
    path: Path
    cause: str
    device: str
    thief: str | None = None
    ranks: int = 1

    def command(self, *, fixed: bool, seconds: float | None = None) -> list[str]:
        """Return the command line of the script."""
        python = [sys.executable]
        if self.ranks > 1:
            python += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
            python += [str(self.ranks)]
        options = ["--fixed"] if fixed else []
        if seconds is not None:
            options += ["--seconds", str(seconds)]
        return [*python, str(self.path), *options]

    @contextlib.contextmanager
    def interference(self, fixed: bool, seconds: float) -> Iterator[None]:
        """Run the process that competes with the script, if that is its bottleneck."""
        if self.thief is None or fixed:
            yield
            return
        count = ["2"] if self.thief == "cpu" else []
        options = [f"--{self.thief}", *count, "--seconds", str(seconds + 60)]
        thief = subprocess.Popen([sys.executable, str(THIEF), *options], start_new_session=True)
        try:
            time.sleep(8.0 if self.thief == "gpu" else 1.0)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(thief.pid, signal.SIGKILL)
            thief.wait()


def planted_scripts(device: str | None = None) -> list[Planted]:
    """Return all scripts, by name; their constants are parsed, not run."""
    scripts = []
    for path in sorted(FOLDER.glob("*pu_*.py")):
        constants = _constants(path)
        if device in (None, constants["DEVICE"]):
            scripts.append(
                Planted(
                    path.stem,
                    path,
                    constants["CAUSE"],
                    constants["DEVICE"],
                    constants.get("NEEDS_THIEF"),
                    constants.get("RANKS", 1),
                )
            )
    return scripts


def speed_of(output: str) -> float | None:
    """Return the samples per second that the script printed, summed over its ranks."""
    speeds = [float(text) for text in _SPEED.findall(output)]
    return sum(speeds) if speeds else None


def _constants(path: Path) -> dict[str, Any]:
    """Return the literals that a module assigns to names."""
    constants = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            with contextlib.suppress(ValueError):
                constants[node.targets[0].id] = ast.literal_eval(node.value)
    return constants


def keep(run: Path, archive: Path) -> None:
    """Archive a run folder without paths of the machine."""
    facts = json.loads((run / "run.json").read_text())
    archive.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        _add(packed, "run.json", json.dumps(_without_paths(facts)).encode())
        for path in sorted(run.rglob("*")):
            inside = path.relative_to(run)
            if path.is_file() and inside.parts[0] != "derived" and path.name != "run.json":
                _add(packed, str(inside), path.read_bytes())


def unpack(archive: Path, into: Path) -> Path:
    """Extract an archived run folder."""
    folder = into / archive.name.partition(".")[0]
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return folder


def _without_paths(facts: Mapping[str, Any]) -> dict[str, Any]:
    environment = facts.get("environment") or {}
    command = [Path(word).name if "/" in word else word for word in facts.get("command") or []]
    kept = {
        **facts,
        "command": command,
        "cwd": "/home/user",
        "environment": {k: environment[k] for k in _KEPT_ENVIRONMENT if k in environment},
    }
    plain: dict[str, Any] = json.loads(_GROUP.sub("/sys/fs/cgroup", json.dumps(kept)))
    return plain


def _add(packed: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    packed.addfile(entry, io.BytesIO(data))
