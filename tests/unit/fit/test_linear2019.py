"""The linear2019 baseline on a simulated GPU, compared with values worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from simulated_gpu import GiB, MiB, Net, SimulatedGpu
from stepscope.errors import WorkloadError
from stepscope.fit.linear2019 import fit_2019
from stepscope.fit.probes.contract import ProbeOutcome
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.result import FitResult, MemoryBudget
from stepscope.report.fit.messages import linear_note, summary
from stepscope.workloads.probing import Layer, ProbeRequest, ProbeResult
from stepscope.workloads.spec import make_workload

LAYERS = (Layer("a", "Linear", 100 * MiB, 4 * MiB), Layer("b", "ReLU", 0, 2 * MiB))


@dataclass
class LinearGpu(SimulatedGpu):
    """Reserves 2 GiB plus 100 MiB per sample, and half of it in the first, ignored iterations."""

    net: Net = field(default_factory=Net)
    total: int = 1 << 50

    def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
        self.requests += requests
        return [ProbeOutcome(request, (self._reserve(request),)) for request in requests]

    def _reserve(self, request: ProbeRequest) -> ProbeResult:
        held = 2 * GiB + 100 * MiB * request.batches[0]
        if held > min(self.total, request.cap or self.total):
            return ProbeResult(
                request.batches[0], "gpu_oom", "step 1", message="CUDA out of memory"
            )
        reserved = (held // 2,) * 5 + (held - MiB, held + MiB, held) * 5
        layers = LAYERS if request.layers else ()
        return ProbeResult(request.batches[0], "ok", reserved_bytes=reserved, layers=layers)


def fitted(
    gpu: SimulatedGpu, limit: int = 15 * GiB, requested: int | None = None, ranks: int = 1
) -> FitResult:
    budget = MemoryBudget("gpu", limit, 80 * GiB, 80 * GiB, requested)
    workload = make_workload("resnet50", {"ranks": ranks})
    return fit_2019(gpu, budget, FitRequest(workload, method="linear2019"), FitListener())


def test_the_line_uses_the_mean_of_the_last_15_iterations() -> None:
    gpu = LinearGpu()
    fit = fitted(gpu)
    linear = fit.linear2019
    assert linear and (linear.small_batch, linear.large_batch) == (10, 50)
    assert linear.small_batch_bytes == 2 * GiB + 1000 * MiB
    assert linear.large_batch_bytes == 2 * GiB + 5000 * MiB
    assert (linear.per_sample_bytes, linear.fixed_bytes) == (100 * MiB, 2 * GiB)
    assert linear_note(linear) == "" and fit.method == "linear2019" and fit.verdict == "fits"
    assert [request.batches for request in gpu.requests] == [(10,), (50,)]
    assert all(
        request.steps == 20 and not request.cycle and request.cap is None
        for request in gpu.requests
    )


def test_reserves_are_subtracted_from_the_limit() -> None:
    """Samples of 100 MiB: 133 fit in 13 GiB, 122 in 12 GiB, 117 in 11.5 GiB."""
    fit = fitted(LinearGpu())
    assert fit.linear2019 and fit.max_batch
    assert fit.linear2019.max_batch_by_reserve == ((0, 133), (GiB, 122), (3 * GiB // 2, 117))
    assert (fit.max_batch.size, fit.max_batch.passes, fit.recommended_batch) == (133, 0, None)
    assert summary(fit).startswith(
        "The linear2019 method estimates a max batch size of 133 in 15 GiB without a reserve: 2 "
        "GiB + "
        "100 MiB per sample."
    )


def test_equation_4_1_uses_the_layers() -> None:
    """15 GiB − 100 MiB of weights, divided by 1 MiB of input, 2·(4 + 2) MiB and the last output."""
    gpu = LinearGpu()
    gpu.subject = replace(gpu.subject, sample_bytes=MiB)
    fit = fitted(gpu, ranks=2)
    assert fit.linear2019 and fit.linear2019.layers == LAYERS and fit.linear2019.gpus == 2
    assert fit.linear2019.max_batch_by_layers == (15 * 1024 - 100) // (1 + 2 + 12)


def test_a_requested_limit_caps_the_probes() -> None:
    gpu = LinearGpu()
    fitted(gpu, 15 * GiB, requested=15 * GiB)
    assert {request.cap for request in gpu.requests} == {15 * GiB}


def test_smaller_batches_are_used_if_50_do_not_fit() -> None:
    """50 need 6.9 GiB, 25 need 4.4."""
    fit = fitted(LinearGpu(), 5 * GiB, requested=5 * GiB)
    assert fit.linear2019 and (fit.linear2019.small_batch, fit.linear2019.large_batch) == (5, 25)
    assert (
        linear_note(fit.linear2019) == "batch sizes 5 and 25 replaced 10 and 50, which did not fit"
    )
    assert (fit.linear2019.per_sample_bytes, fit.linear2019.fixed_bytes) == (100 * MiB, 2 * GiB)
    assert fit.linear2019.max_batch_by_reserve[0] == (0, 30)
    assert (fit.cost.probes, fit.cost.ooms) == (4, 1)


def test_nothing_fits() -> None:
    fit = fitted(LinearGpu(), GiB, requested=GiB)
    assert fit.verdict == "does_not_fit" and fit.batch_size is None and fit.cost.ooms


def test_an_error_raises_immediately() -> None:
    gpu = SimulatedGpu(Net(), error_at=20)
    with pytest.raises(WorkloadError, match="Batch size 50 fails: shapes do not match"):
        fitted(gpu)
    assert len(gpu.requests) == 2


def test_without_growth_there_is_no_answer() -> None:
    fit = fitted(SimulatedGpu(Net((8 * MiB,), (0,), (0,), inputs=0)))
    assert fit.linear2019 and linear_note(fit.linear2019).startswith("memory did not grow")
    assert fit.verdict == "unknown" and fit.max_batch is None


def test_the_line_is_that_of_the_reserved_memory() -> None:
    gpu = SimulatedGpu(Net())
    fit = fitted(gpu)
    held = [gpu.run([ProbeRequest((batch,))])[0].last.reserved_peak_bytes for batch in (10, 50)]
    assert fit.linear2019 and fit.max_batch
    slope = (held[1] - held[0]) / 40
    assert fit.linear2019.per_sample_bytes == slope and fit.linear2019.max_batch_by_layers is None
    assert fit.max_batch.size == int((15 * GiB - held[0] + 10 * slope) // slope)
