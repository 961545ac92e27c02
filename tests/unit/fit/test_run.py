"""From a request to an answer: the headroom, the limit that can be had, answers of before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulated_gpu import GiB, Net, SimulatedGpu
from stepscope.fit import cache, run
from stepscope.fit.answer import ChosenGpu, Fit, MemoryBudget, OtherProcess
from stepscope.fit.gpu_search import search_gpu
from stepscope.fit.memory_budget import budget_for, host_memory_free
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.run import run_fit
from stepscope.fit.search import answer_of
from stepscope.report.fit.sentences import notes
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
def test_a_percentage_is_one_of_what_is_fitted_into(
    options: dict[str, Any], gpu: ChosenGpu | None, headroom: int
) -> None:
    limits = Limits(memory=options.pop("memory", None), gpu_memory=options.pop("gpu_memory", None))
    assert budget_for(FitRequest(CNN, limits, **options), gpu).headroom == headroom


def test_without_a_limit_it_is_one_of_what_the_host_has_free() -> None:
    found = budget_for(FitRequest(CNN, headroom_share=0.5), None).headroom
    assert found == pytest.approx(0.5 * 0.95 * host_memory_free(), rel=0.1)


def _found(budget: MemoryBudget) -> Fit:
    request = FitRequest(CNN, estimate=True)
    found = search_gpu(SimulatedGpu(Net()), budget, request, FitListener())
    return answer_of(found, request, None)


def test_an_answer_of_before_names_those_who_are_here_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No probe is started: there is no GPU to start one on."""
    monkeypatch.setenv("STEPSCOPE_STATE", str(tmp_path))
    monkeypatch.setattr(run, "choose_gpu", lambda names, environment, ranks: GPU)
    request = FitRequest(CNN, Limits(gpu_memory=4 * GiB))
    before = (OtherProcess(812, "python"),)
    budget = MemoryBudget("gpu", 4 * GiB, 80 * GiB, 80 * GiB, 4 * GiB, 0, before)
    known = replace(_found(budget), made="2026-01-01T12:00:00+00:00")
    cache.remember(cache.key_of(request, GPU), known)
    fit = run_fit(request)
    assert fit.cached == known.made and fit.max_batch == known.max_batch
    assert fit.budget == replace(known.budget, free=GPU.free, other_processes=OTHERS)


def test_a_limit_that_cannot_be_had_is_told() -> None:
    budget = MemoryBudget("gpu", 5 * GiB, 80 * GiB, 6 * GiB, 15 * GiB)
    fit = _found(MemoryBudget("gpu", 4 * GiB, 80 * GiB, 80 * GiB, 4 * GiB))

    def told(**other: Any) -> list[str]:
        texts = notes(replace(fit, budget=replace(budget, **other)))
        return [text for text in texts if "cannot be had" in text]

    (note,) = told()
    assert note.startswith("--gpu-memory 15 GiB cannot be had now: 5 GiB are free for PyTorch")
    assert "6 GiB are free" in told(headroom=GiB)[0]
    assert told(requested=None) == told(requested=5 * GiB) == []
    assert told(requested=6 * GiB, headroom=GiB) == []
