"""The doctor on a machine with a GPU: every check is tried, and every sensor tells the truth."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from conftest import STEPSCOPE

pytestmark = pytest.mark.gpu

GPU_CHECKS = {
    "GPU memory",
    "GPU memory of run",
    "PCIe to GPU",
    "PCIe from GPU",
    "Copies, not work",
    "Memory bandwidth",
    "Tensor cores",
    "Tiny kernels",
}


def test_every_gpu_check_is_tried_and_right(tmp_path: Path) -> None:
    done = subprocess.run(
        [*STEPSCOPE, "doctor", "--json"], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    verdicts = {each["name"]: each["state"] for each in told["self_test"]}
    assert {name: verdicts.get(name) for name in GPU_CHECKS} == dict.fromkeys(GPU_CHECKS, "ok")
