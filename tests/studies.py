"""Runs studies of planted trials: real processes whose throughput is a formula of the test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PLANTED = Path(__file__).parent / "data" / "studies"
STUDY = [sys.executable, "-m", "stepscope", "study"]


def planted_environment(folder: Path, **planted: str | float) -> dict[str, str]:
    """Return the environment for planted trials: `formula="100 * cpus"`, `oom=…`."""
    variables = {f"PLANTED_{name.upper()}": str(value) for name, value in planted.items()}
    path = os.pathsep.join(filter(None, [str(PLANTED), os.environ.get("PYTHONPATH")]))
    return {
        **os.environ,
        "STEPSCOPE_STATE": str(folder / "state"),
        "STEPSCOPE_DATA": str(folder / "data"),
        "PYTHONPATH": path,
        "PLANTED_REAL_S": "0.02",
        **variables,
    }


def design(folder: Path, text: str, name: str = "planted") -> Path:
    """Write a design of planted trials; `text` follows the workload."""
    file = folder / f"{name}.yaml"
    fixed = "workload: cnn\nfixed: {framework: made_up.loop, data: random}\n"
    file.write_text(text if "workload:" in text or "model:" in text else fixed + text)
    return file


def study(
    command: str, *arguments: str | Path, env: dict[str, str], **popen: Any
) -> subprocess.CompletedProcess[str]:
    """Run `stepscope study …` and wait for it."""
    return subprocess.run(
        [*STUDY, command, *map(str, arguments)],
        env=env,
        **{"capture_output": True, "text": True, "timeout": 110, **popen},
    )
