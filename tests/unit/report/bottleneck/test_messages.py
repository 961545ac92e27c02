"""The tables of texts are complete, and recommended options exist."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

from stepscope.analysis.bottleneck.causes import CAUSES
from stepscope.records import Evidence, Finding, Recommendation
from stepscope.report.bottleneck.actions import ACTIONS
from stepscope.report.bottleneck.messages import CAUSE_TEXTS, fill
from stepscope.report.bottleneck.view import RecommendationView, diagnosis_view
from stepscope.workloads.spec import Workload
from synthetic_diagnoses import BAD, LOADER, WORKERS


def view_of(recommendation: Recommendation, *, for_trial: bool) -> RecommendationView:
    finding = replace(WORKERS, recommendations=(recommendation,))
    view = diagnosis_view(replace(BAD, findings=(finding,)), for_trial=for_trial)
    return view.first.recommendations[0]


def test_every_cause_has_texts_and_explains_only_causes() -> None:
    assert set(CAUSE_TEXTS) == set(CAUSES)
    assert {key for cause in CAUSES.values() for key in cause.explains} <= set(CAUSES)


@pytest.mark.parametrize(
    ("recommendation", "option"),
    [
        (Recommendation("enough_workers", "workers", 12, LOADER), "--workers 12"),
        (Recommendation("smaller_batch", "batch_size", 64, LOADER), "--batch-size 64"),
        (Recommendation("prefetch_more", "prefetch", 4, LOADER), "--prefetch 4"),
        (Recommendation("pin_memory", "pin", True, LOADER), "--pin"),
        (Recommendation("keep_workers", "persistent", True, LOADER), "--persistent"),
        (Recommendation("tf32", "precision", "tf32"), "--precision tf32"),
        (Recommendation("bf16", "precision", "bf16"), "--precision bf16"),
        (Recommendation("compile_to_graphs", "compile", True), "--compile"),
    ],
)
def test_setting_is_an_option_of_a_trial(recommendation: Recommendation, option: str) -> None:
    view = view_of(recommendation, for_trial=True)
    assert (view.change, view.location, view.code) == (f"Use {option}", None, None)
    assert recommendation.setting in {field.name for field in dataclasses.fields(Workload)}


def test_every_option_is_a_setting() -> None:
    settings = {field.name for field in dataclasses.fields(Workload)}
    options = [texts.option for texts in ACTIONS.values() if texts.option]
    assert {each.split()[0][2:].replace("-", "_") for each in options} <= settings


def test_recommendation_for_a_script_has_the_line_of_code() -> None:
    view = view_of(Recommendation("enough_workers", "workers", 12, LOADER), for_trial=False)
    assert view.change == "Set num_workers=12"
    assert view.reason == "Preparing a batch takes 183 ms, and training needs one every 70 ms."
    assert (view.location, view.code) == ("train.py:41", LOADER.code)


def test_action_without_an_option_is_the_same_for_a_trial() -> None:
    view = view_of(Recommendation("save_less_often", location=LOADER), for_trial=True)
    assert view.change.startswith("Save less often") and view.location == "train.py:41"


@pytest.mark.parametrize("action", ACTIONS)
def test_recommendations_are_sentences(action: str) -> None:
    texts = ACTIONS[action]
    assert texts.change[0].isupper() and not texts.change.endswith(".")
    assert not texts.reason or texts.reason.endswith(".")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (90.0, ", and memory will run out in about 90 s"),
        (3600.0, ", and memory will run out in about 60 minutes"),
        (36e3, ", and memory will run out in about 10 hours"),
        (864e3, ", and memory will run out in about 10 days"),
        (0.0, ", and memory will run out in about 0 s"),
    ],
)
def test_time_until_memory_is_exhausted(seconds: float | None, text: str) -> None:
    assert fill("{seconds_left:until}", {"seconds_left": seconds}) == text


def test_growth_has_a_readable_unit() -> None:
    assert fill("{rate:growth}", {"rate": 12.3 * (1 << 20)}) == "12.3 MiB/s"
    assert fill("{rate:growth}", {"rate": 1 << 10}) == "3.52 MiB per hour"


def test_optional_part_without_its_value_is_omitted() -> None:
    template = "logging[, mostly at {location}]."
    assert fill(template, {"location": "a[0].py:3"}) == "logging, mostly at a[0].py:3."
    assert fill(template, {"location": None}) == fill(template, {}) == "logging."


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0123, "12 ms"), (0.183, "183 ms"), (6.21e-5, "62 µs"), (1.39, "1.4 s"), (None, "–")],
)
def test_durations_in_sentences(seconds: float | None, text: str) -> None:
    assert fill("{seconds:time}", {"seconds": seconds}) == text


@pytest.mark.parametrize("cause", CAUSE_TEXTS)
def test_titles_are_headings_and_meanings_are_sentences(cause: str) -> None:
    texts = CAUSE_TEXTS[cause]
    assert texts.title[0].isupper() and not texts.title.endswith(".")
    assert texts.meaning.endswith(".")


def test_reasons_are_joined() -> None:
    found = Finding("input.ipc", "low", 1.2, reasons=("wait_is_small", "transfer_not_measured"))
    evidence = (Evidence("data_wait", 0.3, "share"), Evidence("workers_busy", 0.2, "share"))
    view = diagnosis_view(replace(BAD, findings=(replace(found, evidence=evidence),)))
    assert view.first.reason == (
        "the wait was measured, but is a small part of the step; "
        "the transfer itself was not measured"
    )
