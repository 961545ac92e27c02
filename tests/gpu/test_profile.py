"""The profiler on a GPU: copies, memory and kernels of steps with known operations."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from stepscope.records.codec import from_json
from stepscope.records.profile import RankProfile

pytestmark = pytest.mark.gpu

MIB = 1 << 20
STEPS = 3


def test_known_steps_on_a_gpu(tmp_path: Path) -> None:
    import torch

    from stepscope.workloads.frameworks.torch.profile import profile_steps

    pinned = torch.empty(4 * MIB, dtype=torch.uint8).pin_memory()
    pageable = torch.empty(2 * MIB, dtype=torch.uint8)
    source, target = (torch.empty(16 * MIB, dtype=torch.uint8, device="cuda") for _ in range(2))
    square = torch.ones(512, 512, device="cuda")

    def step() -> None:
        pinned.to("cuda", non_blocking=True)
        pageable.to("cuda")
        target.copy_(source)
        held = torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")
        del held
        (square @ square).sum().item()

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    profiled = profile_steps(step, STEPS, tmp_path / "trace0.json.gz", "cuda:0")

    assert profiled.get("error") is None and profiled["missing"] == ""
    copies = profiled["copies"]
    assert copies["to_device"]["calls"] == STEPS * 2
    assert 0 < copies["to_device"]["pageable_us"] < copies["to_device"]["us"]
    assert copies["within_device"]["calls"] == STEPS and copies["within_device"]["us"] > 0
    assert copies["from_device"]["calls"] == STEPS
    assert sum(each["us"] for each in copies.values()) == pytest.approx(
        profiled["sums"]["memcpy_us"]
    )
    assert profiled["memory"]["cuda:0"]["allocated"] == torch.cuda.max_memory_allocated()
    assert profiled["memory"]["cuda:0"]["reserved"] == torch.cuda.max_memory_reserved()

    operators = {row["name"]: row for row in profiled["operators"]}
    assert operators["aten::mm"]["calls"] == STEPS
    assert operators["aten::mm"]["self_cuda_us"] > 0
    assert operators["cudaLaunchKernel"]["kind"] == "runtime"
    sums = profiled["sums"]
    assert sums["launches"] == sums["kernels"] >= 2 * STEPS
    assert sums["memcpy_us"] > 0 and sums["synchronize_cpu_us"] > 0
    in_operators = sum(row["self_cuda_us"] for row in profiled["operators"])
    on_device = sums["kernel_us"] + sums["memcpy_us"] + sums["memset_us"]
    assert in_operators == pytest.approx(on_device, rel=0.02), "operators cover all device time"

    profile = from_json(RankProfile, profiled)
    assert profile.copies
    assert "mm" in profile.operators[0].name or "copy_" in profile.operators[0].name


def test_kernels_match_the_trace(tmp_path: Path) -> None:
    import torch
    from torch import nn

    from stepscope.workloads.frameworks.torch.profile import profile_steps

    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(64, 3, 32, 32, device="cuda")).square().mean().backward()
        optimizer.step()

    step()
    profiled = profile_steps(step, STEPS, tmp_path / "trace0.json.gz", "cuda:0")
    events = json.loads(gzip.decompress((tmp_path / "trace0.json.gz").read_bytes()))["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert profiled["sums"]["kernels"] == len(kernels) > 10 * STEPS
    assert profiled["sums"]["kernel_us"] == pytest.approx(sum(e["dur"] for e in kernels), rel=0.01)
    names = {row["name"]: row["calls"] for row in profiled["kernels"]}
    assert names == Counter(event["name"] for event in kernels)
    operators = {row["name"]: row for row in profiled["operators"]}
    assert operators["aten::convolution_backward"]["self_cuda_us"] > 0
    assert operators["aten::convolution_backward"]["calls"] == STEPS
