"""A study as it is printed: on one screen or in full, at 80 and 120 columns."""

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
def test_every_study_fits_the_terminal(which: str, width: int, full: bool) -> None:
    text = printed(which, width, full)
    assert max(map(len, text.splitlines())) <= width
    assert "�" not in text and "None" not in text.replace("None of the trials", "")
    if not full:
        assert len(text.splitlines()) < 50


def test_a_screen_says_what_came_out_of_it() -> None:
    text = " ".join(printed("usual").split())
    for part in (
        "cnn-on-two-cores finished 159 trials, 6 ran out of memory, 19 combinations skipped",
        "seconds 3, memory 4 GiB · 2 × Intel Xeon Platinum 8480+ · took 10 min",
        "Best of cnn 1,0",
        "batch_size 512, workers 4, cpus 4",
        "What matters for throughput Factor Matters 90 % between Best model",
        "for cnn workers matter",
        "Scaling",
        "Disturbed block 5: its sentinel was 21 % slower than usual",
        "(run again)",
        "Failed 1 attempt, the last: the machine went down",
        "Skipped 18 combinations: workers > cpus (line 9)",
    ):
        assert part in text
    assert "Configurations" not in text


def test_in_full_there_are_tables_in_the_order_of_interest() -> None:
    text = printed("gpu", 120, full=True)
    titles = (
        "What matters for throughput",
        "What matters for vit",
        "\nThroughput\n",
        "GPU utilisation\n",
        "Energy per sample\n",
        "Scaling",
        "Throughput against GPU memory",
        "Configurations",
        "Blocks",
        "Attempts that answered nothing",
        "Noted",
    )
    places = [text.index(title) for title in titles]
    assert places == sorted(places)
    assert "Energy was not measured" not in text


def test_a_long_table_is_cut_and_says_where_the_rest_is() -> None:
    text = printed("many", 100, full=True)
    table = text[text.index("\nConfigurations") : text.index("\nBlocks")].strip().splitlines()
    assert len(table) == 23
    assert table[-1] == "and 172 more, in configurations.csv"
    usual = printed("usual", 120, full=True)
    assert usual.count("out of memory") >= 2, "an OOM is shown though it is the slowest"


def test_ten_factors_are_columns_where_they_fit_and_a_text_where_not() -> None:
    wide, narrow = (printed("ten", width, full=True) for width in (120, 80))
    assert "channels_last  precision  optimizer" in wide
    assert "Outcome  Configuration" in narrow


def test_nothing_that_users_say_is_markup() -> None:
    for full in (False, True):
        text = " ".join(printed("nasty", 120, full).split())
        assert f"{NASTY} {BRACKETS} finished" in text
        assert text.count(BRACKETS) >= 4


def test_nothing_finished_and_nothing_trained_are_said() -> None:
    assert "Nothing has finished yet." in printed("empty")
    text = printed("oom", full=True)
    assert "None of the trials trained" in text
    assert text.count("out of memory") == 3, "in the headline and of each configuration"
