"""The view of a study: headline, best configurations, skipped combinations, and its JSON."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.analysis.study.records import RESPONSES, THROUGHPUT, Estimate
from stepscope.records import Outcome
from stepscope.report.study.configurations import levels_of
from stepscope.report.study.export import study_dict
from stepscope.report.study.format import about_text, size_interval, size_text, thinned, tick_text
from stepscope.report.study.messages import best_level, effect_text, ranking_title
from stepscope.report.study.view import StudyView, skipped_groups
from synthetic_studies import (
    STARTED,
    design_of,
    empty_study,
    grid,
    one_factor,
    only_out_of_memory,
    out_of_memory,
    ten_factors,
    usual_study,
    view_of_results,
)


def test_headline(tmp_path: Path) -> None:
    assert usual_study(tmp_path).headline == (
        "159 trials, 6 ran out of memory, 19 combinations skipped"
    )
    running = usual_study(tmp_path, running=True)
    assert running.headline == (
        "159 of 161 trials done, 2 remaining (about 4 min), 6 ran out of memory, "
        "19 combinations skipped"
    )
    assert running.state == ("running", "neutral")
    assert running.now == "vit, batch_size 32, workers 2, cpus 2 (training, 40%)"


def test_headline_combines_host_and_gpu_memory(tmp_path: Path) -> None:
    results = grid(design_of("x", {"workers": (0, 1, 2)}, repeats=2), random.Random(1))
    outcomes = (Outcome.HOST_OOM, Outcome.GPU_OOM, Outcome.TIMEOUT, Outcome.CRASHED)
    results[:4] = [
        replace(out_of_memory(result), outcome=outcome)
        for result, outcome in zip(results[:4], outcomes, strict=True)
    ]
    view = view_of_results(design_of("x", {"workers": (0, 1, 2)}), tmp_path, results)
    assert view.headline == "6 trials, 2 ran out of memory, 1 timed out, 1 crashed"


def test_each_model_has_its_best_configuration(tmp_path: Path) -> None:
    bests = usual_study(tmp_path).bests
    assert [best.group for best in bests] == ["cnn", "vit"]
    assert bests[0].levels == "batch_size 512, workers 4, cpus 4"
    assert bests[1].configuration.levels["model"] == "vit"
    assert bests[0].throughput.startswith("1,0")
    assert bests[0].throughput.endswith(" samples/s")
    assert "–" in bests[0].interval
    assert "× the slowest, " in bests[0].speedup
    assert bests[0].speedup.endswith("× the median of 27 configurations")


def test_equivalent_configurations_are_named_by_their_differences(tmp_path: Path) -> None:
    (best,) = one_factor(tmp_path).bests
    assert best.group == ""
    assert best.levels in {"workers 2", "workers 4", "workers 8"}
    assert {best.levels, *best.equivalent} == {"workers 2", "workers 4", "workers 8"}
    many = ten_factors(tmp_path).bests[0]
    assert many.equivalent
    assert all(0 < text.count(",") + 1 < 10 for text in many.equivalent)


def test_ranking(tmp_path: Path) -> None:
    view = usual_study(tmp_path)
    assert [ranking_title(each) for each in view.rankings] == ["All trials", "cnn", "vit"]
    cpus = next(effect for effect in view.rankings[0].effects if effect.factor == "cpus")
    rate = RESPONSES[THROUGHPUT]
    assert best_level(cpus, rate) == "4" and cpus.is_significant
    size = size_text(cpus.size, rate)
    assert effect_text(cpus, rate) == f"{size} ({size_interval(cpus.size, rate)})"
    assert size.endswith("×")


def test_configurations_that_ran_out_of_memory(tmp_path: Path) -> None:
    view = usual_study(tmp_path)
    assert len(view.configurations) == len(view.analysis.configurations) + 2
    failed = [point for point in view.configurations if not point.ok]
    assert [point.levels["cpus"] for point in failed] == [2.0, 4.0]
    assert {point.outcome_text for point in failed} == {"out of host memory"}
    assert all("4 GiB" in point.cause and point.tone == "bad" for point in failed)
    best = view.configurations[0]
    assert best.ok == best.trials == 3 and best.cause == "the model computes"
    assert best.values["step_seconds"] == pytest.approx(512 / 1082, rel=0.05)


def test_configuration_with_some_failed_repeats(tmp_path: Path) -> None:
    design = design_of("x", {"workers": (0, 2)})
    results = grid(design, random.Random(1))
    results[0] = out_of_memory(results[0])
    view = view_of_results(design, tmp_path, results)
    mixed = next(point for point in view.configurations if point.levels["workers"] == 0)
    assert mixed.outcome_text == "2 ok, 1 out of host memory"
    assert (mixed.tone, mixed.ok, mixed.trials) == ("warning", 2, 3)


def test_levels_include_defaults(tmp_path: Path) -> None:
    result = grid(design_of("x", {"workers": (0,), "pin": (False,)}), random.Random(1))[0]
    assert "workers" not in result.settings
    names = ("workers", "pin", "cpus", "machine")
    levels = levels_of(result.on("left"), names)
    assert levels == {"workers": 0, "pin": False, "cpus": None, "machine": "left"}


def test_machine_is_a_factor_of_a_merged_study(tmp_path: Path) -> None:
    view = one_factor(tmp_path)
    both = [each.on(name) for name in ("left", "right") for each in view.counted]
    view = replace(view, results=both, counted=both)
    assert view.factors == ("workers", "machine")


def test_skipped_combinations_are_grouped_by_reason(tmp_path: Path) -> None:
    first, second = skipped_groups(usual_study(tmp_path).skipped)
    assert (first.combinations, first.reason) == (18, "workers > cpus (line 9)")
    assert second.combinations == 1 and second.example == "vit, batch_size 512, workers 4, cpus 4"


def test_missing_energy_is_reported(tmp_path: Path) -> None:
    expected = "Energy was not measured: there is no GPU that reports it."
    assert usual_study(tmp_path).not_measured == [expected]
    assert usual_study(tmp_path, gpu=True).not_measured == []
    assert empty_study(tmp_path).not_measured == []


def test_remark_on_several_responses_appears_once(tmp_path: Path) -> None:
    view = usual_study(tmp_path)
    remarks = [remark for each in view.effect_remarks.values() for remark in each]
    assert remarks and len(remarks) == len(set(remarks))
    assert len([r for each in view.analysis.effects for r in each.remarks]) > len(remarks)


def test_warning_if_many_trials_had_interference(tmp_path: Path) -> None:
    view = one_factor(tmp_path)
    assert replace(view, with_interference=3).warning == ""
    warned = replace(view, with_interference=4)
    assert warned.warning.startswith("4 of 15 trials ran in blocks with interference")
    assert "`reruns`" in warned.warning and warned.state == ("finished", "warning")


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (empty_study, "No trial has finished yet."),
        (only_out_of_memory, "No trial succeeded, so there is nothing to compare."),
        (one_factor, ""),
    ],
)
def test_missing_results(tmp_path: Path, make: object, text: str) -> None:
    assert callable(make)
    view = make(tmp_path)
    assert isinstance(view, StudyView)
    assert view.missing_results == text


def test_json(tmp_path: Path) -> None:
    view = usual_study(tmp_path, gpu=True, running=True)
    exported = json.loads(json.dumps(study_dict(view), allow_nan=False))
    assert exported["format"] == 1
    assert exported["trials"] == {
        "planned": 161,
        "done": 159,
        "remaining": 2,
        "reruns": 0,
        "attempts": 160,
        "with_interference": 0,
        "outcomes": {"host_oom": 6, "ok": 153},
    }
    assert exported["best"][0]["levels"] == {
        "model": "cnn",
        "batch_size": 512,
        "workers": 4,
        "cpus": 4.0,
    }
    assert [each["group"] for each in exported["sensitivity"]] == [
        {},
        {"model": "cnn"},
        {"model": "vit"},
    ]
    assert exported["running"] == {
        "pid": 4711,
        "updated_unix_seconds": STARTED,
        "trial": "vit, batch_size 32, workers 2, cpus 2",
        "phase": "training",
        "progress_share": 0.4,
    }
    throughput, *others = exported["effects"]
    assert throughput["response"] == "samples_per_second"
    assert 0.9 < throughput["explained_variance_share"] <= 1
    assert "gpu_memory_peak_bytes" in [effects["response"] for effects in others]
    assert list(throughput["main"][0]) == [
        "factor",
        "levels",
        "highest_level",
        "lowest_level",
        "size",
        "significant",
    ]
    curve = next(each for each in exported["curves"] if each["knee"])
    assert list(curve) == ["factor", "group", "points", "knee", "summary"]
    assert list(curve["knee"]) == ["level", "gain", "certain"]
    assert exported["fronts"][0]["responses"] == ["samples_per_second", "gpu_memory_peak_bytes"]
    assert list(exported["blocks"][0]) == [
        "block",
        "trials",
        "reference_samples_per_second",
        "flagged",
        "reasons",
        "rerun",
        "started_unix_seconds",
    ]
    assert len(exported["configurations"]) == 53 and len(exported["skipped"]) == 19
    assert exported["failures"][0]["outcome"] == "lost"
    for make in (empty_study, only_out_of_memory):
        json.dumps(study_dict(make(tmp_path)), allow_nan=False)


def test_formatting_of_numbers() -> None:
    rate, share, size = (
        RESPONSES[key] for key in ("samples_per_second", "cpu_share", "host_memory_peak")
    )
    assert size_interval(Estimate(1.28, 1.21, 1.36), rate) == "1.21–1.36"
    assert size_interval(Estimate(0.01, -0.02, 0.04), share) == "−2.0 to 4.0"
    assert size_interval(Estimate(2.0, 0.0, float("inf")), rate) == ""
    assert [tick_text(v * 2**30, size) for v in (0, 5, 2.5)] == ["0 B", "5 GiB", "2.5 GiB"]
    assert [tick_text(v, rate) for v in (0.0, 50.0, 0.25, 1500.0)] == ["0", "50", "0.25", "1,500"]
    assert [about_text(s) for s in (None, 40, 240, 9000)] == ["", "40 s", "4 min", "2.5 h"]
    assert thinned(range(1000), 5) == [0, 250, 500, 749, 999]
