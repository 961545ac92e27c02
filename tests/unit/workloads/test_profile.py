"""The real profiler on steps of which it is known what they do."""

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


def test_operators_are_called_as_often_as_the_model_says(
    profiled: tuple[dict[str, Any], Path],
) -> None:
    calls = {row["name"]: row["calls"] for row in profiled[0]["operators"]}
    assert calls["aten::conv2d"] == 3
    assert calls["aten::convolution_backward"] == 3
    assert calls["aten::addmm"] == 3 * 2, "two linear layers, forward"
    assert calls["aten::mm"] == 3 * 4, "backward: of each the weights' gradient and the input's"


def test_times_add_up(profiled: tuple[dict[str, Any], Path]) -> None:
    told = profiled[0]
    assert all(row["kind"] == "operator" for row in told["operators"])
    for row in told["operators"]:
        assert 0 <= row["self_cpu_us"] <= row["cpu_us"]
        assert row["self_cuda_us"] is None and row["cuda_us"] is None
    in_operators = told["sums"]["operator_cpu_us"]
    assert in_operators == pytest.approx(sum(row["self_cpu_us"] for row in told["operators"]))
    assert 0 < in_operators < sum(told["step_us"]), "operators run within the steps"


def test_stretches_with_a_name_are_no_operators(profiled: tuple[dict[str, Any], Path]) -> None:
    names = {row["name"] for row in profiled[0]["operators"]}
    assert not [n for n in names if n.startswith(("ProfilerStep", "Optimizer.", "[memory]"))]


def test_without_a_gpu_nothing_is_said_of_one(profiled: tuple[dict[str, Any], Path]) -> None:
    told = profiled[0]
    assert told["device"] == "cpu"
    assert told["copies"] is None and told["kernels"] == [] and told["missing"] == ""
    assert set(told["sums"]) == {field.name for field in fields(ProfiledSums)}
    assert {name for name, total in told["sums"].items() if total is not None} == {
        "operator_cpu_us"
    }


def test_it_can_be_stored_and_read(profiled: tuple[dict[str, Any], Path]) -> None:
    profile = from_json(RankProfile, json.loads(json.dumps(profiled[0], allow_nan=False)))
    (row,) = (row for row in profile.operators if row.name == "aten::mm")
    assert (row.calls, profile.steps) == (12, 3)
    times = [row.self_cpu_us for row in profile.operators]
    assert times == sorted(times, reverse=True), "the longest first"


def test_the_trace_is_kept_for_a_viewer(profiled: tuple[dict[str, Any], Path]) -> None:
    told, trace = profiled
    text = gzip.decompress(trace.read_bytes())
    events = json.loads(text)["traceEvents"]
    assert told["trace"] == {
        "file": "trace0.json.gz",
        "bytes": trace.stat().st_size,
        "unzipped_bytes": len(text),
    }
    steps = [e["dur"] for e in events if e["name"].startswith("ProfilerStep#")]
    assert told["step_us"] == pytest.approx(steps, rel=0.01) and len(steps) == 3


@pytest.mark.parametrize("held", [1, 3])
def test_peak_memory_is_that_of_a_known_load(held: int, tmp_path: Path) -> None:
    def step() -> None:
        tensors = [torch.empty(8 * MIB, dtype=torch.uint8) for _ in range(held)]
        del tensors
        torch.empty(MIB, dtype=torch.uint8)

    told = profile_steps(step, 2, tmp_path / "trace.json.gz", "cpu")
    assert told["memory"] == {"cpu": {"allocated": held * 8 * MIB, "reserved": None}}


def test_one_step_more_is_taken_and_is_in_no_figure(tmp_path: Path) -> None:
    ones = torch.ones(2)

    def add(number: int) -> None:
        ones.add_(number)

    step = Counted(add)
    told = profile_steps(step, 4, tmp_path / "trace.json.gz", "cpu")
    assert step.count == 5
    assert told["steps"] == 4
    assert {r["name"]: r["calls"] for r in told["operators"]}["aten::add_"] == 4


def test_there_is_a_limit_to_the_steps(tmp_path: Path) -> None:
    step = Counted()
    told = profile_steps(step, 10**6, tmp_path / "trace.json.gz", "cpu")
    assert told["steps"] == torch_profile.MOST_STEPS == step.count - 1


@pytest.mark.parametrize("at", [1, 3])
def test_a_step_that_fails_is_not_the_profilers_failure(at: int, tmp_path: Path) -> None:
    def fail(number: int) -> None:
        if number == at:
            raise RuntimeError("of the step")

    with pytest.raises(RuntimeError, match="of the step"):
        profile_steps(Counted(fail), 4, tmp_path / "trace.json.gz", "cpu")
    assert not list(tmp_path.iterdir())
    told = profile_steps(Counted(), 2, tmp_path / "trace.json.gz", "cpu")
    assert "error" not in told, "the profiler can be used again"


def test_a_profiler_that_fails_is_told_and_every_step_is_taken(tmp_path: Path) -> None:
    """Other ranks wait for these steps. The profiler fails as another one is already at work."""
    other = torch.autograd.profiler.profile(use_kineto=False)

    def begin(number: int) -> None:
        if number == 1:
            other.__enter__()

    step = Counted(begin)
    try:
        told = profile_steps(step, 4, tmp_path / "trace.json.gz", "cpu")
    finally:
        other.__exit__(None, None, None)
    assert set(told) == {"error"}
    assert "already enabled" in told["error"] and "end other profilers" in told["error"]
    assert step.count == 5
    assert not list(tmp_path.iterdir())


def test_a_trace_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    step = Counted()
    told = profile_steps(step, 2, tmp_path / "nowhere" / "trace.json.gz", "cpu")
    assert "No such file or directory" in told["error"] and "space" in told["error"]
    assert step.count == 3


def test_a_trace_that_fills_the_disk_leaves_nothing(tmp_path: Path) -> None:
    """A file that may not grow stands for a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        told = profile_steps(training(), 3, tmp_path / "trace.json.gz", "cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert set(told) == {"error"}
    assert not list(tmp_path.iterdir())
