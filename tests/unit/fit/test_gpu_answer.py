"""What was found on a GPU, as records and in the words of its report."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from simulated_gpu import GiB, MiB, Net, SimulatedGpu
from stepscope.fit import memory_budget
from stepscope.fit.answer import Fit, MemoryBudget, OtherProcess
from stepscope.fit.gpu_search import search_gpu
from stepscope.fit.memory_budget import loader_memory
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.search import answer_of
from stepscope.records.codec import dumps, loads
from stepscope.report.fit.sentences import advice, change_text, notes, reason_text, summary
from stepscope.workloads.probing import ProbeRequest, Subject
from stepscope.workloads.spec import make_workload

THRASHING = Net((8 * MiB, 40 * MiB), (3 * MiB, 5 * MiB), (9 * MiB, 6 * MiB))
"""Its largest batch does not run smoothly."""


def fitted(
    gpu: SimulatedGpu,
    limit: int = 4 * GiB,
    options: dict[str, Any] | None = None,
    budget: dict[str, Any] | None = None,
    **settings: Any,
) -> Fit:
    request = FitRequest(make_workload("resnet50", settings), **(options or {}))
    whole = MemoryBudget("gpu", limit, 80 * GiB, 80 * GiB, limit)
    found = search_gpu(gpu, replace(whole, **(budget or {})), request, FitListener())
    return answer_of(found, request, loader_memory(request.workload, 600_000, None))


@pytest.fixture(scope="module")
def thrashing() -> Fit:
    return fitted(SimulatedGpu(THRASHING))


@pytest.fixture(scope="module")
def smooth() -> Fit:
    return fitted(SimulatedGpu(Net()))


# Certificates


def test_the_largest_batch_leaves_what_it_does_not_hold_and_the_next_misses_what_failed(
    smooth: Fit,
) -> None:
    gpu = SimulatedGpu(Net())
    assert smooth.max_batch and smooth.max_batch.failure_above
    largest, above = smooth.max_batch, smooth.max_batch.failure_above
    held = gpu.run([ProbeRequest((largest.size,), 4 * GiB)])[0].last.reserved_peak
    failed = gpu.run([ProbeRequest((above.batch,), 4 * GiB)])[0].last
    assert largest.free_bytes == 4 * GiB - held and above.missing == failed.missing
    assert largest.passed >= 2 and not largest.retried


def test_the_certificate_is_said_with_units(smooth: Fit) -> None:
    assert smooth.recommended_batch and smooth.max_batch
    assert (
        smooth.recommended_batch.size == smooth.max_batch.size
        and smooth.batch_size == smooth.recommended_batch.size
    )
    said = re.fullmatch(
        r"Use a batch of (\d+): it trains at 1,000 samples/s without an allocator retry\. "
        r"\1 is the largest: it fits and leaves [\d.]+ MiB of 4 GiB of GPU memory; "
        r"(\d+) would need at least [\d.]+ MiB more\.",
        summary(smooth),
    )
    assert said and said.groups() == (
        str(smooth.recommended_batch.size),
        str(smooth.max_batch.failure_above.batch),
    )
    assert smooth.verdict == "fits"


def test_a_largest_batch_that_retries_is_said_to_thrash(thrashing: Fit) -> None:
    assert thrashing.recommended_batch and thrashing.max_batch
    assert thrashing.recommended_batch.size < thrashing.max_batch.size
    assert f"{thrashing.max_batch.size} is the largest: it fits, but thrashes, and" in summary(
        thrashing
    )
    assert thrashing.max_batch.retried and thrashing.max_batch.retries > 0
    assert not thrashing.recommended_batch.retried and thrashing.recommended_batch.retries == 0


def test_the_curve_is_in_order_and_has_both_answers(thrashing: Fit) -> None:
    batches = [point.batch for point in thrashing.curve]
    points = {point.batch: point for point in thrashing.curve}
    assert thrashing.recommended_batch and thrashing.max_batch
    assert batches == sorted(set(batches))
    fast, largest = points[thrashing.recommended_batch.size], points[thrashing.max_batch.size]
    assert fast.passed and largest.passed and fast.samples_per_second == 1000
    assert (fast.retried, largest.retried) == (False, True)
    assert any(not point.passed for point in thrashing.curve)


def test_why_the_next_fails_is_said_where_it_is_not_memory() -> None:
    fit = fitted(SimulatedGpu(Net(), error_at=100))
    assert summary(fit).endswith("100 fails in step 1: shapes do not match.")
    assert "batch 100 fails for another reason than memory: shapes do not match" in notes(fit)
    assert fit.max_batch and fit.max_batch.failure_above and not fit.max_batch.failure_above.missing


def test_holes_are_in_the_answer() -> None:
    request = FitRequest(make_workload("resnet50", {}))
    room = MemoryBudget("gpu", 4 * GiB, 80 * GiB, 80 * GiB, 4 * GiB)
    found = search_gpu(SimulatedGpu(Net()), room, request, FitListener())
    assert found.max_batch
    found.search.passed[found.max_batch - 2] = False
    fit = answer_of(found, request, None)
    assert fit.holes == ((found.max_batch - 2, found.max_batch),)


# Answers without two batches


def test_an_estimate_is_said_to_be_one() -> None:
    fit = fitted(SimulatedGpu(Net()), options={"estimate": True})
    assert fit.max_batch and fit.max_batch.passed == 0 and fit.max_batch.free_bytes == 0
    assert "should be the largest within 4 GiB of GPU memory: foreseen, not tried" in summary(fit)
    assert "estimated from smaller batches: nothing near the limit was run" in notes(fit)


def test_too_large_says_what_misses_and_why() -> None:
    fit = fitted(SimulatedGpu(Net()), 300 * MiB)
    assert fit.verdict == "does not fit" and fit.batch_size is None
    assert re.match(
        r"Not even a batch of 1 fits into 300 MiB of GPU memory\. At least [\d.]+ MiB more would be"
        r" needed\. Weights, gradients and optimizer state alone take 324 MiB, and one sample keeps"
        r" 11 MiB",
        summary(fit),
    )


def test_too_large_for_a_full_card_says_where_it_fails() -> None:
    gpu = SimulatedGpu(Net(), 300 * MiB)
    free = 800 * MiB
    fit = fitted(gpu, free, budget={"total": free, "free": free, "requested": None})
    assert "more would be needed. It fails in step 1." in summary(fit)


def test_a_leak_says_how_much_and_for_how_long() -> None:
    fit = fitted(SimulatedGpu(Net(leaks=5 * MiB)))
    assert fit.verdict == "cannot tell"
    assert summary(fit).startswith(
        "The training leaks: 5 MiB more stay in memory after every step."
    )
    assert re.search(r"would run out after some [\d,]+ steps", summary(fit))


def test_no_growth_is_said_to_have_no_limit() -> None:
    fit = fitted(SimulatedGpu(Net((8 * MiB,), (0,), (0,), inputs=0)))
    assert fit.verdict == "no limit" and "Something else limits it." in summary(fit)


def test_a_data_set_that_ends_first_is_noted() -> None:
    fit = fitted(SimulatedGpu(Net(), samples=40))
    assert fit.verdict == "fits" and fit.max_batch and fit.max_batch.size == 40
    assert "the data set has no more than 40 samples" in notes(fit)
    assert fit.max_batch.failure_above is None and summary(fit).endswith("of 4 GiB of GPU memory.")


@pytest.mark.parametrize("samples", [1, 3])
def test_a_tiny_data_set_is_no_sign_of_memory_that_does_not_grow(samples: int) -> None:
    fit = fitted(SimulatedGpu(Net(), samples=samples))
    assert fit.verdict == "fits" and fit.batch_size == samples


def test_who_else_is_on_the_gpu_and_what_a_subject_notes_is_told() -> None:
    gpu = SimulatedGpu(Net())
    gpu.subject = replace(gpu.subject, notes=("--optimizer gives way",), varies=True)
    others = (OtherProcess(3, "python", 3 * GiB), OtherProcess(4, "Xorg"))
    fit = fitted(gpu, budget={"other_processes": others})
    assert notes(fit)[0] == "--optimizer gives way" and fit.budget.other_processes == others
    assert any(note.startswith("samples differ in size") for note in notes(fit))


# What memory is made of


def test_the_composition_adds_up_to_what_is_held(thrashing: Fit, smooth: Fit) -> None:
    for fit in (thrashing, smooth):
        made = fit.composition
        assert made and fit.recommended_batch and made.batch == fit.recommended_batch.size
        parts = made.parts
        state = parts.weights + parts.gradients + parts.optimizer
        inside = state + parts.inputs + parts.activations
        assert (
            inside + made.workspace + made.fragmentation
            == 4 * GiB - fit.recommended_batch.free_bytes
        )
        assert parts.outside == 500 * MiB and made.workspace > 0 and made.per_sample > 0


@pytest.mark.parametrize(
    ("net", "dominant", "begin"),
    [
        (Net(), "activations", "Activations take"),
        (Net((900 * MiB,), (MiB,), (0,)), "state", "Weights, gradients and optimizer state take"),
        (Net((8 * MiB,), (MiB,), (9 * MiB,)), "workspace", "Kernels' workspace takes"),
    ],
)
def test_the_part_to_reduce_is_the_largest(net: Net, dominant: str, begin: str) -> None:
    fit = fitted(SimulatedGpu(net))
    assert fit.composition and fit.composition.dominant == dominant
    text = advice(fit.composition, fit.budget)
    assert text.startswith(begin)
    share = re.search(r"(\d+)%", text)
    assert share and 30 <= int(share[1]) <= 100


# What changes would give


def test_what_ifs_are_changes_with_reasons_and_the_right_direction() -> None:
    gpu = SimulatedGpu(Net())
    gpu.subject = replace(gpu.subject, layers=16)
    fit = fitted(gpu, momentum=0.9, optimizer="sgd", precision="fp32")
    given = {change_text(each): each for each in fit.what_ifs}
    assert fit.max_batch and all(reason_text(each, fit) for each in fit.what_ifs)
    assert list(given) == [
        "--precision bf16",
        "gradient checkpointing",
        "--optimizer sgd --momentum 0",
        "--optimizer adamw",
    ]
    size = fit.max_batch.size
    assert given["--precision bf16"].max_batch > 1.3 * size
    assert given["gradient checkpointing"].max_batch > size
    assert (
        given["--optimizer adamw"].max_batch
        < size
        < given["--optimizer sgd --momentum 0"].max_batch
    )
    assert "2/√16" in reason_text(given["gradient checkpointing"], fit)


def test_what_is_done_already_or_is_not_ours_to_change_is_no_what_if() -> None:
    gpu = SimulatedGpu(Net())
    gpu.subject = replace(gpu.subject, own_optimizer=True)
    assert fitted(gpu, precision="bf16").what_ifs == ()
    adam = fitted(SimulatedGpu(Net()), optimizer="adam", precision="bf16").what_ifs
    assert [change_text(each) for each in adam] == [
        "--optimizer sgd --momentum 0",
        "--optimizer sgd",
    ]


# Other cards


def test_the_card_that_was_searched_is_the_answer_and_larger_ones_hold_more() -> None:
    sizes = tuple(size * GiB for size in (2, 4, 6, 24))
    for net in (Net(), THRASHING):
        fit = fitted(SimulatedGpu(net), options={"cards": sizes})
        assert fit.max_batch and fit.recommended_batch
        assert [card.size for card in fit.cards] == list(sizes)
        assert [card.limit for card in fit.cards] == list(sizes)
        own = fit.cards[1]
        assert (
            abs(own.max_batch - fit.max_batch.size) <= 1
            and abs(own.recommended_batch - fit.recommended_batch.size) <= 1
        )
        found = [(card.max_batch, card.recommended_batch) for card in fit.cards]
        assert found == sorted(found) and all(fast <= most for most, fast in found)


def test_headroom_is_taken_from_every_card() -> None:
    options = {"cards": (8 * GiB,)}
    fit = fitted(SimulatedGpu(Net()), options=options, budget={"headroom": GiB})
    assert [card.limit for card in fit.cards] == [7 * GiB]


def test_a_card_too_small_for_one_holds_none() -> None:
    fit = fitted(SimulatedGpu(Net()), options={"cards": (100 * MiB, 4 * GiB)})
    assert (fit.cards[0].max_batch, fit.cards[0].recommended_batch) == (0, 0)


# The host's side


def test_the_hosts_memory_is_that_of_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "_shm_free", lambda: 64 * MiB)
    workload = make_workload("resnet50", {"workers": 2, "prefetch": 2, "pin": False})
    found = loader_memory(workload, MiB, 700 * MiB)
    assert (found.memory_free, found.in_flight, found.sample_bytes) == (700 * MiB, 7, MiB)
    assert (found.max_batch, found.bound_by) == (12, "/dev/shm")
    assert (found.workers, found.prefetch, found.pinned) == (2, 2, False)
    alone = loader_memory(make_workload("resnet50", {"workers": 0, "pin": False}), MiB, 300 * MiB)
    assert (alone.max_batch, alone.bound_by) == (100, "host memory")


def test_the_hosts_memory_is_never_more_than_there_is() -> None:
    found = loader_memory(make_workload("resnet50", {}), MiB, 1 << 60)
    assert 0 < found.memory_free < 1 << 60 and found.by_2019
    assert found.max_batch * MiB <= found.memory_free


# There and back


def test_an_answer_survives_json() -> None:
    gpu = SimulatedGpu(THRASHING)
    gpu.subject = Subject("cuda", "a GPU", 7, 600_000, None, versions={"torch": "2"}, notes=("a",))
    options = {"prove": True, "cards": (8 * GiB,)}
    fits = [
        fitted(gpu, options=options, budget={"other_processes": (OtherProcess(3, "python"),)}),
        fitted(SimulatedGpu(Net()), 300 * MiB),
        fitted(SimulatedGpu(Net(), error_at=50)),
    ]
    assert fits[0].proof and fits[0].cards and fits[0].what_ifs and fits[0].loader
    for fit in fits:
        assert loads(Fit, dumps(fit)) == fit
