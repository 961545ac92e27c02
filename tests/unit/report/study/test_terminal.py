"""The terminal output of a study: short and full, at 80 and 120 columns."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from stepscope.report.kit.terminal import draw
from stepscope.report.study.document import screen_of
from stepscope.report.study.view import StudyView
from synthetic_studies import (
    BRACKETS,
    NASTY,
    empty_study,
    many_trials,
    nasty_study,
    one_factor,
    only_out_of_memory,
    ten_factors,
    usual_study,
)

MANY = 600
MAKERS: dict[str, Callable[[Path], StudyView]] = {
    "usual": usual_study,
    "gpu": lambda folder: usual_study(folder, gpu=True, running=True),
    "one": one_factor,
    "ten": ten_factors,
    "empty": empty_study,
    "oom": only_out_of_memory,
    "many": lambda folder: many_trials(folder, MANY),
    "nasty": nasty_study,
}


@cache
def view_of(which: str) -> StudyView:
    return MAKERS[which](Path("studies", which))


def printed(which: str, width: int = 80, full: bool = False) -> str:
    out = io.StringIO()
    draw(Console(file=out, width=width), screen_of(view_of(which), width, full))
    return out.getvalue()


@pytest.mark.parametrize("full", [False, True], ids=["compact", "full"])
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("which", MAKERS)
def test_output_fits_the_terminal(which: str, width: int, full: bool) -> None:
    text = printed(which, width, full)
    assert max(map(len, text.splitlines())) <= width
    assert "�" not in text and "None" not in text
    if not full:
        assert len(text.splitlines()) < 50


def test_short_output() -> None:
    text = " ".join(printed("usual").split())
    for part in (
        "cnn-on-two-cores finished 159 trials, 6 ran out of memory, 19 combinations skipped",
        "seconds 3, memory 4 GiB · 2 × Intel Xeon Platinum 8480+ · 10 min elapsed",
        "Best for cnn 1,0",
        "batch_size 512, workers 4, cpus 4",
        "Main effects on throughput Factor Effect 90% interval Best level Significance model",
        "cnn: workers 2.05×",
        "Scaling",
        "Flagged block 5: the reference trial ran at 79% of its median throughput",
        "(rerun)",
        "Failed 1 attempt; last reason: the machine went down",
        "Skipped 18 combinations: workers > cpus (line 9)",
    ):
        assert part in text
    assert "Configurations" not in text


def test_sections_of_the_full_output_and_their_order() -> None:
    text = printed("gpu", 120, full=True)
    titles = (
        "Main effects on throughput\n",
        "Main effects on throughput, vit\n",
        "Marginal means: throughput\n",
        "Marginal means: GPU utilization\n",
        "Marginal means: energy per sample\n",
        "Scaling\n",
        "Throughput vs. GPU memory",
        "Configurations\n",
        "Blocks\n",
        "Failed attempts\n",
        "Notes\n",
    )
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    assert "Energy was not measured" not in text


def test_long_table_is_shortened() -> None:
    text = printed("many", 100, full=True)
    table = text[text.index("\nConfigurations") : text.index("\nBlocks")].strip().splitlines()
    assert len(table) == 23
    assert table[-1] == "and 172 more in configurations.csv"
    usual = printed("usual", 120, full=True)
    assert usual.count("out of host memory") >= 2, "failed configurations are always shown"


def test_ten_factors_are_columns_or_one_text() -> None:
    wide, narrow = (printed("ten", width, full=True) for width in (120, 80))
    assert "channels_last  precision  optimizer" in wide
    assert "Outcome  Configuration" in narrow


def test_user_text_is_not_markup() -> None:
    for full in (False, True):
        text = " ".join(printed("nasty", 120, full).split())
        assert f"{NASTY} {BRACKETS} finished" in text
        assert text.count(BRACKETS) >= 4


def test_missing_results() -> None:
    assert "No trial has finished yet." in printed("empty")
    text = printed("oom", full=True)
    assert "No trial succeeded" in text
    assert text.count("ran out of memory") == 1, "in the headline"
    assert text.count("out of host memory") == 2, "for each configuration"
