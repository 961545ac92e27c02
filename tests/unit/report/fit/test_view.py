"""A fit as it is printed and as JSON: the answer first, and only what is there."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from stepscope.analysis.memory.model import NO_LIMIT, MemoryLine, Parts
from stepscope.fit.answer import (
    Batch,
    CardPrediction,
    Composition,
    Effort,
    Fit,
    Linear2019,
    LoaderMemory,
    MemoryBudget,
    Misfit,
    Note,
    NoteKind,
    OtherProcess,
    TriedBatch,
    WhatIf,
)
from stepscope.records.codec import to_json
from stepscope.report.fit.json import fit_dict
from stepscope.report.fit.view import fit_document
from stepscope.report.kit.terminal import draw
from stepscope.workloads.probing import Layer, ProbeResult, Subject
from stepscope.workloads.spec import Workload

MiB, GiB = 1 << 20, 1 << 30

BUDGET = MemoryBudget("gpu", 15 * GiB, 140 * GiB, 139 * GiB, 15 * GiB)
SUBJECT = Subject("cuda", "NVIDIA H200", 25_557_032, 602_112, None, optimizer="sgd")
ABOVE = ProbeResult(181, "gpu_oom", "step 2", missing=49 * MiB)
LARGEST = Batch(180, 188 * MiB, 2, 857.2, True, failure_above=ABOVE)
FAST = Batch(156, 900 * MiB, 1, 878.4)
PARTS = Parts(98 * MiB, 98 * MiB, 98 * MiB, 90 * MiB, 12 * GiB, 520 * MiB)
BARE = Fit(
    "fits",
    "resnet50",
    to_json(Workload("resnet50")),
    "auto",
    BUDGET,
    None,
    Effort(12.3, 11, 3),
)
WHOLE = replace(
    BARE,
    subject=SUBJECT,
    max_batch=LARGEST,
    recommended_batch=FAST,
    curve=tuple(
        TriedBatch(
            batch, batch not in (158, 181), 156 < batch < 181, 870 - batch / 10, batch * 83 * MiB
        )
        for batch in (2, 16, 64, 78, 125, 145, 156, 158, 160, 162, 170, 175, 178, 180, 181, 190)
    ),
    holes=((158, 160),),
    composition=Composition(
        156,
        PARTS,
        fixed=300 * MiB,
        per_sample=83.2 * MiB,
        dominant="activations",
        workspace=300 * MiB,
        fragmentation=700 * MiB,
        peak=12 * GiB,
    ),
    minimum=MemoryLine(0.4 * GiB, 80 * MiB),
    comfortable=MemoryLine(0.5 * GiB, 93 * MiB),
    cards=(
        CardPrediction(11 * GiB, 10 * GiB, 120, 108),
        CardPrediction(80 * GiB, 79 * GiB, NO_LIMIT, 900),
    ),
    what_ifs=(WhatIf("precision", {"precision": "bf16"}, 310),),
    loader=LoaderMemory(4, 2, True, 602_112, 14, 50 * GiB, 8 * GiB, 1500, "/dev/shm", 22_000),
)
LINEAR = Linear2019(
    10,
    20,
    1.2 * GiB,
    2.1 * GiB,
    92 * MiB,
    0.3 * GiB,
    ((0, 163), (GiB, 152), (int(1.5 * GiB), 146)),
    2,
    tuple(Layer(f"layer{n}", "Conv2d", n * MiB, n * 1000) for n in range(14)),
    171,
)


def printed(fit: Fit, width: int = 80) -> str:
    out = io.StringIO()
    draw(Console(file=out, width=width), fit_document(fit))
    return out.getvalue()


def words(fit: Fit, width: int = 80) -> str:
    return " ".join(printed(fit, width).split())


def test_the_answer_comes_first() -> None:
    lines = [" ".join(line.split()) for line in printed(WHOLE).splitlines()]
    assert lines[:6] == [
        "resnet50 on NVIDIA H200, fp32, 15 GiB for PyTorch fits",
        "",
        "use --batch-size 156 878 samples/s, no allocator retry",
        "largest --batch-size 180 857 samples/s, 2.4 % slower, fits, but thrashes",
        "(allocator retries)",
        "180 fits and leaves 188 MiB; 181 would need at least 49 MiB more (in step 2)",
    ]


def test_then_all_that_it_follows_from() -> None:
    text = words(WHOLE)
    for part in (
        "It went through a whole cycle in 2 fresh processes",
        "Memory at 156: 12.64 GiB",
        "activations 12 GiB 95 % ████████████████████████",
        "A context takes 520 MiB on top of it",
        "300 MiB for any batch, 83.2 MiB for each of its samples",
        "Where memory is short, a batch needs 409.6 MiB + 80 MiB a sample",
        "With ease, it takes 512 MiB + 93 MiB a sample",
        "Activations take 100% of it and grow with every sample",
        "Batches tried (4 more are in the JSON)",
        "156 854 12.64 GiB use",
        "158 854 12.81 GiB a hole",
        "180 852 14.59 GiB largest, allocator retries",
        "181 852 14.67 GiB fails",
        "158 fails although 160 fits",
        "Other cards, predicted from the same probes",
        "11 GiB 10 GiB 108 120",
        "80 GiB 79 GiB 900 no limit",
        "--precision bf16 310 activations about halve; weights stay fp32",
        "4 workers × 2 prefetched, pinned: up to 14 batches at once, 588 KiB a sample",
        "Bears a batch of 1,500, bound by /dev/shm (50 GiB free, 8 GiB in /dev/shm)",
        "Without prefetch and copies (equation 4.10): 22,000",
        "11 probes in 12.3 s, 3 of which ran out of memory in processes that were thrown away",
        "Try it stepscope trial resnet50 --batch-size 156 --gpu-memory 15GiB",
    ):
        assert part in text, part


def test_what_is_the_same_is_said_once() -> None:
    line = WHOLE.minimum
    assert WHOLE.composition is not None and line is not None
    same = replace(WHOLE.composition, fixed=int(line.fixed), per_sample=line.per_sample)
    text = words(replace(WHOLE, composition=same))
    assert "Where memory is short, a batch needs 409.6 MiB + 80 MiB a sample" in text
    assert "for any batch" not in text
    assert "409.6 MiB for any batch" in words(replace(WHOLE, composition=same, minimum=None))


def test_what_others_hold_of_the_limit_is_told() -> None:
    """The trial to copy is one that can be had."""
    others = (OtherProcess(3, "python"),)
    budget = replace(BUDGET, limit=int(5.51 * GiB), free=6 * GiB, other_processes=others)
    fit = replace(WHOLE, budget=budget)
    assert fit_document(fit).name.endswith(
        "5.51 GiB for PyTorch: 15 GiB were asked for, others hold the rest"
    )
    assert words(fit).endswith("--gpu-memory 5642MiB")
    left = replace(fit, budget=replace(budget, limit=budget.limit - GiB, headroom=GiB))
    assert words(left).endswith("--gpu-memory 5642MiB")
    left = replace(left, budget=replace(left.budget, other_processes=()))
    assert fit_document(left).name.endswith(
        "5.51 GiB for PyTorch, of which 1 GiB stay free: 15 GiB were asked for, no more is free"
    )


def test_what_is_not_there_is_not_said() -> None:
    text = printed(replace(BARE, verdict="does not fit"))
    assert text.splitlines()[:3] == [
        "resnet50, fp32, 15 GiB for PyTorch  does not fit",
        "",
        "Not even a batch of 1 fits into 15 GiB of GPU memory.",
    ]
    for absent in ("use", "Memory at", "tried", "cards", "Host", "Note", "Proof", "Try", "Global"):
        assert absent not in text.replace("nothing of yours", "")


def test_one_batch_may_be_both() -> None:
    text = words(replace(WHOLE, recommended_batch=replace(LARGEST, retried=False)))
    assert "use --batch-size 180 857 samples/s, no allocator retry, the largest that fits" in text
    assert "largest --batch-size" not in text


def test_an_estimate_says_that_nothing_was_run() -> None:
    text = words(replace(WHOLE, max_batch=Batch(180), recommended_batch=Batch(150), curve=()))
    assert "use --batch-size 150 predicted, not run" in text
    assert "180 fits" not in text


def test_what_does_not_fit_says_why() -> None:
    misfit = Misfit(ProbeResult(1, "gpu_oom", "step 1"), 2 * GiB)
    text = words(replace(BARE, verdict="does not fit", misfit=misfit, subject=SUBJECT))
    assert "At least 2 GiB more would be needed. It fails in step 1." in text
    assert "Its weights take 97.49 MiB" in text and "--batch-size" not in text


def test_no_limit_says_so_and_still_names_a_batch() -> None:
    text = words(replace(WHOLE, verdict="no limit"))
    assert "Memory hardly grows with the batch" in text and "use --batch-size 156" in text
    assert "fits and leaves" not in text


def test_the_host_may_bear_less_than_the_gpu() -> None:
    assert WHOLE.loader is not None
    text = words(replace(WHOLE, loader=replace(WHOLE.loader, max_batch=90)))
    assert "The host bears a batch of 90 only (/dev/shm): fewer --workers" in text


def test_the_proof_counts_processes() -> None:
    proof = (
        ProbeResult(156, "ok"),
        ProbeResult(156, "ok"),
        ProbeResult(180, "ok", retries=18),
        ProbeResult(180, "gpu_oom", "step 7", message="tried to allocate 2 GiB"),
    )
    text = words(replace(WHOLE, proof=proof))
    assert "156 passed in 2 of 2" in text
    assert "180 passed in 1 of 2; it failed in step 7: tried to allocate 2 GiB; up to 18" in text
    assert "Not all of the fresh processes of --prove passed" in text


def test_neighbours_notes_the_cache_and_the_global_batch() -> None:
    fit = replace(
        WHOLE,
        budget=replace(
            BUDGET,
            requested=None,
            headroom=GiB,
            other_processes=(OtherProcess(812, "python", 16 * GiB // 5),),
        ),
        notes=tuple(Note(NoteKind.REPORTED, text) for text in ("a note", "a note", "another")),
        cached="2026-11-16T03:12:55+01:00",
        settings=to_json(Workload("resnet50", accumulate=4, pin=False, compile=True)),
    )
    text = words(fit)
    assert "139 GiB free of 140 GiB, of which 1 GiB stay free" in text
    assert "Also on the GPU python (pid 812) holds 3.2 GiB" in text
    assert "Note a note another" in text
    assert "Found 2026-11-16 03:12, and kept; --fresh measures again" in text
    assert "Global batch 624 (156 × 4 accumulated × 1 rank)" in text
    assert text.endswith("trial resnet50 --batch-size 156 --accumulate 4 --no-pin --compile")


def test_the_estimate_of_2019_has_its_own_view() -> None:
    fit = replace(BARE, method="linear2019", linear=LINEAR, max_batch=Batch(163))
    text = words(fit)
    for part in (
        "The 2019 method estimates 163 with no reserve in 15 GiB",
        "estimate --batch-size 163 predicted, not run",
        "Batch 10 held 1.2 GiB, 20 held 2.1 GiB: s = 92 MiB a sample, X = 307.2 MiB",
        "163 with nothing in reserve, 326 on 2 GPUs",
        "152 with 1 GiB in reserve, 304 on 2 GPUs",
        "146 with 1.5 GiB in reserve",
        "171 by the sizes of all layers (equation 4.1)",
        "layer13 Conv2d 13 MiB 12.7 KiB",
        "The largest layers (4 more are in the JSON)",
    ):
        assert part in text, part
    assert "layer3 " not in text


def test_on_the_host_nobody_speaks_of_allocators() -> None:
    budget = MemoryBudget("host", 2 * GiB, 8 * GiB, 6 * GiB, 2 * GiB)
    largest = replace(LARGEST, retried=False)
    fit = replace(WHOLE, budget=budget, max_batch=largest, what_ifs=(), curve=())
    text = words(fit)
    assert "2 GiB of host memory" in text and "libraries and data 520 MiB" in text
    assert "allocator" not in text and "context" not in text
    assert "--memory 2GiB" in text


@pytest.mark.parametrize("width", [80, 60])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    lines = printed(replace(WHOLE, linear=LINEAR), width).splitlines()
    assert [line for line in lines if len(line) > width and not line.startswith("Try it")] == []


def test_texts_of_the_user_cannot_steer_the_terminal() -> None:
    fit = replace(
        WHOLE, model="evil\x1b[2J", notes=(Note(NoteKind.REPORTED, "[bold]not ours[/bold]\x07"),)
    )
    assert "\x1b" not in printed(fit) and "[bold]not ours[/bold]" in printed(fit)


def test_json_has_all_of_it_and_comes_back() -> None:
    told = fit_dict(replace(WHOLE, linear=LINEAR, proof=(ProbeResult(156, "ok"),)))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert list(told)[:2] == ["format", "batch_size"] and told["batch_size"] == 156
    assert (told["room"]["asked"], told["largest"]["leaves"]) == (15 * GiB, 188 * MiB)
    above = {key: told["largest"][key] for key in ("above", "misses", "why_above")}
    assert above == {"above": 181, "misses": 49 * MiB, "why_above": "in step 2"}
    assert told["composition"]["attack"].startswith("Activations take")
    assert told["largest"]["size"] == 180 and told["fast"]["samples_per_second"] == 878.4
    assert told["knobs"]["model"] == "resnet50" and told["holes"] == [[158, 160]]


_JSON: Any = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_FITS = st.builds(
    Fit,
    settings=st.dictionaries(
        st.sampled_from([*to_json(Workload("cnn")), "odd"]), _JSON, max_size=6
    ),
)


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(_FITS, st.sampled_from([30, 80, 200]))
def test_any_fit_can_be_drawn(fit: Fit, width: int) -> None:
    assert printed(fit, width)
    json.dumps(fit_dict(fit), allow_nan=False)
