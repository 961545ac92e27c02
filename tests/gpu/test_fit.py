"""`fit` on a real GPU: its answers are checked with fresh processes, and errors are provoked.

The allocator model, which other tests rely on, is compared with the real allocator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import trial_environment
from stepscope.analysis.memory.caching_allocator import trace_growth
from stepscope.analysis.memory.model import retry_free_bytes
from stepscope.fit.memory_budget import choose_gpu
from stepscope.fit.probes.client import ForkedProbes
from stepscope.workloads.probing import ProbeRequest
from stepscope.workloads.spec import make_workload

pytestmark = pytest.mark.gpu

GiB = 1 << 30
LIMIT = 4 * GiB
BF16 = ("--precision", "bf16")

WORKLOADS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

DATA = TensorDataset(torch.rand(4096, 3, 64, 64), torch.randint(10, (4096,)))

def net():
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10),
    )

def plain():
    return {"model": net(), "data": DATA, "loss": nn.functional.cross_entropy}

def large():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, 40_000), nn.Linear(40_000, 10))
    return {"model": model, "data": DATA, "loss": nn.functional.cross_entropy}

KEPT = []

def leaks():
    def step(model, batch):
        KEPT.append(torch.zeros(8 << 20, device=batch[0].device))
        return nn.functional.cross_entropy(model(batch[0]), batch[1])
    return {"model": net(), "data": DATA, "step": step}

def no_growth():
    def step(model, batch):
        return model(batch[0][:2]).sum()
    return {"model": net(), "data": DATA, "step": step}

def wrong():
    return {"model": nn.Linear(7, 7), "data": DATA, "loss": nn.functional.cross_entropy}
"""

