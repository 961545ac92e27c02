"""Results of the GPU search, as records and as texts of the report."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from simulated_gpu import GiB, MiB, Net, SimulatedGpu
from stepscope.fit import memory_budget
from stepscope.fit.gpu_search import search_gpu
from stepscope.fit.memory_budget import loader_memory
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.result import FitResult, MemoryBudget, OtherProcess
from stepscope.fit.search import build_result
from stepscope.records.codec import dumps, loads
from stepscope.report.fit.messages import change_text, notes, reason_text, recommendation, summary
from stepscope.workloads.probing import ProbeRequest, Subject
from stepscope.workloads.spec import make_workload

RETRYING = Net((8 * MiB, 40 * MiB), (3 * MiB, 5 * MiB), (9 * MiB, 6 * MiB))
"""Its max batch needs allocator retries."""


def fitted(
    gpu: SimulatedGpu,
    limit: int = 4 * GiB,
    options: dict[str, Any] | None = None,
    budget: dict[str, Any] | None = None,
    **settings: Any,
) -> FitResult:
    request = FitRequest(make_workload("resnet50", settings), **(options or {}))
    whole = MemoryBudget("gpu", limit, 80 * GiB, 80 * GiB, limit)
    found = search_gpu(gpu, replace(whole, **(budget or {})), request, FitListener())
    return build_result(found, request, loader_memory(request.workload, 600_000, None))


@pytest.fixture(scope="module")
def retrying() -> FitResult:
    return fitted(SimulatedGpu(RETRYING))


@pytest.fixture(scope="module")
def retry_free() -> FitResult:
    return fitted(SimulatedGpu(Net()))


# Evidence


def test_free_memory_and_shortfall_follow_from_the_probes(
    retry_free: FitResult,
) -> None:
    gpu = SimulatedGpu(Net())
    assert retry_free.max_batch and retry_free.max_batch.failure_above
    largest, above = retry_free.max_batch, retry_free.max_batch.failure_above
    held = gpu.run([ProbeRequest((largest.size,), 4 * GiB)])[0].last.reserved_peak_bytes
    failed = gpu.run([ProbeRequest((above.batch,), 4 * GiB)])[0].last
    assert largest.free_bytes == 4 * GiB - held and above.shortfall_bytes == failed.shortfall_bytes
    assert largest.passes >= 2 and not largest.retried


def test_the_summary_names_both_batches_with_evidence(retry_free: FitResult) -> None:
    recommended, max_batch = retry_free.recommended_batch, retry_free.max_batch
    assert recommended and max_batch and max_batch.failure_above
    assert recommended.size == max_batch.size == retry_free.batch_size
    match = re.fullmatch(
        r"The recommended and max batch size is (\d+) \(1,000 samples/s, no allocator retries\): "
        r"[\d.]+ MiB of 4 GiB of GPU memory remains free; "
        r"(\d+) needs at least [\d.]+ MiB more \(out of memory in step 1\)\.",
        summary(retry_free),
    )
    assert match and match.groups() == (str(recommended.size), str(max_batch.failure_above.batch))
    assert retry_free.verdict == "fits"


def test_the_summary_counts_the_retries_of_the_max_batch(retrying: FitResult) -> None:
    recommended, max_batch = retrying.recommended_batch, retrying.max_batch
    assert recommended and max_batch and recommended.size < max_batch.size
    assert max_batch.retried and max_batch.retries > 0
    assert not recommended.retried and recommended.retries == 0
    text = summary(retrying)
    assert f"The recommended batch size is {recommended.size} (1,000 samples/s, no alloc" in text
    assert f"The max batch size is {max_batch.size} (" in text
    assert f"{max_batch.retries:,} allocator retries): " in text


def test_the_curve_is_in_order_and_has_both_answers(retrying: FitResult) -> None:
    batches = [point.batch for point in retrying.curve]
    points = {point.batch: point for point in retrying.curve}
    assert retrying.recommended_batch and retrying.max_batch
    assert batches == sorted(set(batches))
    recommended = points[retrying.recommended_batch.size]
    largest = points[retrying.max_batch.size]
    assert recommended.passed and largest.passed and recommended.samples_per_second == 1000
    assert (recommended.retried, largest.retried) == (False, True)
    assert any(not point.passed for point in retrying.curve)


def test_a_failure_for_another_reason_is_reported() -> None:
    fit = fitted(SimulatedGpu(Net(), error_at=100))
    assert summary(fit).endswith("; 100 failed in step 1: shapes do not match.")
    assert "Batch size 100 fails for a reason other than memory: shapes do not match" in notes(fit)
    assert (
        fit.max_batch
        and fit.max_batch.failure_above
        and not fit.max_batch.failure_above.shortfall_bytes
    )


def test_failures_below_the_max_are_in_the_result() -> None:
    request = FitRequest(make_workload("resnet50", {}))
    budget = MemoryBudget("gpu", 4 * GiB, 80 * GiB, 80 * GiB, 4 * GiB)
    found = search_gpu(SimulatedGpu(Net()), budget, request, FitListener())
    assert found.max_batch
    found.search.passed[found.max_batch - 2] = False
    fit = build_result(found, request, None)
    assert fit.failures_below_max == ((found.max_batch - 2, found.max_batch),)


# Results without two measured batches


def test_an_estimate_is_labeled() -> None:
    fit = fitted(SimulatedGpu(Net()), options={"estimate": True})
    assert fit.max_batch and fit.max_batch.passes == 0 and fit.max_batch.free_bytes == 0
    assert summary(fit).startswith("In 4 GiB of GPU memory, the predicted max batch size is ")
    assert summary(fit).endswith("Neither was run.")
    assert "Estimated from smaller batches; nothing was run near the limit" in notes(fit)


def test_a_model_that_does_not_fit_reports_shortfall_and_parts() -> None:
    fit = fitted(SimulatedGpu(Net()), 300 * MiB)
    assert fit.verdict == "does_not_fit" and fit.batch_size is None
    assert re.match(
        r"Not even a batch of 1 fits in 300 MiB of GPU memory\. At least [\d.]+ MiB more is "
        r"needed\. Weights, gradients and optimizer state take 324 MiB, the activations of one "
        r"sample 11 MiB\.$",
        summary(fit),
    )


def test_a_model_that_does_not_fit_the_whole_gpu_reports_where_it_fails() -> None:
    gpu = SimulatedGpu(Net(), 300 * MiB)
    free = 800 * MiB
    fit = fitted(
        gpu, free, budget={"total_bytes": free, "free_bytes": free, "requested_bytes": None}
    )
    assert "more is needed. Batch size 1 ran out of GPU memory in step 1." in summary(fit)


def test_a_leak_is_reported_with_its_size_and_duration() -> None:
    fit = fitted(SimulatedGpu(Net(leaks=5 * MiB)))
    assert fit.verdict == "unknown"
    assert summary(fit).startswith("Memory leak: 5 MiB more stays allocated after every step.")
    assert re.search(r"would run out of memory after about [\d,]+ steps", summary(fit))


def test_memory_that_does_not_grow_sets_no_limit() -> None:
    fit = fitted(SimulatedGpu(Net((8 * MiB,), (0,), (0,), inputs=0)))
    assert fit.verdict == "no_limit" and "memory hardly grows" in summary(fit)


def test_a_small_data_set_is_noted() -> None:
    fit = fitted(SimulatedGpu(Net(), samples=40))
    assert fit.verdict == "fits" and fit.max_batch and fit.max_batch.size == 40
    assert "The dataset limits the batch to 40 samples" in notes(fit)
    assert fit.max_batch.failure_above is None and summary(fit).endswith(
        "of 4 GiB of GPU memory remains free."
    )


@pytest.mark.parametrize("samples", [1, 3])
def test_a_tiny_data_set_does_not_mean_no_limit(samples: int) -> None:
    fit = fitted(SimulatedGpu(Net(), samples=samples))
    assert fit.verdict == "fits" and fit.batch_size == samples


def test_other_processes_and_notes_of_the_workload_are_kept() -> None:
    gpu = SimulatedGpu(Net())
    gpu.subject = replace(gpu.subject, notes=("--optimizer is ignored",), variable_size=True)
    others = (OtherProcess(3, "python", 3 * GiB), OtherProcess(4, "Xorg"))
    fit = fitted(gpu, budget={"other_processes": others})
    assert notes(fit)[0] == "--optimizer is ignored" and fit.budget.other_processes == others
    assert any(note.startswith("Samples differ in size") for note in notes(fit))


# Memory breakdown


def test_the_breakdown_adds_up_to_the_reserved_memory(
    retrying: FitResult, retry_free: FitResult
) -> None:
    for fit in (retrying, retry_free):
        breakdown = fit.memory_breakdown
        assert breakdown and fit.recommended_batch
        assert breakdown.batch == fit.recommended_batch.size
        parts = breakdown.parts
        state = parts.weights_bytes + parts.gradients_bytes + parts.optimizer_bytes
        inside = state + parts.inputs_bytes + parts.activations_bytes
        assert (
            inside + breakdown.workspace_bytes + breakdown.fragmentation_bytes
            == 4 * GiB - fit.recommended_batch.free_bytes
        )
        assert parts.context_bytes == 500 * MiB
        assert breakdown.workspace_bytes > 0 and breakdown.per_sample_bytes > 0


@pytest.mark.parametrize(
    ("net", "dominant", "begin"),
    [
        (Net(), "activations", "Activations take"),
        (Net((900 * MiB,), (MiB,), (0,)), "state", "Weights, gradients and optimizer state take"),
        (Net((8 * MiB,), (MiB,), (9 * MiB,)), "workspace", "Kernel workspace takes"),
    ],
)
def test_the_recommendation_is_about_the_largest_part(net: Net, dominant: str, begin: str) -> None:
    fit = fitted(SimulatedGpu(net))
    assert fit.memory_breakdown and fit.memory_breakdown.dominant == dominant
    text = recommendation(fit.memory_breakdown, fit.budget)
    assert text.startswith(begin)
    share = re.search(r"(\d+)%", text)
    assert share and 30 <= int(share[1]) <= 100


# What-if estimates


def test_estimates_have_reasons_and_the_right_direction() -> None:
    gpu = SimulatedGpu(Net())
    gpu.subject = replace(gpu.subject, layers=16)
    fit = fitted(gpu, momentum=0.9, optimizer="sgd", precision="fp32")
    estimates = {change_text(each): each for each in fit.what_ifs}
    assert fit.max_batch and all(reason_text(each, fit) for each in fit.what_ifs)
    assert list(estimates) == [
        "--precision bf16",
        "gradient checkpointing",
        "--optimizer sgd --momentum 0",
        "--optimizer adamw",
    ]
    size = fit.max_batch.size
    assert estimates["--precision bf16"].max_batch > 1.3 * size
    assert estimates["gradient checkpointing"].max_batch > size
    assert (
        estimates["--optimizer adamw"].max_batch
        < size
        < estimates["--optimizer sgd --momentum 0"].max_batch
    )
    assert "2/√16" in reason_text(estimates["gradient checkpointing"], fit)


def test_no_estimates_for_present_settings_or_a_custom_optimizer() -> None:
    gpu = SimulatedGpu(Net())
    gpu.subject = replace(gpu.subject, custom_optimizer=True)
    assert fitted(gpu, precision="bf16").what_ifs == ()
    adam = fitted(SimulatedGpu(Net()), optimizer="adam", precision="bf16").what_ifs
    assert [change_text(each) for each in adam] == [
        "--optimizer sgd --momentum 0",
        "--optimizer sgd",
    ]


# Other GPU memory sizes


def test_predictions_match_the_answer_and_grow_with_memory() -> None:
    sizes = tuple(size * GiB for size in (2, 4, 6, 24))
    for net in (Net(), RETRYING):
        fit = fitted(SimulatedGpu(net), options={"predict_for": sizes})
        assert fit.max_batch and fit.recommended_batch
        assert [each.memory_bytes for each in fit.predictions] == list(sizes)
        assert [each.limit_bytes for each in fit.predictions] == list(sizes)
        same = fit.predictions[1]
        assert (
            abs(same.max_batch - fit.max_batch.size) <= 1
            and abs(same.recommended_batch - fit.recommended_batch.size) <= 1
        )
        found = [(each.max_batch, each.recommended_batch) for each in fit.predictions]
        assert found == sorted(found) and all(fast <= most for most, fast in found)


def test_headroom_is_subtracted_from_every_size() -> None:
    options = {"predict_for": (8 * GiB,)}
    fit = fitted(SimulatedGpu(Net()), options=options, budget={"headroom_bytes": GiB})
    assert [each.limit_bytes for each in fit.predictions] == [7 * GiB]


def test_nothing_fits_a_size_below_the_model() -> None:
    fit = fitted(SimulatedGpu(Net()), options={"predict_for": (100 * MiB, 4 * GiB)})
    assert (fit.predictions[0].max_batch, fit.predictions[0].recommended_batch) == (0, 0)


# Host memory of the data loader


def test_max_batch_of_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "_shm_free", lambda: 64 * MiB)
    workload = make_workload("resnet50", {"workers": 2, "prefetch": 2, "pin": False})
    found = loader_memory(workload, MiB, 700 * MiB)
    assert (found.memory_free_bytes, found.batches_in_flight, found.sample_bytes) == (
        700 * MiB,
        7,
        MiB,
    )
    assert (found.max_batch, found.limited_by) == (12, "/dev/shm")
    assert (found.workers, found.prefetch, found.pinned) == (2, 2, False)
    assert found.sample_bytes == MiB
    alone = loader_memory(make_workload("resnet50", {"workers": 0, "pin": False}), MiB, 300 * MiB)
    assert (alone.max_batch, alone.limited_by) == (100, "host memory")


def test_loader_memory_is_never_more_than_available() -> None:
    found = loader_memory(make_workload("resnet50", {}), MiB, 1 << 60)
    assert 0 < found.memory_free_bytes < 1 << 60 and found.max_batch_2019
    assert found.max_batch * MiB <= found.memory_free_bytes


# JSON


def test_a_result_survives_json() -> None:
    gpu = SimulatedGpu(RETRYING)
    gpu.subject = Subject("cuda", "a GPU", 7, 600_000, None, versions={"torch": "2"}, notes=("a",))
    options = {"verify": True, "predict_for": (8 * GiB,)}
    fits = [
        fitted(gpu, options=options, budget={"other_processes": (OtherProcess(3, "python"),)}),
        fitted(SimulatedGpu(Net()), 300 * MiB),
        fitted(SimulatedGpu(Net(), error_at=50)),
    ]
    assert fits[0].verification and fits[0].predictions and fits[0].what_ifs and fits[0].loader
    for fit in fits:
        assert loads(FitResult, dumps(fit)) == fit
