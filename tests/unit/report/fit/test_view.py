"""The printed report and the JSON output of a fit."""

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
from stepscope.fit.result import (
    Batch,
    FitFailure,
    FitResult,
    GpuPrediction,
    Linear2019,
    LoaderMemory,
    MemoryBreakdown,
    MemoryBudget,
    Note,
    NoteKind,
    OtherProcess,
    ProbedBatch,
    SearchCost,
    Verdict,
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
ABOVE = ProbeResult(181, "gpu_oom", "step 2", shortfall_bytes=49 * MiB)
MAX = Batch(180, 188 * MiB, 2, 857.2, True, failure_above=ABOVE)
RECOMMENDED = Batch(156, 900 * MiB, 1, 878.4)
PARTS = Parts(98 * MiB, 98 * MiB, 98 * MiB, 90 * MiB, 12 * GiB, 520 * MiB)
BARE = FitResult(
    Verdict.FITS,
    "resnet50",
    to_json(Workload("resnet50")),
    "auto",
    BUDGET,
    None,
    SearchCost(12.3, 11, 3),
)
WHOLE = replace(
    BARE,
    subject=SUBJECT,
    max_batch=MAX,
    recommended_batch=RECOMMENDED,
    curve=tuple(
        ProbedBatch(
            batch, batch not in (158, 181), 156 < batch < 181, 870 - batch / 10, batch * 83 * MiB
        )
        for batch in (2, 16, 64, 78, 125, 145, 156, 158, 160, 162, 170, 175, 178, 180, 181, 190)
    ),
    failures_below_max=((158, 160),),
    memory_breakdown=MemoryBreakdown(
        156,
        PARTS,
        fixed_bytes=300 * MiB,
        per_sample_bytes=83.2 * MiB,
        dominant="activations",
        workspace_bytes=300 * MiB,
        fragmentation_bytes=700 * MiB,
        allocated_peak_bytes=12 * GiB,
    ),
    minimum_memory=MemoryLine(0.4 * GiB, 80 * MiB),
    retry_free_memory=MemoryLine(0.5 * GiB, 93 * MiB),
    predictions=(
        GpuPrediction(11 * GiB, 10 * GiB, 120, 108),
        GpuPrediction(80 * GiB, 79 * GiB, NO_LIMIT, 900),
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


def printed(fit: FitResult, width: int = 80) -> str:
    out = io.StringIO()
    draw(Console(file=out, width=width), fit_document(fit))
    return out.getvalue()


def words(fit: FitResult, width: int = 80) -> str:
    return " ".join(printed(fit, width).split())


def test_the_answer_comes_first() -> None:
    lines = [" ".join(line.split()) for line in printed(WHOLE, 90).splitlines()]
    assert lines[:5] == [
        "resnet50 on NVIDIA H200, fp32, 15 GiB for PyTorch fits",
        "",
        "Recommended batch size 156 878 samples/s, no allocator retries",
        "Max batch size 180 857 samples/s (2.4% slower), allocator retries",
        "At 180, 188 MiB remains free; 181 needs at least 49 MiB more (out of memory in step 2)",
    ]


def test_all_sections_are_shown() -> None:
    text = words(WHOLE)
    for part in (
        "Verified: one full training cycle in each of 2 fresh processes",
        "Memory breakdown at batch size 156 (12.64 GiB)",
        "activations 12 GiB 95% ████████████████████████",
        "CUDA context, outside the limit: 520 MiB",
        "Memory use: 300 MiB + 83.2 MiB per sample",
        "Minimum memory: 409.6 MiB + 80 MiB per sample",
        "Without allocator retries: 512 MiB + 93 MiB per sample",
        "Activations take 100% of the memory in use at the peak and grow with every sample",
        "Batch sizes tried (4 more in the JSON output)",
        "156 854 12.64 GiB recommended",
        "158 854 12.81 GiB fails below the max",
        "180 852 14.59 GiB max, allocator retries",
        "181 852 14.67 GiB fails",
        "158 fails although 160 fits",
        "Predictions for other GPU memory sizes GPU memory Available for batches Recommended Max",
        "11 GiB 10 GiB 108 120",
        "80 GiB 79 GiB 900 no limit",
        "What-if estimates (not run)",
        "--precision bf16 310 roughly halves the activations; weights stay in fp32",
        "Host memory limit of the data loader",
        "4 workers × 2 prefetched batches, pinned: up to 14 batches in memory, 588 KiB per sample",
        "Max batch size: 1,500, limited by /dev/shm "
        "(50 GiB of host memory and 8 GiB of /dev/shm free)",
        "Equation 4.10 of Tripathi 2019, without prefetch and copies: 22,000",
        "11 probes in 12.3 s; 3 of them ran out of memory. Each probe is a disposable process",
        "Try it stepscope trial resnet50 --batch-size 156 --gpu-memory 15GiB",
    ):
        assert part in text, part


def test_equal_growth_is_shown_once() -> None:
    line = WHOLE.minimum_memory
    assert WHOLE.memory_breakdown is not None and line is not None
    same = replace(
        WHOLE.memory_breakdown,
        fixed_bytes=int(line.fixed_bytes),
        per_sample_bytes=line.per_sample_bytes,
    )
    text = words(replace(WHOLE, memory_breakdown=same))
    assert "Minimum memory: 409.6 MiB + 80 MiB per sample" in text
    assert "Memory use:" not in text
    text = words(replace(WHOLE, memory_breakdown=same, minimum_memory=None))
    assert "Memory use: 409.6 MiB + 80 MiB per sample" in text


def test_a_limit_that_other_processes_reduce_is_explained() -> None:
    """The command to copy uses a limit that is available."""
    others = (OtherProcess(3, "python"),)
    budget = replace(
        BUDGET, limit_bytes=int(5.51 * GiB), free_bytes=6 * GiB, other_processes=others
    )
    fit = replace(WHOLE, budget=budget)
    assert fit_document(fit).name.endswith(
        "5.51 GiB for PyTorch (15 GiB requested, other processes use the rest)"
    )
    assert words(fit).endswith("--gpu-memory 5642MiB")
    headroom = replace(budget, limit_bytes=budget.limit_bytes - GiB, headroom_bytes=GiB)
    assert words(replace(fit, budget=headroom)).endswith("--gpu-memory 5642MiB")
    alone = replace(fit, budget=replace(headroom, other_processes=()))
    assert fit_document(alone).name.endswith(
        "5.51 GiB for PyTorch, 1 GiB headroom (15 GiB requested, no more is free)"
    )


def test_sections_without_content_are_not_shown() -> None:
    text = printed(replace(BARE, verdict=Verdict.DOES_NOT_FIT))
    assert text.splitlines()[:3] == [
        "resnet50, fp32, 15 GiB for PyTorch  does not fit",
        "",
        "Not even a batch of 1 fits in 15 GiB of GPU memory.",
    ]
    for absent in ("Recommended", "breakdown", "tried", "Predict", "Host", "Note", "Try", "Global"):
        assert absent not in text


def test_one_batch_may_be_both() -> None:
    text = words(replace(WHOLE, recommended_batch=replace(MAX, retried=False)))
    assert (
        "Recommended batch size 180 857 samples/s, no allocator retries, also the max batch size"
    ) in text
    assert "Max batch size 180" not in text


def test_an_estimate_is_labeled() -> None:
    text = words(replace(WHOLE, max_batch=Batch(180), recommended_batch=Batch(150), curve=()))
    assert "Recommended batch size 150 predicted, not run" in text
    assert "At 180" not in text


def test_a_model_that_does_not_fit_is_explained() -> None:
    failure = FitFailure(ProbeResult(1, "gpu_oom", "step 1"), 2 * GiB)
    fit = replace(BARE, verdict=Verdict.DOES_NOT_FIT, failure=failure, subject=SUBJECT)
    text = words(fit)
    assert "At least 2 GiB more is needed. Batch size 1 ran out of GPU memory in step 1." in text
    assert "The weights take 97.49 MiB" in text and "--batch-size" not in text


def test_no_limit_still_names_a_batch() -> None:
    text = words(replace(WHOLE, verdict=Verdict.NO_LIMIT))
    assert "Memory does not limit the batch size" in text
    assert "Recommended batch size 156" in text and "Largest batch size tried 180" in text
    assert "remains free" not in text


def test_a_smaller_limit_of_the_host_is_a_warning() -> None:
    assert WHOLE.loader is not None
    text = words(replace(WHOLE, loader=replace(WHOLE.loader, max_batch=90)))
    assert "Host memory limits the batch to 90 (/dev/shm). Use fewer --workers" in text


def test_verification_counts_processes() -> None:
    verification = (
        ProbeResult(156, "ok"),
        ProbeResult(156, "ok"),
        ProbeResult(180, "ok", retries=18),
        ProbeResult(180, "gpu_oom", "step 7", message="tried to allocate 2 GiB"),
    )
    text = words(replace(WHOLE, verification=verification))
    assert "Verification in fresh processes 156 passed in 2 of 2 processes" in text
    assert (
        "180 passed in 1 of 2 processes; out of memory in step 7; up to 18 allocator retries"
    ) in text
    assert "Some processes of `--verify` failed. Use a smaller batch" in text


def test_other_processes_notes_cache_and_global_batch_size() -> None:
    fit = replace(
        WHOLE,
        budget=replace(
            BUDGET,
            requested_bytes=None,
            headroom_bytes=GiB,
            other_processes=(OtherProcess(812, "python", 16 * GiB // 5),),
        ),
        notes=tuple(Note(NoteKind.REPORTED, text) for text in ("a note", "a note", "another")),
        from_cache=True,
        created="2026-11-16T03:12:55+01:00",
        settings=to_json(Workload("resnet50", accumulate=4, pin=False, compile=True)),
    )
    text = words(fit)
    assert "139 GiB free of 140 GiB, 1 GiB headroom" in text
    assert "Other processes python (PID 812) uses 3.2 GiB" in text
    assert "Note A note Another" in text
    assert "From the cache (measured 2026-11-16 03:12). Use --no-cache to measure again" in text
    assert "Global batch size 624 (156 × 4 accumulated × 1 rank)" in text
    assert text.endswith("trial resnet50 --batch-size 156 --accumulate 4 --no-pin --compile")


def test_the_baseline_has_its_own_section() -> None:
    fit = replace(BARE, method="linear2019", linear2019=LINEAR, max_batch=Batch(163))
    text = words(fit)
    for part in (
        "The linear2019 method estimates a max batch size of 163 in 15 GiB without a reserve",
        "Estimated max batch size 163 predicted, not run",
        "Baseline: linear2019",
        "Batch size 10 used 1.2 GiB, batch size 20 used 2.1 GiB: 307.2 MiB + 92 MiB per sample",
        "Max batch size with no reserve: 163 (326 on 2 GPUs)",
        "Max batch size with 1 GiB in reserve: 152 (304 on 2 GPUs)",
        "Max batch size with 1.5 GiB in reserve: 146",
        "Max batch size from the sizes of all layers (equation 4.1 of Tripathi 2019): 171",
        "layer13 Conv2d 13 MiB 12.7 KiB",
        "Largest layers (4 more in the JSON output)",
    ):
        assert part in text, part
    assert "layer3 " not in text


def test_a_report_for_the_host_does_not_mention_the_allocator() -> None:
    budget = MemoryBudget("host", 2 * GiB, 8 * GiB, 6 * GiB, 2 * GiB)
    fit = replace(
        WHOLE,
        budget=budget,
        max_batch=replace(MAX, retried=False),
        retry_free_memory=None,
        what_ifs=(),
        curve=(),
    )
    text = words(fit)
    assert "2 GiB of host memory" in text and "libraries and data 520 MiB" in text
    assert "allocator" not in text and "context" not in text
    assert "--memory 2GiB" in text


@pytest.mark.parametrize("width", [80, 60])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    lines = printed(replace(WHOLE, linear2019=LINEAR), width).splitlines()
    assert [line for line in lines if len(line) > width and not line.startswith("Try it")] == []


def test_user_texts_cannot_control_the_terminal() -> None:
    fit = replace(
        WHOLE, model="evil\x1b[2J", notes=(Note(NoteKind.REPORTED, "[bold]plain[/bold]\x07"),)
    )
    assert "\x1b" not in printed(fit) and "[bold]plain[/bold]" in printed(fit)


def test_json_is_complete_and_can_be_parsed() -> None:
    data = fit_dict(replace(WHOLE, linear2019=LINEAR, verification=(ProbeResult(156, "ok"),)))
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert list(data)[:2] == ["format", "batch_size"] and data["batch_size"] == 156
    assert (data["verdict"], data["settings"]["model"]) == ("fits", "resnet50")
    assert data["budget"]["requested_bytes"] == 15 * GiB
    max_batch = data["max_batch"]
    assert (max_batch["size"], max_batch["free_bytes"], max_batch["passes"]) == (180, 188 * MiB, 2)
    assert (max_batch["batch_above"], max_batch["shortfall_bytes"]) == (181, 49 * MiB)
    assert max_batch["failure_above"] == "out of memory in step 2"
    assert data["recommended_batch"]["samples_per_second"] == 878.4
    breakdown = data["memory_breakdown"]
    assert breakdown["parts"]["activations_bytes"] == 12 * GiB
    assert breakdown["recommendation"].startswith("Activations take")
    assert data["failures_below_max"] == [[158, 160]]
    assert data["predictions"][0]["memory_bytes"] == 11 * GiB


_JSON: Any = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
_FITS = st.builds(
    FitResult,
    settings=st.dictionaries(
        st.sampled_from([*to_json(Workload("cnn")), "odd"]), _JSON, max_size=6
    ),
)


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(_FITS, st.sampled_from([30, 80, 200]))
def test_any_fit_can_be_drawn(fit: FitResult, width: int) -> None:
    assert printed(fit, width)
    json.dumps(fit_dict(fit), allow_nan=False)
