"""Studies on a real GPU: measurements, OOM, and interference of another process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from conftest import trial_environment
from studies import study

pytestmark = pytest.mark.gpu

MULTIPLY = """
import torch
a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
print("ready", flush=True)
while True:
    a @ a
    torch.cuda.synchronize()
"""


def run(folder: Path, text: str) -> dict[str, Any]:
    file = folder / "gpu.yaml"
    file.write_text(text)
    env = trial_environment(folder)
    done = study("run", file, "--out", folder, "--json", env=env, timeout=280)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def ledger(folder: Path) -> list[dict[str, Any]]:
    lines = [p.read_text().splitlines() for p in (folder / "gpu" / "ledger").iterdir()]
    return [json.loads(line) for each in lines for line in each]


@pytest.mark.timeout(300)
def test_larger_trials_are_skipped_after_an_oom(tmp_path: Path) -> None:
    results = run(
        tmp_path,
        """
workload: resnet50
fixed: {data: resident, steps: 20, samples: 256}
factors:
  batch_size: [16, 128, 256]
  gpu_memory: [3GiB, 40GiB]
blocks: {reference: none}
oom: {test: 0}
seed: 2
""",
    )
    lines = {
        (line["settings"]["batch_size"], line["settings"]["gpu_memory"] >> 30): line
        for line in ledger(tmp_path)
    }
    good = lines[256, 40]  # long enough for the utilization, which the driver updates rarely
    assert good["outcome"] == "ok"
    for key in ("gpu_utilization", "gpu_sm", "gpu_memory_peak", "joules_per_sample"):
        assert good["values"][key] > 0, key
    small = [line for (_, limit), line in lines.items() if limit == 3]
    assert "gpu_oom" in {line["outcome"] for line in small}
    skipped = [each for each in results["skipped"] if "already failed (gpu_oom)" in each["reason"]]
    assert len(lines) + len(skipped) == 6
    responses = {effects["response"] for effects in results["effects"]}
    assert {"samples_per_second", "gpu_memory_peak_bytes", "joules_per_sample"} <= responses


@pytest.mark.timeout(300)
def test_other_process_on_the_gpu_is_interference(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", MULTIPLY], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
        run(
            tmp_path,
            """
workload: resnet18
fixed: {data: resident, seconds: 3, samples: 64}
factors: {batch_size: [32]}
blocks: {reference: none, reruns: 0}
""",
        )
    finally:
        other.kill()
        other.wait()
    (line,) = ledger(tmp_path)
    assert any(reason["kind"] == "gpu" for reason in line["interference"]), line
