"""The profiler on a GPU: copies, memory and kernels of steps of which it is known what they do."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.analysis.profile import profile_of

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
    told = profile_steps(step, STEPS, tmp_path / "trace0.json.gz", "cuda:0", 10)

    assert told.get("error") is None and told["missing"] == ""
    copies = told["copies"]
    assert copies["to_device"]["bytes"] == STEPS * 6 * MIB
    assert copies["to_device"]["pageable_bytes"] == STEPS * 2 * MIB
    assert copies["within_device"]["bytes"] == STEPS * 16 * MIB
    assert copies["from_device"]["bytes"] == STEPS * 4
    assert told["memory"]["cuda:0"]["allocated"] == torch.cuda.max_memory_allocated()
    assert told["memory"]["cuda:0"]["reserved"] == torch.cuda.max_memory_reserved()

    operators = {row["name"]: row for row in told["operators"]}
    assert operators["aten::mm"]["calls"] == STEPS
    assert operators["aten::mm"]["self_cuda_us"] > 0
    assert operators["cudaLaunchKernel"]["kind"] == "runtime"
    sums = told["sums"]
    assert sums["launches"] == sums["kernels"] >= 2 * STEPS
    assert sums["memcpy_us"] > 0 and sums["synchronize_cpu_us"] > 0
    in_operators = sum(row["self_cuda_us"] for row in told["operators"])
    on_device = sums["kernel_us"] + sums["memcpy_us"] + sums["memset_us"]
    assert in_operators == pytest.approx(on_device, rel=0.02), "what operators started is all"

    profile = profile_of({0: told})
    assert profile.has_device and profile.per_epoch_is == "scaled"
    assert "mm" in profile.operators[0].name or "copy_" in profile.operators[0].name


def test_times_on_the_device_are_those_of_pytorchs_own_table(tmp_path: Path) -> None:
    import torch
    from torch import nn

    from stepscope.workloads.frameworks.torch.profile import read_trace

    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(64, 3, 32, 32, device="cuda")).square().mean().backward()
        optimizer.step()

    step()
    with torch.profiler.profile() as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    table = {
        row.key: row
        for row in profiler.key_averages()
        if row.self_device_time_total and row.cpu_time_total
    }
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    ours = {row.name: row for row in read_trace(tmp_path / "trace.json").operators}
    compared = [name for name in table if name in ours]
    assert {"aten::mm", "aten::convolution_backward"} & set(compared) and len(compared) > 5
    for name in compared:
        assert ours[name].calls == table[name].count, name
        expected = table[name].self_device_time_total
        assert ours[name].self_cuda_us == pytest.approx(expected, rel=0.01, abs=1), name
