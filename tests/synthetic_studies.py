"""Synthetic studies: views of made-up results, with the real analysis."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from stepscope.analysis.study.analyze import analyze
from stepscope.analysis.study.records import Factor, Level, Observation
from stepscope.records import Outcome
from stepscope.report.study.view import BlockLine, StudyView
from stepscope.studies.design.records import Design, SkippedPoint
from stepscope.studies.folder import StudyProgress
from stepscope.studies.results import Result
from stepscope.studies.trial_spec import make_spec

MACHINE = "2 × Intel Xeon Platinum 8480+"
NASTY = '<script>alert(1)</script> & "x"'
BRACKETS = "[bold red]not markup[/] [/]"
FACTORS = {
    "model": ("cnn", "vit"),
    "batch_size": (32, 128, 512),
    "workers": (0, 1, 2, 4),
    "cpus": (1.0, 2.0, 4.0),
}
STARTED = 1_700_000_000.0


def factors_of(levels: Mapping[str, Sequence[Level]]) -> tuple[Factor, ...]:
    return tuple(Factor(name, tuple(each)) for name, each in levels.items())


def design_of(name: str, levels: Mapping[str, Sequence[Level]], repeats: int = 3) -> Design:
    fixed: dict[str, Level] = {"seconds": 3.0, "memory": 4 << 30}
    if "model" not in levels:
        fixed = {"model": "cnn", **fixed}
    return Design(name, fixed, factors_of(levels), repeats=repeats)


def rate_of(levels: Mapping[str, Level]) -> float:
    """Return the throughput of a training that needs about three CPUs to load data."""
    number = {
        name: float(value) for name, value in levels.items() if isinstance(value, int | float)
    }
    cpus, batch = number.get("cpus", 2.0), number.get("batch_size", 32.0)
    busy_cpus = min(cpus, 1.0 + number.get("workers", 0.0) * 0.8)
    model = 400.0 if levels.get("model", "cnn") == "cnn" else 90.0
    return model * math.pow(min(busy_cpus, 2.8), 0.8) * math.pow(batch / 32, 0.06)


def values_of(levels: Mapping[str, Level], noise: float, gpu: bool) -> dict[str, float]:
    rate = rate_of(levels) * math.exp(noise)
    batch = float(levels.get("batch_size") or 32)
    values = {
        "samples_per_second": rate,
        "step_seconds": batch / rate,
        "data_wait_share": max(0.02, min(0.9, 0.7 - rate / 2000 + noise)),
        "cpu_share": min(0.99, 0.5 + 0.4 * math.sin(batch) ** 2 + noise),
        "host_memory_peak": 0.8e9 + 2.2e6 * batch + 2.1e8 * float(levels.get("workers") or 0),
    }
    if gpu:
        values |= {
            "gpu_utilization": min(0.99, 0.2 + rate / 2000 + noise),
            "gpu_memory_peak": 1.1e9 + 2.4e7 * batch,
            "joules_per_sample": 90 / rate + 0.02,
        }
    return values


def result_of(
    settings: Mapping[str, Any], repeat: int, block: int, rng: random.Random, gpu: bool = False
) -> Result:
    spec = make_spec(settings)
    levels = {name: spec.get(name) for name in settings}
    values = values_of(levels, rng.gauss(0, 0.02), gpu)
    return Result(
        spec.key,
        spec.settings,
        "trial",
        repeat,
        1,
        block,
        Outcome.OK,
        started=STARTED + 9.0 * repeat + 70.0 * block,
        seconds=8.2,
        values=values,
        low=values["samples_per_second"] * 0.95,
        high=values["samples_per_second"] * 1.05,
        cause="too few loader workers" if levels.get("workers") == 0 else "the model computes",
    )


def out_of_memory(result: Result) -> Result:
    reason = "killed: the memory limit of 4 GiB was exceeded"
    return replace(
        result, outcome=Outcome.HOST_OOM, reason=reason, values={}, low=None, high=None, cause=""
    )


def observations_of(results: Sequence[Result], names: Sequence[str]) -> list[Observation]:
    specs = {each.key: make_spec(each.settings) for each in results}
    return [
        Observation({name: specs[each.key].get(name) for name in names}, each.values, each.key)
        for each in results
        if each.is_ok
    ]


def view_of_results(
    design: Design, folder: Path, results: Sequence[Result], **fields: Any
) -> StudyView:
    """Return a study with these results, all of which count."""
    names = [factor.name for factor in design.factors]
    defaults: dict[str, Any] = {
        "planned": len(results),
        "skipped": (),
        "remaining": 0,
        "reruns": 0,
        "blocks": (),
        "elapsed_s": 600.0,
    }
    counted = [each for each in results if each.is_trial and each.is_result]
    return StudyView(
        name=design.name,
        folder=folder,
        machine=MACHINE,
        design=design,
        results=results,
        counted=counted,
        analysis=analyze(observations_of(counted, names), design.factors),
        **(defaults | fields),
    )


def grid(
    design: Design, rng: random.Random, gpu: bool = False, keep: Callable[..., bool] | None = None
) -> list[Result]:
    names = [factor.name for factor in design.factors]
    results: list[Result] = []
    for levels in product(*(factor.levels for factor in design.factors)):
        settings = dict(zip(names, levels, strict=True))
        if keep is not None and not keep(settings):
            continue
        for repeat in range(1, design.repeats + 1):
            block = len(results) // 8 + 1
            results.append(result_of({**design.fixed, **settings}, repeat, block, rng, gpu))
    return results


def usual_study(
    folder: Path, name: str = "cnn-on-two-cores", gpu: bool = False, running: bool = False
) -> StudyView:
    """Four factors, with OOMs, skipped combinations, a flagged block and a lost attempt."""
    design = design_of(name, FACTORS)
    results = grid(design, random.Random(6), gpu, keep=lambda s: s["workers"] <= s["cpus"])
    results = [
        out_of_memory(each) if _is_too_large(each) else each
        for each in results
        if not _is_skipped(each)
    ]
    lost = replace(results[7], outcome=Outcome.LOST, reason="the machine went down", values={})
    results[7] = replace(results[7], attempt=2)
    skipped = [SkippedPoint(levels, "workers > cpus (line 9)") for levels in too_many_workers()]
    too_large: dict[str, Level] = {"model": "vit", "batch_size": 512, "workers": 4, "cpus": 4.0}
    reason = "already failed (gpu_oom) with vit, batch_size 512, workers 2"
    skipped.append(SkippedPoint(too_large, reason))
    now = StudyProgress(
        4711, STARTED, "vit, batch_size 32, workers 2, cpus 2", phase="training", share=0.4
    )
    return view_of_results(
        design,
        folder,
        [*results, lost],
        planned=len(results) + 2 * running,
        remaining=2 * running,
        remaining_s=240.0 if running else None,
        skipped=skipped,
        blocks=blocks_of(len(results) // 8 + 1, flagged={5}),
        running=now if running else None,
        remarks=("1 line of the list of results was not readable and was restored",),
    )


def too_many_workers() -> list[Mapping[str, Level]]:
    return [
        {"model": model, "batch_size": batch, "workers": workers, "cpus": cpus}
        for model, batch in product(("cnn", "vit"), (32, 128, 512))
        for workers, cpus in product((0, 1, 2, 4), (1.0, 2.0, 4.0))
        if workers > cpus
    ]


def _is_too_large(result: Result) -> bool:
    settings = result.settings
    is_large = settings["model"] == "vit" and settings.get("batch_size") == 512
    return is_large and settings.get("workers") == 2


def _is_skipped(result: Result) -> bool:
    settings = result.settings
    return (settings["model"], settings.get("batch_size"), settings.get("workers")) == (
        "vit",
        512,
        4,
    )


def blocks_of(count: int, flagged: set[int]) -> tuple[BlockLine, ...]:
    rng = random.Random(1)
    reasons = (
        "the reference trial ran at 79% of its median throughput (400 samples/s)",
        "other processes used 1.4 of 2 cores in 3 of 8 trials",
    )
    return tuple(
        BlockLine(
            number,
            8,
            400 * (0.79 if number in flagged else 1.0) * math.exp(rng.gauss(0, 0.012)),
            number in flagged,
            reasons if number in flagged else (),
            number in flagged,
            STARTED + 70 * number,
        )
        for number in range(1, count + 1)
    )


def empty_study(folder: Path) -> StudyView:
    design = design_of("empty", FACTORS)
    return view_of_results(
        design, folder, [], planned=60, remaining=60, remaining_s=1500.0, elapsed_s=0.0
    )


def only_out_of_memory(folder: Path) -> StudyView:
    design = design_of("too-large", {"batch_size": (512, 1024)})
    results = [out_of_memory(each) for each in grid(design, random.Random(2))]
    return view_of_results(design, folder, results)


def one_factor(folder: Path) -> StudyView:
    design = design_of("workers", {"workers": (0, 1, 2, 4, 8)})
    return view_of_results(design, folder, grid(design, random.Random(3)))


def ten_factors(folder: Path) -> StudyView:
    levels: dict[str, Sequence[Level]] = {
        "batch_size": (32, 64),
        "workers": (0, 2),
        "cpus": (1.0, 2.0),
        "prefetch": (2, 4),
        "pin": (False, True),
        "persistent": (False, True),
        "channels_last": (False, True),
        "precision": ("fp32", "bf16"),
        "optimizer": ("sgd", "adamw"),
        "memory": (2 << 30, 4 << 30),
    }
    design = design_of("ten", levels, repeats=1)
    design = replace(design, fixed={"model": "cnn"})
    rng = random.Random(4)
    picked = set(rng.sample(range(2**10), 48))
    places = iter(range(2**10))
    results = grid(design, rng, keep=lambda _: next(places) in picked)
    return view_of_results(design, folder, results)


def many_trials(folder: Path, trials: int = 10_000) -> StudyView:
    batches = tuple(range(8, 8 + 8 * (trials // (3 * 12)), 8))
    levels = {"batch_size": batches, "workers": (0, 1, 2, 4), "cpus": (1.0, 2.0, 4.0)}
    design = design_of("many", levels)
    results = grid(design, random.Random(5))
    flagged = set(range(40, len(results) // 8, 97))
    return view_of_results(design, folder, results, blocks=blocks_of(len(results) // 8, flagged))


def nasty_study(folder: Path) -> StudyView:
    """A study whose texts contain HTML and terminal markup."""
    view = usual_study(folder, name=f"{NASTY} {BRACKETS}")
    blocks = [replace(block, reasons=(NASTY, BRACKETS), flagged=True) for block in view.blocks]
    results = [replace(each, cause=f"{BRACKETS} {NASTY}") for each in view.results]
    return replace(
        view,
        machine=f"{BRACKETS} {NASTY}",
        blocks=blocks,
        counted=[each for each in results if each.is_result],
        results=[*results, replace(results[0], outcome=Outcome.LOST, reason=f"{BRACKETS} {NASTY}")],
        skipped=[SkippedPoint({"model": NASTY, "data": BRACKETS}, f"{BRACKETS} {NASTY}")],
        remarks=[f"{BRACKETS} {NASTY}"],
    )
