"""The real profiler on steps with known operations."""

from __future__ import annotations

import gzip
import json
import resource
import signal
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stepscope.records.codec import from_json
from stepscope.records.profile import ProfiledSums, RankProfile
from stepscope.workloads.frameworks.torch import profile as torch_profile
from stepscope.workloads.frameworks.torch.profile import profile_steps

MIB = 1 << 20


def training() -> Callable[[], None]:
    """A convolution and two linear layers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 16), nn.ReLU(), nn.Linear(16, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    images, labels = torch.randn(8, 3, 8, 8), torch.zeros(8, dtype=torch.long)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


class Counted:
    """A step that counts itself."""

    def __init__(self, step: Callable[[int], None] = lambda number: None) -> None:
        self.count = 0
        self._step = step

    def __call__(self) -> None:
        self.count += 1
        self._step(self.count)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    trace = tmp_path_factory.mktemp("trial") / "trace0.json.gz"
    return profile_steps(training(), 3, trace, "cpu"), trace


def test_call_counts_of_operators(
    profiled: tuple[dict[str, Any], Path],
) -> None:
    calls = {row["name"]: row["calls"] for row in profiled[0]["operators"]}
    assert calls["aten::conv2d"] == 3
    assert calls["aten::convolution_backward"] == 3
    assert calls["aten::addmm"] == 3 * 2, "two linear layers, forward"
    assert calls["aten::mm"] == 3 * 4, "backward: gradients of weights and inputs of both"


def test_times_add_up(profiled: tuple[dict[str, Any], Path]) -> None:
    result = profiled[0]
    assert all(row["kind"] == "operator" for row in result["operators"])
    for row in result["operators"]:
        assert 0 <= row["self_cpu_us"] <= row["cpu_us"]
        assert row["self_cuda_us"] is None and row["cuda_us"] is None
    in_operators = result["sums"]["operator_cpu_us"]
    assert in_operators == pytest.approx(sum(row["self_cpu_us"] for row in result["operators"]))
    assert 0 < in_operators < sum(result["step_us"]), "operators run within the steps"


def test_annotations_are_not_operators(profiled: tuple[dict[str, Any], Path]) -> None:
    names = {row["name"] for row in profiled[0]["operators"]}
    assert not [n for n in names if n.startswith(("ProfilerStep", "Optimizer.", "[memory]"))]


def test_gpu_figures_are_missing_without_a_gpu(profiled: tuple[dict[str, Any], Path]) -> None:
    result = profiled[0]
    assert result["device"] == "cpu"
    assert result["copies"] is None and result["kernels"] == [] and result["missing"] == ""
    assert set(result["sums"]) == {field.name for field in fields(ProfiledSums)}
    assert {name for name, total in result["sums"].items() if total is not None} == {
        "operator_cpu_us"
    }


def test_a_profile_can_be_stored_and_read(profiled: tuple[dict[str, Any], Path]) -> None:
    profile = from_json(RankProfile, json.loads(json.dumps(profiled[0], allow_nan=False)))
    (row,) = (row for row in profile.operators if row.name == "aten::mm")
    assert (row.calls, profile.steps) == (12, 3)
    times = [row.self_cpu_us for row in profile.operators]
    assert times == sorted(times, reverse=True), "the longest first"


def test_the_trace_is_saved(profiled: tuple[dict[str, Any], Path]) -> None:
    result, trace = profiled
    text = gzip.decompress(trace.read_bytes())
    events = json.loads(text)["traceEvents"]
    assert result["trace"] == {
        "file": "trace0.json.gz",
        "bytes": trace.stat().st_size,
        "unzipped_bytes": len(text),
    }
    steps = [e["dur"] for e in events if e["name"].startswith("ProfilerStep#")]
    assert result["step_us"] == pytest.approx(steps, rel=0.01) and len(steps) == 3


@pytest.mark.parametrize("held", [1, 3])
def test_peak_memory_of_a_known_load(held: int, tmp_path: Path) -> None:
    def step() -> None:
        tensors = [torch.empty(8 * MIB, dtype=torch.uint8) for _ in range(held)]
        del tensors
        torch.empty(MIB, dtype=torch.uint8)

    result = profile_steps(step, 2, tmp_path / "trace.json.gz", "cpu")
    assert result["memory"] == {"cpu": {"allocated": held * 8 * MIB, "reserved": None}}


def test_the_warm_up_step_is_not_included_in_the_figures(tmp_path: Path) -> None:
    ones = torch.ones(2)

    def add(number: int) -> None:
        ones.add_(number)

    step = Counted(add)
    result = profile_steps(step, 4, tmp_path / "trace.json.gz", "cpu")
    assert step.count == 5
    assert result["steps"] == 4
    assert {r["name"]: r["calls"] for r in result["operators"]}["aten::add_"] == 4


def test_the_number_of_steps_is_limited(tmp_path: Path) -> None:
    step = Counted()
    result = profile_steps(step, 10**6, tmp_path / "trace.json.gz", "cpu")
    assert result["steps"] == torch_profile.MAX_STEPS == step.count - 1


@pytest.mark.parametrize("at", [1, 3])
def test_the_exception_of_a_step_is_raised(at: int, tmp_path: Path) -> None:
    def fail(number: int) -> None:
        if number == at:
            raise RuntimeError("a step failed")

    with pytest.raises(RuntimeError, match="a step failed"):
        profile_steps(Counted(fail), 4, tmp_path / "trace.json.gz", "cpu")
    assert not list(tmp_path.iterdir())
    result = profile_steps(Counted(), 2, tmp_path / "trace.json.gz", "cpu")
    assert "error" not in result, "the profiler can be used again"


def test_every_step_is_taken_if_the_profiler_fails(tmp_path: Path) -> None:
    """Other ranks wait for these steps. The profiler fails because another one is running."""
    other = torch.autograd.profiler.profile(use_kineto=False)

    def begin(number: int) -> None:
        if number == 1:
            other.__enter__()

    step = Counted(begin)
    try:
        result = profile_steps(step, 4, tmp_path / "trace.json.gz", "cpu")
    finally:
        other.__exit__(None, None, None)
    assert set(result) == {"error"}
    assert "already enabled" in result["error"] and "Stop other profilers" in result["error"]
    assert step.count == 5
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    step = Counted()
    result = profile_steps(step, 2, tmp_path / "nowhere" / "trace.json.gz", "cpu")
    assert "No such file or directory" in result["error"] and "space" in result["error"]
    assert step.count == 3


def test_a_trace_that_does_not_fit_on_the_disk_is_removed(tmp_path: Path) -> None:
    """A file size limit simulates a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        result = profile_steps(training(), 3, tmp_path / "trace.json.gz", "cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert set(result) == {"error"}
    assert not list(tmp_path.iterdir())
