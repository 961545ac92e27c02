"""What is said of a study: in its headline, of the best, of what was skipped; and as JSON."""

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
from stepscope.report.study.sentences import best_level, effect_text, ranking_title
from stepscope.report.study.view import StudyView, skipped_groups
from stepscope.report.study.words import about_text, size_interval, size_text, thinned, tick_text
from synthetic_studies import (
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


def test_headline_counts_what_was_done_what_failed_and_what_is_left(tmp_path: Path) -> None:
    assert usual_study(tmp_path).headline == (
        "159 trials, 6 ran out of memory, 19 combinations skipped"
    )
    running = usual_study(tmp_path, running=True)
    assert running.headline.startswith("159 of 161 trials, ")
    assert running.headline.endswith(", 2 to go (about 4 min)")
    assert running.state == ("running", "neutral")
    assert running.now == "vit, batch_size 32, workers 2, cpus 2 (training, 40 %)"


def test_memory_of_host_and_gpu_is_one_count_and_other_failures_their_own(tmp_path: Path) -> None:
    results = grid(design_of("x", {"workers": (0, 1, 2)}, repeats=2), random.Random(1))
    ends = (Outcome.HOST_OOM, Outcome.GPU_OOM, Outcome.TIMEOUT, Outcome.CRASHED)
    results[:4] = [
        replace(out_of_memory(result), outcome=end)
        for result, end in zip(results[:4], ends, strict=True)
    ]
    view = view_of_results(design_of("x", {"workers": (0, 1, 2)}), tmp_path, results)
    assert view.headline == "6 trials, 2 ran out of memory, 1 timed out, 1 crashed"


def test_models_do_not_compare_so_each_has_its_best(tmp_path: Path) -> None:
    bests = usual_study(tmp_path).bests
    assert [best.group for best in bests] == ["cnn", "vit"]
    assert bests[0].levels == "batch_size 512, workers 4, cpus 4"
    assert bests[1].configuration.levels["model"] == "vit"
    assert bests[0].rate.startswith("1,0") and bests[0].rate.endswith(" samples/s")
    assert "–" in bests[0].interval
    assert "times the slowest" in bests[0].beats and "times the median of 27" in bests[0].beats


def test_what_is_as_good_is_named_by_what_it_has_otherwise(tmp_path: Path) -> None:
    (best,) = one_factor(tmp_path).bests
    assert best.group == ""
    assert best.levels in {"workers 2", "workers 4", "workers 8"}
    assert {best.levels, *best.as_good} == {"workers 2", "workers 4", "workers 8"}
    many = ten_factors(tmp_path).bests[0]
    assert many.as_good
    assert all(0 < text.count(",") + 1 < 10 for text in many.as_good)


def test_ranking_says_size_interval_and_best_level(tmp_path: Path) -> None:
    view = usual_study(tmp_path)
    assert [ranking_title(each) for each in view.rankings] == ["All trials", "cnn", "vit"]
    cpus = next(effect for effect in view.rankings[0].effects if effect.factor == "cpus")
    rate = RESPONSES[THROUGHPUT]
    assert best_level(cpus, rate) == "4" and cpus.is_significant
    size = size_text(cpus.size, rate)
    assert effect_text(cpus, rate) == f"{size} ({size_interval(cpus.size, rate)})"
    assert size.endswith("×")


def test_oom_points_are_configurations_too(tmp_path: Path) -> None:
    view = usual_study(tmp_path)
    assert len(view.configurations) == len(view.analysis.configurations) + 2
    failed = [point for point in view.configurations if not point.ok]
    assert [point.levels["cpus"] for point in failed] == [2.0, 4.0]
    assert {point.outcome_text for point in failed} == {"out of memory"}
    assert all("4 GiB" in point.cause and point.tone == "bad" for point in failed)
    best = view.configurations[0]
    assert best.ok == best.trials == 3 and best.cause == "the model computes"
    assert best.values["step_seconds"] == pytest.approx(512 / 1082, rel=0.05)


def test_a_point_of_which_some_repeats_failed_says_so(tmp_path: Path) -> None:
    design = design_of("x", {"workers": (0, 2)})
    results = grid(design, random.Random(1))
    results[0] = out_of_memory(results[0])
    view = view_of_results(design, tmp_path, results)
    mixed = next(point for point in view.configurations if point.levels["workers"] == 0)
    assert mixed.outcome_text == "2 ok, 1 out of memory"
    assert (mixed.tone, mixed.ok, mixed.trials) == ("warning", 2, 3)


def test_levels_that_settings_leave_out_are_known(tmp_path: Path) -> None:
    result = grid(design_of("x", {"workers": (0,), "pin": (False,)}), random.Random(1))[0]
    assert "workers" not in result.settings
    names = ("workers", "pin", "cpus", "machine")
    levels = levels_of(result.on("left"), names)
    assert levels == {"workers": 0, "pin": False, "cpus": None, "machine": "left"}


def test_machines_of_a_merged_study_are_told_apart(tmp_path: Path) -> None:
    view = one_factor(tmp_path)
    both = [each.on(name) for name in ("left", "right") for each in view.counted]
    view = replace(view, results=both, counted=both)
    assert view.factors == ("workers", "machine")


def test_skipped_combinations_are_grouped_by_reason(tmp_path: Path) -> None:
    first, second = skipped_groups(usual_study(tmp_path).skipped)
    assert (first.combinations, first.why) == (18, "workers > cpus (line 9)")
    assert second.combinations == 1 and second.example == "vit, batch_size 512, workers 4, cpus 4"


def test_energy_that_was_not_measured_is_said(tmp_path: Path) -> None:
    said = "Energy was not measured: no GPU that tells it."
    assert usual_study(tmp_path).not_measured == [said]
    assert usual_study(tmp_path, gpu=True).not_measured == []
    assert empty_study(tmp_path).not_measured == []


def test_a_remark_on_several_responses_is_made_once(tmp_path: Path) -> None:
    view = usual_study(tmp_path)
    said = [remark for remarks in view.effect_remarks.values() for remark in remarks]
    assert said and len(said) == len(set(said))
    assert len([r for each in view.analysis.effects for r in each.remarks]) > len(said)


@pytest.mark.parametrize(
    ("make", "lack"),
    [
        (empty_study, "Nothing has finished yet."),
        (only_out_of_memory, "None of the trials trained, so there is nothing to compare."),
        (one_factor, ""),
    ],
)
def test_why_there_is_nothing_to_compare(tmp_path: Path, make: object, lack: str) -> None:
    assert callable(make)
    view = make(tmp_path)
    assert isinstance(view, StudyView)
    assert view.lack == lack


def test_json_has_all_of_it_and_no_number_that_is_none(tmp_path: Path) -> None:
    view = usual_study(tmp_path, gpu=True, running=True)
    told = json.loads(json.dumps(study_dict(view), allow_nan=False))
    assert told["format"] == 1
    assert told["trials"] == {
        "planned": 161,
        "finished": 159,
        "pending": 2,
        "attempts": 160,
        "disturbed": 0,
        "outcomes": {"host_oom": 6, "ok": 153},
    }
    assert told["best"][0]["levels"] == {
        "model": "cnn",
        "batch_size": 512,
        "workers": 4,
        "cpus": 4.0,
    }
    assert [each["group"] for each in told["sensitivity"]] == [
        {},
        {"model": "cnn"},
        {"model": "vit"},
    ]
    assert told["running"]["pid"] == 4711
    assert len(told["configurations"]) == 53 and len(told["skipped"]) == 19
    assert told["failures"][0]["outcome"] == "lost"
    for make in (empty_study, only_out_of_memory):
        json.dumps(study_dict(make(tmp_path)), allow_nan=False)


def test_words_for_numbers() -> None:
    rate, share, size = (
        RESPONSES[key] for key in ("samples_per_second", "cpu_share", "host_memory_peak")
    )
    assert size_interval(Estimate(1.28, 1.21, 1.36), rate) == "1.21–1.36"
    assert size_interval(Estimate(0.01, -0.02, 0.04), share) == "−2.0 to 4.0"
    assert size_interval(Estimate(2.0, 0.0, float("inf")), rate) == ""
    assert [tick_text(v, size) for v in (0.0, 5e9, 2.5e9)] == ["0 B", "5 GB", "2.5 GB"]
    assert [tick_text(v, rate) for v in (0.0, 50.0, 0.25, 1500.0)] == ["0", "50", "0.25", "1,500"]
    assert [about_text(s) for s in (None, 40, 240, 9000)] == ["", "40 s", "4 min", "2.5 h"]
    assert thinned(range(1000), 5) == [0, 250, 500, 749, 999]
