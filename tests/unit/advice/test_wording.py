"""What was found, put into words and records that a person can rely on."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from simulated_gpu import GiB, MiB, Net, SimulatedGpu
from stepscope.advice import cache, wording
from stepscope.advice.answer import Fit, Room
from stepscope.advice.fit import Options, fit_on_gpu
from stepscope.advice.wording import answer, host_room
from stepscope.workloads.probing import Ask, Subject
from stepscope.workloads.spec import make_workload

THRASHING = Net((8 * MiB, 40 * MiB), (3 * MiB, 5 * MiB), (9 * MiB, 6 * MiB))
"""Its largest batch does not run smoothly."""


def fitted(
    gpu: SimulatedGpu,
    limit: int = 4 * GiB,
    options: Options | None = None,
    room: dict[str, Any] | None = None,
    **knobs: Any,
) -> Fit:
    options = options or Options()
    told = Room("gpu", limit, 80 * GiB, 80 * GiB, limit)
    found = fit_on_gpu(gpu, replace(told, **(room or {})), options, lambda words: None)
    workload = make_workload("resnet50", knobs)
    return answer(found, workload, "auto", options, host_room(workload, 600_000, None))


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
    assert smooth.largest and smooth.largest.above
    held = gpu.ask([Ask((smooth.largest.size,), 4 * GiB)])[0].last.reserved_peak
    failed = gpu.ask([Ask((smooth.largest.above,), 4 * GiB)])[0].last
    assert smooth.largest.leaves == 4 * GiB - held and smooth.largest.misses == failed.missing
    assert smooth.largest.passed >= 2 and not smooth.largest.thrashes


def test_the_certificate_is_said_with_units(smooth: Fit) -> None:
    assert smooth.fast and smooth.largest
    assert smooth.fast.size == smooth.largest.size and smooth.batch_size == smooth.fast.size
    said = re.fullmatch(
        r"Use a batch of (\d+): it trains at 1,000 samples/s without an allocator retry\. "
        r"\1 is the largest: it fits and leaves [\d.]+ MiB of 4 GiB of GPU memory; "
        r"(\d+) would need at least [\d.]+ MiB more\.",
        smooth.says,
    )
    assert said and said.groups() == (str(smooth.fast.size), str(smooth.largest.above))
    assert smooth.verdict == "fits"


def test_a_largest_batch_that_retries_is_said_to_thrash(thrashing: Fit) -> None:
    assert thrashing.fast and thrashing.largest
    assert thrashing.fast.size < thrashing.largest.size
    assert f"{thrashing.largest.size} is the largest: it fits, but thrashes, and" in thrashing.says
    assert thrashing.largest.thrashes and thrashing.largest.retries > 0
    assert not thrashing.fast.thrashes and thrashing.fast.retries == 0


def test_the_curve_is_in_order_and_has_both_answers(thrashing: Fit) -> None:
    batches = [point.batch for point in thrashing.curve]
    points = {point.batch: point for point in thrashing.curve}
    assert thrashing.fast and thrashing.largest
    assert batches == sorted(set(batches))
    fast, largest = points[thrashing.fast.size], points[thrashing.largest.size]
    assert fast.passed and largest.passed and fast.samples_per_second == 1000
    assert (fast.thrashes, largest.thrashes) == (False, True)
    assert any(not point.passed for point in thrashing.curve)


def test_why_the_next_fails_is_said_where_it_is_not_memory() -> None:
    fit = fitted(SimulatedGpu(Net(), error_at=100))
    assert fit.says.endswith("100 fails in step 1: shapes do not match.")
    assert "batch 100 fails for another reason than memory: shapes do not match" in fit.notes
    assert fit.largest and fit.largest.misses is None


def test_holes_are_in_the_answer() -> None:
    options = Options()
    room = Room("gpu", 4 * GiB, 80 * GiB, 80 * GiB, 4 * GiB)
    found = fit_on_gpu(SimulatedGpu(Net()), room, options, lambda words: None)
    assert found.largest
    found.search.passed[found.largest - 2] = False
    fit = answer(found, make_workload("resnet50", {}), "auto", options, None)
    assert fit.holes == ((found.largest - 2, found.largest),)


# Answers without two batches


def test_an_estimate_is_said_to_be_one() -> None:
    fit = fitted(SimulatedGpu(Net()), options=Options(estimate=True))
    assert fit.largest and fit.largest.passed == 0 and fit.largest.leaves == 0
    assert "should be the largest within 4 GiB of GPU memory: foreseen, not tried" in fit.says
    assert "estimated from smaller batches: nothing near the limit was run" in fit.notes


def test_too_large_says_what_misses_and_why() -> None:
    fit = fitted(SimulatedGpu(Net()), 300 * MiB)
    assert fit.verdict == "does not fit" and fit.batch_size is None
    assert re.match(
        r"Not even a batch of 1 fits into 300 MiB of GPU memory\. At least [\d.]+ MiB more would be"
        r" needed\. Weights, gradients and optimizer state alone take 324 MiB, and one sample keeps"
        r" 11 MiB",
        fit.says,
    )


def test_too_large_for_a_full_card_says_where_it_fails() -> None:
    gpu = SimulatedGpu(Net(), 300 * MiB)
    free = 800 * MiB
    fit = fitted(gpu, free, room={"total": free, "free": free, "asked": None})
    assert "more would be needed. It fails in step 1." in fit.says


def test_a_leak_says_how_much_and_for_how_long() -> None:
    fit = fitted(SimulatedGpu(Net(leaks=5 * MiB)))
    assert fit.verdict == "cannot tell"
    assert fit.says.startswith("The training leaks: 5 MiB more stay in memory after every step.")
    assert re.search(r"would run out after some [\d,]+ steps", fit.says)


def test_no_growth_is_said_to_have_no_limit() -> None:
    fit = fitted(SimulatedGpu(Net((8 * MiB,), (0,), (0,), inputs=0)))
    assert fit.verdict == "no limit" and "Something else limits it." in fit.says


def test_a_data_set_that_ends_first_is_noted() -> None:
    fit = fitted(SimulatedGpu(Net(), samples=40))
    assert fit.verdict == "fits" and fit.largest and fit.largest.size == 40
    assert "the data set has no more than 40 samples" in fit.notes
    assert fit.largest.above is None and fit.says.endswith("of 4 GiB of GPU memory.")


@pytest.mark.parametrize("samples", [1, 3])
def test_a_tiny_data_set_is_no_sign_of_memory_that_does_not_grow(samples: int) -> None:
    fit = fitted(SimulatedGpu(Net(), samples=samples))
    assert fit.verdict == "fits" and fit.batch_size == samples


def test_who_else_is_on_the_gpu_and_what_a_subject_notes_is_told() -> None:
    gpu = SimulatedGpu(Net())
    gpu.subject = replace(gpu.subject, notes=("--optimizer gives way",), varies=True)
    tenants = ("python (pid 3) holds 3 GiB", "Xorg (pid 4)")
    fit = fitted(gpu, room={"tenants": tenants})
    assert fit.notes[0] == "--optimizer gives way"
    assert "on this GPU already: python (pid 3) holds 3 GiB; Xorg (pid 4)" in fit.notes
    assert any(note.startswith("samples differ in size") for note in fit.notes)


# What memory is made of


def test_the_composition_adds_up_to_what_is_held(thrashing: Fit, smooth: Fit) -> None:
    for fit in (thrashing, smooth):
        made = fit.composition
        assert made and fit.fast and made.batch == fit.fast.size
        parts = made.parts
        state = parts.weights + parts.gradients + parts.optimizer
        inside = state + parts.inputs + parts.activations
        assert inside + made.workspace + made.fragmentation == 4 * GiB - fit.fast.leaves
        assert parts.outside == 500 * MiB and made.workspace > 0 and made.per_sample > 0


@pytest.mark.parametrize(
    ("net", "attack"),
    [
        (Net(), "Activations take"),
        (Net((900 * MiB,), (MiB,), (0,)), "Weights, gradients and optimizer state take"),
        (Net((8 * MiB,), (MiB,), (9 * MiB,)), "Kernels' workspace takes"),
    ],
)
def test_the_part_to_attack_is_the_largest(net: Net, attack: str) -> None:
    fit = fitted(SimulatedGpu(net))
    assert fit.composition and fit.composition.attack.startswith(attack)
    share = re.search(r"(\d+)%", fit.composition.attack)
    assert share and 30 <= int(share[1]) <= 100


# What changes would give


def test_what_ifs_are_changes_with_reasons_and_the_right_direction() -> None:
    gpu = SimulatedGpu(Net())
    gpu.subject = replace(gpu.subject, layers=16)
    fit = fitted(gpu, momentum=0.9, optimizer="sgd", precision="fp32")
    given = {each.change: each for each in fit.what_if}
    assert fit.largest and all(each.why for each in fit.what_if)
    assert list(given) == [
        "--precision bf16", "gradient checkpointing", "--optimizer sgd --momentum 0",
        "--optimizer adamw",
    ]  # fmt: skip
    size = fit.largest.size
    assert given["--precision bf16"].largest > 1.3 * size
    assert given["gradient checkpointing"].largest > size
    assert given["--optimizer adamw"].largest < size < given["--optimizer sgd --momentum 0"].largest
    assert "2/√16" in given["gradient checkpointing"].why


def test_what_is_done_already_or_is_not_ours_to_change_is_no_what_if() -> None:
    gpu = SimulatedGpu(Net())
    gpu.subject = replace(gpu.subject, own_optimizer=True)
    assert fitted(gpu, precision="bf16").what_if == ()
    adam = fitted(SimulatedGpu(Net()), optimizer="adam", precision="bf16").what_if
    assert [each.change for each in adam] == ["--optimizer sgd --momentum 0", "--optimizer sgd"]


# Other cards


def test_the_card_that_was_searched_is_the_answer_and_larger_ones_hold_more() -> None:
    sizes = tuple(size * GiB for size in (2, 4, 6, 24))
    for net in (Net(), THRASHING):
        fit = fitted(SimulatedGpu(net), options=Options(cards=sizes))
        assert fit.largest and fit.fast
        assert [card.size for card in fit.cards] == list(sizes)
        assert [card.limit for card in fit.cards] == list(sizes)
        own = fit.cards[1]
        assert abs(own.largest - fit.largest.size) <= 1 and abs(own.fast - fit.fast.size) <= 1
        found = [(card.largest, card.fast) for card in fit.cards]
        assert found == sorted(found) and all(fast <= most for most, fast in found)


def test_headroom_is_taken_from_every_card() -> None:
    options = Options(cards=(8 * GiB,))
    fit = fitted(SimulatedGpu(Net()), options=options, room={"headroom": GiB})
    assert [card.limit for card in fit.cards] == [7 * GiB]


def test_a_card_too_small_for_one_holds_none() -> None:
    fit = fitted(SimulatedGpu(Net()), options=Options(cards=(100 * MiB, 4 * GiB)))
    assert (fit.cards[0].largest, fit.cards[0].fast) == (0, 0)


# The host's side


def test_the_hosts_room_is_that_of_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wording, "_shm_free", lambda: 64 * MiB)
    workload = make_workload("resnet50", {"workers": 2, "prefetch": 2, "pin": False})
    room = host_room(workload, MiB, 700 * MiB)
    assert (room.memory_free, room.in_flight, room.sample_bytes) == (700 * MiB, 7, MiB)
    assert (room.largest, room.bound_by) == (12, "/dev/shm")
    assert (room.workers, room.prefetch, room.pinned) == (2, 2, False)
    alone = host_room(make_workload("resnet50", {"workers": 0, "pin": False}), MiB, 300 * MiB)
    assert (alone.largest, alone.bound_by) == (100, "host memory")


def test_the_hosts_room_is_never_more_than_there_is() -> None:
    room = host_room(make_workload("resnet50", {}), MiB, 1 << 60)
    assert 0 < room.memory_free < 1 << 60 and room.by_2019
    assert room.largest * MiB <= room.memory_free


# There and back


def test_an_answer_survives_json() -> None:
    gpu = SimulatedGpu(THRASHING)
    gpu.subject = Subject("cuda", "a GPU", 7, 600_000, None, versions={"torch": "2"}, notes=("a",))
    options = Options(prove=True, cards=(8 * GiB,))
    fits = [
        fitted(gpu, options=options, room={"tenants": ("python (pid 3)",)}),
        fitted(SimulatedGpu(Net()), 300 * MiB),
        fitted(SimulatedGpu(Net(), error_at=50)),
    ]
    assert fits[0].proof and fits[0].cards and fits[0].what_if and fits[0].host
    for fit in fits:
        assert cache._built(Fit, json.loads(json.dumps(fit.as_dict()))) == fit
