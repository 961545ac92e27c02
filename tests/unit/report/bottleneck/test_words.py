"""The tables of words: a row for everything that the analysis can find, and options that exist."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import pytest

from stepscope.analysis.bottleneck.causes import CAUSES
from stepscope.records import Evidence, Finding, Recommendation
from stepscope.report.bottleneck.actions import ACTIONS
from stepscope.report.bottleneck.view import RecommendationView, diagnosis_view
from stepscope.report.bottleneck.words import CAUSE_WORDS, fill
from stepscope.workloads.spec import Workload
from synthetic_diagnoses import BAD, LOADER, WORKERS


def worded(recommendation: Recommendation, *, for_trial: bool) -> RecommendationView:
    finding = replace(WORKERS, recommendations=(recommendation,))
    view = diagnosis_view(replace(BAD, findings=(finding,)), for_trial=for_trial)
    return view.first.recommendations[0]


def test_every_cause_has_words_and_what_it_explains_is_a_cause() -> None:
    assert set(CAUSE_WORDS) == set(CAUSES)
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
def test_a_setting_is_an_option_of_a_trial(recommendation: Recommendation, option: str) -> None:
    told = worded(recommendation, for_trial=True)
    assert (told.change, told.where, told.line) == (option, None, None)
    assert recommendation.setting in {field.name for field in dataclasses.fields(Workload)}


def test_every_option_is_one_that_a_trial_has() -> None:
    settings = {field.name for field in dataclasses.fields(Workload)}
    options = [words.option for words in ACTIONS.values() if words.option]
    assert {each.split()[0][2:].replace("-", "_") for each in options} <= settings


def test_a_script_is_told_its_own_line() -> None:
    told = worded(Recommendation("enough_workers", "workers", 12, LOADER), for_trial=False)
    assert told.change == "num_workers=12"
    assert told.why == "a batch takes 183 ms to prepare and is needed every 70 ms"
    assert (told.where, told.line) == ("train.py:41", LOADER.code)


def test_what_is_not_an_option_stays_as_it_is() -> None:
    told = worded(Recommendation("save_less_often", location=LOADER), for_trial=True)
    assert told.change.startswith("save less often") and told.where == "train.py:41"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "until it is gone"),
        (90.0, "and is gone in about 90 s"),
        (3600.0, "and is gone in about 60 minutes"),
        (36e3, "and is gone in about 10 hours"),
        (864e3, "and is gone in about 10 days"),
        (0.0, "and is gone in about 0 s"),
    ],
)
def test_when_memory_will_be_gone_is_said(seconds: float | None, words: str) -> None:
    assert fill("{seconds_left:until}", {"seconds_left": seconds}) == words


def test_growth_is_said_in_a_unit_that_shows_it() -> None:
    assert fill("{rate:growth}", {"rate": 12.3e6}) == "12.3 MB/s"
    assert fill("{rate:growth}", {"rate": 1e3}) == "3.6 MB an hour"


def test_a_part_without_its_value_is_left_out() -> None:
    template = "logging[, most of it at {where}]."
    assert fill(template, {"where": "a[0].py:3"}) == "logging, most of it at a[0].py:3."
    assert fill(template, {"where": None}) == fill(template, {}) == "logging."


@pytest.mark.parametrize("cause", CAUSE_WORDS)
def test_titles_go_into_sentences(cause: str) -> None:
    words = CAUSE_WORDS[cause]
    assert re.match(r"[a-z]|GPU|CPU", words.title) and not words.title.endswith(".")
    assert words.meaning.endswith(".")


def test_reasons_are_put_together() -> None:
    found = Finding("input.handover", "low", 1.2, reasons=("wait_is_small", "handover_unseen"))
    evidence = (Evidence("data_wait", 0.3, "share"), Evidence("workers_busy", 0.2, "share"))
    view = diagnosis_view(replace(BAD, findings=(replace(found, evidence=evidence),)))
    assert view.first.reason == (
        "the wait was measured, but it is a small part of the step; "
        "what the hand-over does was not seen"
    )
