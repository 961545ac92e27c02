"""Tripathi's estimate on a GPU that is not there, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from simulated_gpu import GiB, MiB, Net, SimulatedGpu
from stepscope.errors import BadWorkload
from stepscope.fit.answer import Fit, MemoryBudget
from stepscope.fit.linear2019 import fit_2019
from stepscope.fit.probes.contract import ProbeOutcome
from stepscope.fit.request import FitListener, FitRequest
from stepscope.report.fit.sentences import linear_note, summary
from stepscope.workloads.probing import Layer, ProbeRequest, ProbeResult
from stepscope.workloads.spec import make_workload

LAYERS = (Layer("a", "Linear", 100 * MiB, 4 * MiB), Layer("b", "ReLU", 0, 2 * MiB))


@dataclass
class Holding(SimulatedGpu):
    """Holds 2 GiB and 100 MiB a sample; in the first iterations, which do not count, half of it."""

    net: Net = field(default_factory=Net)
    total: int = 1 << 50

    def run(self, requests: Sequence[ProbeRequest]) -> list[ProbeOutcome]:
        self.requests += requests
        return [ProbeOutcome(request, (self._held(request),)) for request in requests]

    def _held(self, ask: ProbeRequest) -> ProbeResult:
        held = 2 * GiB + 100 * MiB * ask.batches[0]
        if held > min(self.total, ask.cap or self.total):
            return ProbeResult(ask.batches[0], "gpu_oom", "step 1", message="CUDA out of memory")
        reserved = (held // 2,) * 5 + (held - MiB, held + MiB, held) * 5
        layers = LAYERS if ask.layers else ()
        return ProbeResult(ask.batches[0], "ok", reserved=reserved, layers=layers)


def fitted(
    gpu: SimulatedGpu, limit: int = 15 * GiB, asked: int | None = None, ranks: int = 1
) -> Fit:
    budget = MemoryBudget("gpu", limit, 80 * GiB, 80 * GiB, asked)
    workload = make_workload("resnet50", {"ranks": ranks})
    return fit_2019(gpu, budget, FitRequest(workload, method="linear2019"), FitListener())


def test_the_line_goes_through_the_means_of_the_last_fifteen() -> None:
    gpu = Holding()
    fit = fitted(gpu)
    linear = fit.linear
    assert linear and (linear.small, linear.large) == (10, 50)
    assert (linear.small_bytes, linear.large_bytes) == (2 * GiB + 1000 * MiB, 2 * GiB + 5000 * MiB)
    assert (linear.per_sample, linear.fixed) == (100 * MiB, 2 * GiB)
    assert linear_note(linear) == "" and fit.method == "linear2019" and fit.verdict == "fits"
    assert [ask.batches for ask in gpu.requests] == [(10,), (50,)]
    assert all(ask.steps == 20 and not ask.cycle and ask.cap is None for ask in gpu.requests)


def test_reserves_take_from_the_limit() -> None:
    """13 GiB for samples of 100 MiB are 133; 12 GiB are 122; 11.5 GiB are 117."""
    fit = fitted(Holding())
    assert fit.linear and fit.max_batch
    assert fit.linear.by_reserve == ((0, 133), (GiB, 122), (3 * GiB // 2, 117))
    assert (fit.max_batch.size, fit.max_batch.passed, fit.recommended_batch) == (133, 0, None)
    assert summary(fit).startswith(
        "The 2019 method estimates 133 with no reserve in 15 GiB: 100 MiB a sample and 2 GiB"
    )


def test_layers_are_counted_by_equation_4_1() -> None:
    """15 GiB − 100 MiB of weights, by a sample of 1 MiB, outputs of 2·(4 + 2) MiB and the last."""
    gpu = Holding()
    gpu.subject = replace(gpu.subject, sample_bytes=MiB)
    fit = fitted(gpu, ranks=2)
    assert fit.linear and fit.linear.layers == LAYERS and fit.linear.gpus == 2
    assert fit.linear.by_layers == (15 * 1024 - 100) // (1 + 2 + 12)


def test_a_limit_that_was_asked_for_is_the_cap_of_the_probes() -> None:
    gpu = Holding()
    fitted(gpu, 15 * GiB, asked=15 * GiB)
    assert {ask.cap for ask in gpu.requests} == {15 * GiB}


def test_smaller_batches_are_taken_where_fifty_do_not_fit() -> None:
    """50 need 6.9 GiB, 25 need 4.4."""
    fit = fitted(Holding(), 5 * GiB, asked=5 * GiB)
    assert fit.linear and (fit.linear.small, fit.linear.large) == (5, 25)
    assert (
        linear_note(fit.linear) == "batches 5 and 25 in the place of 10 and 50, which did not fit"
    )
    assert (fit.linear.per_sample, fit.linear.fixed) == (100 * MiB, 2 * GiB)
    assert fit.linear.by_reserve[0] == (0, 30)
    assert (fit.effort.probes, fit.effort.ooms) == (4, 1)


def test_where_nothing_fits_it_is_said() -> None:
    fit = fitted(Holding(), GiB, asked=GiB)
    assert fit.verdict == "does not fit" and fit.batch_size is None and fit.effort.ooms


def test_an_error_is_told_at_once() -> None:
    gpu = SimulatedGpu(Net(), error_at=20)
    with pytest.raises(BadWorkload, match="A batch of 50 failed: shapes do not match"):
        fitted(gpu)
    assert len(gpu.requests) == 2


def test_without_growth_there_is_no_line() -> None:
    fit = fitted(SimulatedGpu(Net((8 * MiB,), (0,), (0,), inputs=0)))
    assert fit.linear and linear_note(fit.linear).startswith("memory did not grow")
    assert fit.verdict == "cannot tell" and fit.max_batch is None


def test_on_an_allocator_the_line_is_that_of_what_it_holds() -> None:
    gpu = SimulatedGpu(Net())
    fit = fitted(gpu)
    held = [gpu.run([ProbeRequest((batch,))])[0].last.reserved_peak for batch in (10, 50)]
    assert fit.linear and fit.max_batch
    slope = (held[1] - held[0]) / 40
    assert fit.linear.per_sample == slope and fit.linear.by_layers is None
    assert fit.max_batch.size == int((15 * GiB - held[0] + 10 * slope) // slope)
