"""Running a fit: the headroom, the available limit, and cached results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulated_gpu import GiB, Net, SimulatedGpu
from stepscope.fit import cache, run
from stepscope.fit.gpu_search import search_gpu
from stepscope.fit.memory_budget import budget_for, host_memory_free
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.result import ChosenGpu, FitResult, MemoryBudget, OtherProcess
from stepscope.fit.run import run_fit
from stepscope.fit.search import build_result
from stepscope.report.fit.messages import notes
from stepscope.trials.limits.spec import Limits
from stepscope.workloads.spec import make_workload

OTHERS = (OtherProcess(3, "python"),)
GPU = ChosenGpu("GPU-1", "NVIDIA A100", 40 * GiB, 32 * GiB, OTHERS, "550.54")
CNN = make_workload("cnn", {})


@pytest.mark.parametrize(
    ("options", "gpu", "headroom"),
    [
        ({"headroom": GiB, "gpu_memory": 8 * GiB}, GPU, GiB),
        ({"headroom_share": 0.25}, GPU, 8 * GiB),
        ({"headroom_share": 0.25, "gpu_memory": 8 * GiB}, GPU, 2 * GiB),
        ({"headroom_share": 0.25, "memory": 4 * GiB}, GPU, 8 * GiB),
        ({"headroom_share": 0.25, "gpu_memory": 8 * GiB, "memory": 4 * GiB}, GPU, 2 * GiB),
        ({"headroom_share": 0.25, "gpu_memory": 36 * GiB}, GPU, 8 * GiB),
        ({"headroom_share": 0.25, "memory": 4 * GiB}, None, GiB),
        ({"headroom": GiB, "memory": 4 * GiB}, None, GiB),
    ],
)
def test_a_percentage_is_relative_to_the_limit(
    options: dict[str, Any], gpu: ChosenGpu | None, headroom: int
) -> None:
    limits = Limits(memory=options.pop("memory", None), gpu_memory=options.pop("gpu_memory", None))
    assert budget_for(FitRequest(CNN, limits, **options), gpu).headroom_bytes == headroom


def test_without_a_limit_a_percentage_is_relative_to_the_free_memory() -> None:
    found = budget_for(FitRequest(CNN, headroom_share=0.5), None).headroom_bytes
    assert found == pytest.approx(0.5 * 0.95 * host_memory_free(), rel=0.1)


def _found(budget: MemoryBudget) -> FitResult:
    request = FitRequest(CNN, estimate=True)
    found = search_gpu(SimulatedGpu(Net()), budget, request, FitListener())
    return build_result(found, request, None)


def test_a_cached_result_names_the_present_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No probe is started: there is no GPU."""
    monkeypatch.setenv("STEPSCOPE_STATE", str(tmp_path))
    monkeypatch.setattr(run, "choose_gpu", lambda names, environment, ranks: GPU)
    request = FitRequest(CNN, Limits(gpu_memory=4 * GiB))
    before = (OtherProcess(812, "python"),)
    budget = MemoryBudget("gpu", 4 * GiB, 80 * GiB, 80 * GiB, 4 * GiB, 0, before)
    cached = replace(_found(budget), created="2026-01-01T12:00:00+00:00")
    cache.store(cache.key_of(request, GPU), cached)
    fit = run_fit(request)
    assert fit.from_cache and fit.created == cached.created and fit.max_batch == cached.max_batch
    assert fit.budget == replace(cached.budget, free_bytes=GPU.free_bytes, other_processes=OTHERS)


def test_an_unavailable_limit_is_noted() -> None:
    budget = MemoryBudget("gpu", 5 * GiB, 80 * GiB, 6 * GiB, 15 * GiB)
    fit = _found(MemoryBudget("gpu", 4 * GiB, 80 * GiB, 80 * GiB, 4 * GiB))

    def limit_notes(**other: Any) -> list[str]:
        texts = notes(replace(fit, budget=replace(budget, **other)))
        return [text for text in texts if "is not available" in text]

    (note,) = limit_notes()
    assert note == (
        "`--gpu-memory 15 GiB` is not available: the fit used the 5 GiB that is free for PyTorch"
    )
    assert "the 6 GiB that is free" in limit_notes(headroom_bytes=GiB)[0]
    assert limit_notes(requested_bytes=None) == limit_notes(requested_bytes=5 * GiB) == []
    assert limit_notes(requested_bytes=6 * GiB, headroom_bytes=GiB) == []