HOLD = """
import torch, sys
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def workloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("fit") / "small.py"
    file.write_text(WORKLOADS)
    return file


@pytest.fixture(scope="module")
def prober(workloads: Path) -> Iterator[ForkedProbes]:
    # In fp32, the cuDNN workspace alone may take gigabytes, even for such a small net.
    workload = make_workload(f"{workloads}:plain", {"precision": "bf16"})
    with ForkedProbes(workload, os.environ) as prober:
        yield prober


def fit(folder: Path, *words: str | Path, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "fit", *map(str, words), "--json", "--no-cache"],
        capture_output=True,
        text=True,
        timeout=170,
        env=trial_environment(folder),
    )
    assert done.returncode == code, done.stderr
    return dict(json.loads(done.stdout)) if done.stdout else {"stderr": done.stderr}


def test_the_allocator_model_matches_the_real_allocator(prober: ForkedProbes) -> None:
    small, large = prober.run([ProbeRequest((b,), trace=True) for b in (100, 250)])
    for probed in (small, large):
        assert probed.trace is not None
        assert retry_free_bytes(probed.trace) == probed.last.reserved_peak_bytes
    assert small.trace and large.trace
    growth = trace_growth(small.trace, 100, large.trace, 250)
    assert growth is not None
    between = prober.run([ProbeRequest((180,))])[0].last
    assert retry_free_bytes(growth.at(180)) == pytest.approx(between.reserved_peak_bytes, rel=0.1)


def test_an_oom_is_located_and_does_not_affect_other_probes(prober: ForkedProbes) -> None:
    fine, short = prober.run(
        [ProbeRequest((16,), LIMIT, exclusive=True), ProbeRequest((20_000,), LIMIT, exclusive=True)]
    )
    assert fine.last.is_ok and fine.last.retries == 0 and fine.last.samples_per_second
    assert short.last.kind == "gpu_oom" and short.last.phase == "step 1"
    assert short.last.requested_bytes and short.last.shortfall_bytes
    again = prober.run([ProbeRequest((16,), LIMIT)])[0].last
    assert again.allocated_peak_bytes == fine.last.allocated_peak_bytes
    assert again.parts == fine.last.parts
    assert (
        again.parts.weights_bytes and again.parts.optimizer_bytes and again.parts.activations_bytes
    )


def test_the_answer_passes_and_the_next_batch_fails(
    workloads: Path, prober: ForkedProbes, tmp_path: Path
) -> None:
    result = fit(tmp_path, f"{workloads}:plain", "--gpu-memory", "4GiB", *BF16, "--verify")
    largest, recommended = result["max_batch"], result["recommended_batch"]
    assert result["verdict"] == "fits" and recommended["size"] <= largest["size"] < 4096
    passed = prober.run([ProbeRequest((largest["size"],), LIMIT, 10, 10)] * 3)
    assert all(each.last.is_ok for each in passed)
    assert prober.run([ProbeRequest((recommended["size"],), LIMIT, 10, 10)])[0].last.retries == 0
    assert not prober.run([ProbeRequest((largest["batch_above"],), LIMIT, 10, 10)])[0].last.is_ok
    assert largest["batch_above"] <= 1.02 * largest["size"] + 1
    verification = result["verification"]
    assert all(each["kind"] == "ok" for each in verification) and len(verification) >= 3
    assert result["memory_breakdown"]["parts"]["context_bytes"] > 50 << 20
    predicted = [each["max_batch"] for each in result["predictions"]]
    assert predicted == sorted(predicted)


def test_a_distributed_rank_also_allocates_gradient_buckets(
    workloads: Path, prober: ForkedProbes
) -> None:
    workload = make_workload(f"{workloads}:plain", {"ranks": 2, "precision": "bf16"})
    with ForkedProbes(workload, os.environ) as ranks:
        one, of_two = (each.run([ProbeRequest((8,))])[0].last for each in (prober, ranks))
    assert of_two.is_ok, of_two.message
    assert max(of_two.allocated_bytes) >= max(one.allocated_bytes) + one.parts.gradients_bytes


def test_linear2019(workloads: Path, tmp_path: Path) -> None:
    result = fit(
        tmp_path, f"{workloads}:plain", "--gpu-memory", "9GiB", *BF16, "--method", "linear2019"
    )
    linear = result["linear2019"]
    assert (linear["small_batch"], linear["large_batch"]) == (10, 50)
    assert linear["per_sample_bytes"] > 0
    batches = [batch for _, batch in linear["max_batch_by_reserve"]]
    assert batches[0] > batches[1] > batches[2]
    assert linear["layers"] and linear["max_batch_by_layers"]


def test_a_limit_below_the_size_of_the_model(workloads: Path, tmp_path: Path) -> None:
    result = fit(tmp_path, f"{workloads}:large", "--gpu-memory", "3GiB", code=10)
    assert result["verdict"] == "does_not_fit" and "more is needed" in result["summary"]


def test_a_leak_is_reported(workloads: Path, tmp_path: Path) -> None:
    result = fit(tmp_path, f"{workloads}:leaks", "--gpu-memory", "4GiB", code=14)
    assert result["verdict"] == "unknown" and "32 MiB more stays allocated" in result["summary"]


def test_memory_that_does_not_grow(workloads: Path, tmp_path: Path) -> None:
    result = fit(tmp_path, f"{workloads}:no_growth", "--gpu-memory", "4GiB")
    assert result["verdict"] == "fits" and result["max_batch"]["size"] == 4096  # the whole dataset
    assert any("limits the batch to 4,096 samples" in note for note in result["notes"])


def test_a_step_that_fails_for_another_reason(workloads: Path, tmp_path: Path) -> None:
    result = fit(tmp_path, f"{workloads}:wrong", "--gpu-memory", "4GiB", code=4)
    assert "shapes" in result["stderr"] or "mat1" in result["stderr"]


@pytest.mark.timeout(300)
def test_memory_of_other_processes_is_not_used(workloads: Path, tmp_path: Path) -> None:
    gpu = choose_gpu(None, os.environ)
    assert gpu is not None
    used = gpu.free_bytes - 6 * GiB
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(used)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout and other.stdout.readline()
        result = fit(tmp_path, f"{workloads}:plain")
        other.kill()
    assert result["budget"]["limit_bytes"] < 6 * GiB
    assert result["budget"]["other_processes"]
    assert 1 < result["max_batch"]["size"] <= 4096
