"""Monitored CUDA training: exact steps and allocator statistics, without side effects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import Finished

pytestmark = pytest.mark.gpu

TRAIN = Path(__file__).parents[2] / "examples" / "plain_loop" / "train.py"

HOLD = """
import time, torch
held = torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(15):
    model(torch.ones(4, 8, device="cuda")).sum().backward()
    optimizer.step()
    time.sleep(0.1)
print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""

TOO_MUCH = """
import torch
torch.cuda.set_per_process_memory_fraction(0.02)
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
torch.empty(8 << 30, dtype=torch.uint8, device="cuda")
"""


def test_cuda_loop_is_recorded(watch: Callable[..., Finished]) -> None:
    done = watch(
        sys.executable,
        str(TRAIN),
        "--fraction",
        "0.5",
        "--epochs",
        "3",
        "--workers",
        "4",
        "--batch-size",
        "256",
    )

    assert done.code == 0, done.err
    assert "tracking epochs and steps (PyTorch DataLoader and optimizer)" in done.err
    summary = done.run.summary()
    assert [row.steps for row in summary.epochs] == [118] * 3
    assert [row.samples for row in summary.epochs] == [30_000] * 3
    assert {"main", "worker"} <= set(summary.roles)
    assert done.run.json["environment"]["gpus"], "the GPU is in the record of the environment"
    for row in summary.epochs:
        assert row.joules and row.samples_per_joule and row.pcie_to_gpu_bytes
        assert row.gpu_sm is not None and 0 < row.gpu_sm < 1


def test_allocator_statistics_are_exact(
    watch: Callable[..., Finished], python_file: Callable[[str], str]
) -> None:
    done = watch(sys.executable, python_file(HOLD))

    assert done.code == 0, done.err
    allocated, reserved = map(int, done.out.split()[-2:])
    series = done.run.data.series
    ((gpu, peak),) = [(e, s) for (m, e), s in series.items() if m == "gpu_allocated_peak"]
    assert peak.value.max() == allocated
    assert series["gpu_reserved_peak", gpu].value.max() == reserved
    assert len(series["gpu_allocated", gpu]) >= 8
    assert series["gpu_memory_run", gpu].value.max() > 3 * 2**30
    assert gpu in {facts["uuid"] for facts in done.run.json["environment"]["gpus"]}


def test_gpu_oom_is_reported(
    watch: Callable[..., Finished], python_file: Callable[[str], str]
) -> None:
    done = watch(sys.executable, python_file(TOO_MUCH))

    assert done.code == 1
    assert done.run.exit_status.outcome.value == "gpu_oom"
    assert "Tried to allocate 8.00 GiB" in done.run.exit_status.evidence["message"]
    (ooms,) = [s for (m, _), s in done.run.data.series.items() if m == "gpu_alloc_ooms"]
    assert ooms.value.max() == 1


def test_script_without_cuda_gets_no_context(
    watch: Callable[..., Finished], python_file: Callable[[str], str]
) -> None:
    script = python_file(
        "import torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(50):\n"
        "    model(torch.ones(4, 8)).sum().backward(); optimizer.step()\n"
        "print(torch.cuda.is_initialized())\n"
    )
    done = watch(sys.executable, script)

    assert done.out.strip() == "False"
