"""The page of a study: content, size and escaping."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.study.records import Estimate
from stepscope.report.kit.html import render
from stepscope.report.kit.svg import WIDTH, Scale, bottom_axis, log_ticks, padded, ticks
from stepscope.report.study.document import page_of, write_report
from stepscope.report.study.plots import MAX_POINTS, curve_plot, ranking_plot, reference_plot
from synthetic_studies import (
    NASTY,
    blocks_of,
    empty_study,
    many_trials,
    nasty_study,
    one_factor,
    only_out_of_memory,
    ten_factors,
    usual_study,
)

SVG = "{http://www.w3.org/2000/svg}"
NUMBERS = st.floats(-1e12, 1e12)


def pictures(page: str) -> list[ElementTree.Element]:
    """Return all plots of a page, parsed as XML."""
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


@pytest.mark.parametrize(
    "make", [usual_study, one_factor, ten_factors, empty_study, only_out_of_memory, nasty_study]
)
def test_plots_are_well_formed_and_labeled(tmp_path: Path, make: object) -> None:
    assert callable(make)
    page = render(page_of(make(tmp_path)))
    for picture in pictures(page):
        assert picture.attrib["role"] == "img" and picture.attrib["aria-label"]
        assert picture.find(f"{SVG}title") is not None
        for each in picture.iter():
            for name in ("x", "x1", "x2", "cx"):
                if name in each.attrib:
                    assert -20 <= float(each.attrib[name]) <= WIDTH + 20
    assert "nan" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL).lower().split()


def test_sections_and_their_order(tmp_path: Path) -> None:
    page = render(page_of(usual_study(tmp_path, gpu=True)))
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "Best configuration",
        "Main effects",
        "Interactions",
        "Scaling",
        "Trade-offs (Pareto fronts)",
        "Configurations",
        "Noise",
        "Skipped combinations",
        "Notes",
    ]
    kinds = {picture.attrib["class"].split()[1] for picture in pictures(page)}
    assert kinds == {"ranking", "effects", "interaction", "curve", "front", "reference"}


def test_page_without_results(tmp_path: Path) -> None:
    page = render(page_of(empty_study(tmp_path)))
    assert "No trial has finished yet." in page and not pictures(page)
    page = render(page_of(only_out_of_memory(tmp_path)))
    assert "No trial succeeded" in page and page.count("out of host memory") >= 2


def test_page_size_with_many_trials(tmp_path: Path) -> None:
    assert len(render(page_of(usual_study(tmp_path))).encode()) < 200_000
    page = render(page_of(many_trials(tmp_path)))
    assert len(page.encode()) < 400_000
    for picture in pictures(page):
        assert len(picture.findall(f".//{SVG}circle")) <= 2 * MAX_POINTS
    assert "more in configurations.csv" in page


def test_user_text_is_escaped(tmp_path: Path) -> None:
    path = write_report(nasty_study(tmp_path), tmp_path / "new")
    page = path.read_text(encoding="utf-8")
    assert path.name == "report.html"
    assert "<script" not in page and " style=" not in page
    assert NASTY not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "script-src" not in page and "default-src 'none'" in page


def test_knee_is_marked(tmp_path: Path) -> None:
    view = usual_study(tmp_path)
    with_knee = [each for each in view.analysis.curves if each.knee]
    assert with_knee
    for each in with_knee:
        picture = ElementTree.fromstring(curve_plot(each).svg)
        texts = [text.text for text in picture.iter(f"{SVG}text")]
        assert each.knee is not None
        assert f"knee: {each.knee.level:g}" in texts
        assert picture.find(f".//{SVG}circle[@class='knee-dot']") is not None


def test_powers_of_two_have_a_logarithmic_axis() -> None:
    view = one_factor(Path())
    curve = view.analysis.curves[0]
    levels = [replace(point, level=2**place) for place, point in enumerate(curve.points)]
    doubled = replace(curve, points=tuple(levels), knee=None)
    dots = ElementTree.fromstring(curve_plot(doubled).svg).findall(f".//{SVG}circle")
    xs = [float(dot.attrib["cx"]) for dot in dots]
    gaps = [after - before for before, after in zip(xs, xs[1:], strict=False)]
    assert max(gaps) - min(gaps) < 0.2


def test_memory_axis_has_round_binary_ticks(tmp_path: Path) -> None:
    page = render(page_of(usual_study(tmp_path, gpu=True)))
    ticks = set(re.findall(r">([\d.]+ GiB)</text>", page))
    assert {"4 GiB", "8 GiB", "12 GiB"} <= ticks


def test_effect_without_interval_has_no_whisker(tmp_path: Path) -> None:
    ranking = one_factor(tmp_path).rankings[0]
    effect = ranking.effects[0]
    assert "whisker" in ranking_plot(ranking, 3.0).svg
    unknown = replace(effect, size=Estimate(effect.size.value, 0.0, math.inf))
    bare = replace(ranking, effects=(unknown,))
    assert "whisker" not in ranking_plot(bare, 3.0).svg


def test_flagged_blocks_are_crosses_with_reasons() -> None:
    drawn = reference_plot(blocks_of(20, {3, 7})).svg
    assert drawn.count('class="flagged"') == 2
    assert "block 3: " in drawn and "79% of its median throughput" in drawn
    many = reference_plot(blocks_of(5000, set(range(0, 5000, 2)))).svg
    assert many.count("<circle") <= MAX_POINTS and many.count("<path") <= MAX_POINTS + 1


@given(NUMBERS, st.floats(1e-6, 1e12))
def test_ticks_are_few_and_inside(low: float, span: float) -> None:
    high = low + span
    result = ticks(low, high)
    if span > 1e-9 * max(abs(low), abs(high)):
        assert 2 <= len(result) <= 12
        slack = span * 1e-6
        assert all(low - slack <= tick <= high + slack for tick in result)


@given(st.floats(1.001, 1e9))
def test_logarithmic_ticks_start_at_one(high: float) -> None:
    result = log_ticks(high)
    assert result[0] == 1 and result == sorted(result) and len(result) <= 6
    assert result[-1] <= high * 1.001


@given(st.lists(st.floats(-1e9, 1e9), min_size=1))
def test_padded_range_contains_all_values(values: list[float]) -> None:
    low, high = padded(values)
    assert low < high
    assert low <= min(values) and max(values) <= high


@given(st.lists(st.floats(0, 100), max_size=30))
def test_axis_labels_do_not_overlap(places: list[float]) -> None:
    labeled = [(place, f"{place:.2f}") for place in sorted(places)]
    drawn = "".join(bottom_axis(Scale(0, 100, 40, 390), 200, labeled))
    spans = [
        (float(x) - len(label) * 3.15, float(x) + len(label) * 3.15)
        for x, label in re.findall(r'<text x="([\d.]+)"[^>]*>([^<]+)</text>', drawn)
    ]
    assert bool(spans) == bool(places)
    assert all(one[1] <= other[0] for one, other in zip(spans, spans[1:], strict=False))
