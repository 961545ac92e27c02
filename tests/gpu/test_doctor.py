"""The doctor on a machine with a GPU: every check runs and passes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from conftest import STEPSCOPE

pytestmark = pytest.mark.gpu

GPU_CHECKS = {
    "GPU memory",
    "GPU memory of the run",
    "PCIe to GPU",
    "PCIe from GPU",
    "Copies without compute",
    "Memory bandwidth",
    "Tensor cores",
    "Tiny kernels",
}


def test_every_gpu_check_passes(tmp_path: Path) -> None:
    done = subprocess.run(
        [*STEPSCOPE, "doctor", "--json"], capture_output=True, text=True, cwd=tmp_path, timeout=120
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    self_test = {each["name"]: each["state"] for each in report["self_test"]}
    assert {name: self_test.get(name) for name in GPU_CHECKS} == dict.fromkeys(GPU_CHECKS, "ok")
