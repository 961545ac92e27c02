"""`fit` on a real GPU: its answers against fresh processes, and what can go wrong there.

The model of the allocator, which the other tests trust, is held against the real one here.
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
from stepscope.analysis.memory.caching_allocator import growth
from stepscope.analysis.memory.model import comfortable_bytes
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
    # In fp32, cuDNN's workspace alone may take gigabytes of a net as small as this.
    workload = make_workload(f"{workloads}:plain", {"precision": "bf16"})
    with ForkedProbes(workload, os.environ) as prober:
        yield prober


def fit(folder: Path, *words: str | Path, code: int = 0) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "stepscope", "fit", *map(str, words), "--json", "--fresh"],
        capture_output=True,
        text=True,
        timeout=170,
        env=trial_environment(folder),
    )
    assert done.returncode == code, done.stderr
    return dict(json.loads(done.stdout)) if done.stdout else {"stderr": done.stderr}


def test_the_model_of_the_allocator_holds_what_the_real_one_does(prober: ForkedProbes) -> None:
    small, large = prober.run([ProbeRequest((b,), trace=True) for b in (100, 250)])
    for probed in (small, large):
        assert probed.trace is not None
        assert comfortable_bytes(probed.trace) == probed.last.reserved_peak
    assert small.trace and large.trace
    grows = growth(small.trace, 100, large.trace, 250)
    assert grows is not None
    between = prober.run([ProbeRequest((180,))])[0].last
    assert comfortable_bytes(grows.at(180)) == pytest.approx(between.reserved_peak, rel=0.1)


def test_a_probe_that_runs_out_says_where_and_leaves_the_others_alone(prober: ForkedProbes) -> None:
    fine, short = prober.run(
        [ProbeRequest((16,), LIMIT, turn=True), ProbeRequest((20_000,), LIMIT, turn=True)]
    )
    assert fine.last.is_ok and fine.last.retries == 0 and fine.last.samples_per_second
    assert short.last.kind == "gpu_oom" and short.last.phase == "step 1"
    assert short.last.wanted and short.last.missing
    again = prober.run([ProbeRequest((16,), LIMIT)])[0].last
    assert (again.allocated_peak, again.parts) == (fine.last.allocated_peak, fine.last.parts)
    assert again.parts.weights and again.parts.optimizer and again.parts.activations


def test_the_answer_passes_and_what_is_above_fails(
    workloads: Path, prober: ForkedProbes, tmp_path: Path
) -> None:
    told = fit(tmp_path, f"{workloads}:plain", "--gpu-memory", "4GiB", *BF16, "--prove")
    largest, fast = told["largest"], told["fast"]
    assert told["verdict"] == "fits" and fast["size"] <= largest["size"] < 4096
    passed = prober.run([ProbeRequest((largest["size"],), LIMIT, 10, 10)] * 3)
    assert all(each.last.is_ok for each in passed)
    assert prober.run([ProbeRequest((fast["size"],), LIMIT, 10, 10)])[0].last.retries == 0
    assert not prober.run([ProbeRequest((largest["above"],), LIMIT, 10, 10)])[0].last.is_ok
    assert largest["above"] <= 1.02 * largest["size"] + 1
    assert all(proof["kind"] == "ok" for proof in told["proof"]) and len(told["proof"]) >= 3
    assert told["composition"]["parts"]["outside"] > 50 << 20
    assert [card["largest"] for card in told["cards"]] == sorted(
        card["largest"] for card in told["cards"]
    )


def test_a_rank_of_several_also_holds_buckets_of_gradients(
    workloads: Path, prober: ForkedProbes
) -> None:
    workload = make_workload(f"{workloads}:plain", {"ranks": 2, "precision": "bf16"})
    with ForkedProbes(workload, os.environ) as ranks:
        one, of_two = (each.run([ProbeRequest((8,))])[0].last for each in (prober, ranks))
    assert of_two.is_ok, of_two.message
    assert max(of_two.kept) >= max(one.kept) + one.parts.gradients


def test_the_2019_method(workloads: Path, tmp_path: Path) -> None:
    told = fit(
        tmp_path, f"{workloads}:plain", "--gpu-memory", "9GiB", *BF16, "--method", "linear2019"
    )
    linear = told["linear"]
    assert (linear["small"], linear["large"]) == (10, 50) and linear["per_sample"] > 0
    batches = [batch for _, batch in linear["by_reserve"]]
    assert batches[0] > batches[1] > batches[2] and linear["layers"] and linear["by_layers"]


def test_a_limit_below_the_size_of_the_model(workloads: Path, tmp_path: Path) -> None:
    told = fit(tmp_path, f"{workloads}:large", "--gpu-memory", "3GiB", code=10)
    assert told["verdict"] == "does not fit" and "more would be needed" in told["says"]


def test_a_leak_is_named(workloads: Path, tmp_path: Path) -> None:
    told = fit(tmp_path, f"{workloads}:leaks", "--gpu-memory", "4GiB", code=14)
    assert told["verdict"] == "cannot tell" and "32 MiB more stay" in told["says"]


def test_memory_that_does_not_grow(workloads: Path, tmp_path: Path) -> None:
    told = fit(tmp_path, f"{workloads}:no_growth", "--gpu-memory", "4GiB")
    assert told["verdict"] == "fits" and told["largest"]["size"] == 4096  # all samples there are
    assert any("no more than 4,096 samples" in note for note in told["notes"])


def test_a_step_that_fails_for_another_reason(workloads: Path, tmp_path: Path) -> None:
    told = fit(tmp_path, f"{workloads}:wrong", "--gpu-memory", "4GiB", code=4)
    assert "shapes" in told["stderr"] or "mat1" in told["stderr"]


@pytest.mark.timeout(300)
def test_what_others_hold_is_not_ours_and_they_are_named(workloads: Path, tmp_path: Path) -> None:
    gpu = choose_gpu(None, os.environ)
    assert gpu is not None
    held = gpu.free - 6 * GiB
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(held)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as tenant:
        assert tenant.stdout and tenant.stdout.readline()
        told = fit(tmp_path, f"{workloads}:plain")
        tenant.kill()
    assert told["room"]["limit"] < 6 * GiB and told["room"]["tenants"]
    assert 1 < told["largest"]["size"] <= 4096
