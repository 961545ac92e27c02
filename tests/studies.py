"""Runs studies of planted trials: real processes that train nothing, by the formula of a test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PLANTED = Path(__file__).parent / "data" / "studies"
STUDY = [sys.executable, "-m", "stepscope", "study"]


def planted_environment(folder: Path, **planted: str | float) -> dict[str, str]:
    """The environment of a study whose trials are planted: `formula="100 * cpus"`, `oom=…`."""
    said = {f"PLANTED_{name.upper()}": str(value) for name, value in planted.items()}
    path = os.pathsep.join(filter(None, [str(PLANTED), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "STEPSCOPE_STATE": str(folder / "state"),
        "STEPSCOPE_DATA": str(folder / "data"),
        "PYTHONPATH": path,
        "PLANTED_REAL_S": "0.02",
        **said,
    }


def design(folder: Path, text: str, name: str = "planted") -> Path:
    """A design file of planted trials; `text` is what comes after its workload."""
    file = folder / f"{name}.yaml"
    fixed = "workload: cnn\nfixed: {framework: made_up.loop, data: random}\n"
    file.write_text(text if "workload:" in text or "model:" in text else fixed + text)
    return file


def study(
    command: str, *arguments: str | Path, env: dict[str, str], **popen: Any
) -> subprocess.CompletedProcess[str]:
    """`stepscope study …` to its end."""
    return subprocess.run(
        [*STUDY, command, *map(str, arguments)],
        env=env,
        **{"capture_output": True, "text": True, "timeout": 110, **popen},
    )
