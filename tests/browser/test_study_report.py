"""The report of a study in a browser: layout, contrast, and no requests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from stepscope.report.study.document import write_report
from stepscope.report.study.view import StudyView
from synthetic_studies import (
    NASTY,
    empty_study,
    many_trials,
    nasty_study,
    one_factor,
    ten_factors,
    usual_study,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = ["--no-sandbox", "--disable-background-networking", "--disable-gpu", "--no-first-run"]

if CHROMIUM is None and not os.environ.get("CI"):
    pytest.skip("Chromium is not installed", allow_module_level=True)

PLOTS = """() => [...document.querySelectorAll("svg.study-plot")].map((svg) => {
  const {left, right, width, height} = svg.getBoundingClientRect();
  const boxes = [...svg.querySelectorAll("text")].map((t) => t.getBoundingClientRect());
  const apart = (a, b) => a.right <= b.left + 1 || b.right <= a.left + 1 ||
    a.bottom <= b.top + 4 || b.bottom <= a.top + 4;
  const close = boxes.filter((a, i) => boxes.slice(i + 1).some((b) => !apart(a, b))).length;
  return {left, right, width, height, close, label: svg.getAttribute("aria-label")};
})"""
"""The position of each plot, and the number of its texts that overlap."""
CONTRAST = """selector => {
  const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const light = ([r, g, b]) => {
    const linear = (v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  };
  const card = light(rgb(getComputedStyle(document.querySelector(".card")).backgroundColor));
  return [...document.querySelectorAll(selector)].map((each) => {
    const style = getComputedStyle(each);
    const ink = light(rgb(each.closest("svg") ? style.fill : style.color));
    return (Math.max(ink, card) + 0.05) / (Math.min(ink, card) + 0.05);
  });
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None, "CI needs Chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, view: StudyView, folder: Path) -> Iterator[Page]:
    """Open the page of a study; afterwards, check that there were no requests and no errors."""
    path = write_report(view, folder)
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    requests: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(dialog.message))
    page.goto(path.as_uri())
    yield page
    page.close()
    assert requests == [path.as_uri()]
    assert not errors


def test_sections_are_visible_and_texts_do_not_overlap(browser: Browser, tmp_path: Path) -> None:
    with opened(browser, usual_study(tmp_path, gpu=True), tmp_path) as page:
        assert page.locator(".identity .badge.good").inner_text() == "finished"
        titles = page.locator("main > section > h2").all_inner_texts()
        assert titles[:3] == ["Best configuration", "Main effects", "Interactions"]
        assert titles[-3:] == ["Noise", "Skipped combinations", "Notes"]
        plots = page.evaluate(PLOTS)
        assert len(plots) > 20
        for plot in plots:
            assert plot["width"] > 250 and plot["height"] > 60
            assert plot["close"] == 0, plot["label"]
        reference = "Throughput of the reference trial in 20 blocks"
        assert page.get_by_role("img", name=reference).is_visible()
        assert page.locator("td.bad", has_text="out of host memory").count() == 2


@pytest.mark.parametrize(
    "make",
    [
        usual_study,
        one_factor,
        ten_factors,
        empty_study,
        nasty_study,
        lambda folder: many_trials(folder, 400),
    ],
    ids=["usual", "one", "ten", "empty", "nasty", "many"],
)
def test_page_fits_a_phone(
    browser: Browser, tmp_path: Path, make: Callable[[Path], StudyView]
) -> None:
    with opened(browser, make(tmp_path), tmp_path) as page:
        for width in (400, 1240):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            for plot in page.evaluate(PLOTS):
                assert plot["left"] >= 0 and plot["right"] <= width
                assert plot["close"] == 0, plot["label"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_in_both_color_schemes(browser: Browser, tmp_path: Path, scheme: str) -> None:
    with opened(browser, usual_study(tmp_path), tmp_path) as page:
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        texts = page.evaluate(CONTRAST, "svg text, .card td, .card p, .card li, figcaption")
        assert len(texts) > 200
        assert min(texts) > 4.5
        marks = page.evaluate(CONTRAST, "svg .dot, svg .front, svg .end-0, svg .end-1, svg .bar")
        assert min(marks) > 2.9


def test_user_text_is_escaped(browser: Browser, tmp_path: Path) -> None:
    view = nasty_study(tmp_path)
    with opened(browser, view, tmp_path) as page:
        assert page.locator("h1").inner_text() == view.name
        assert NASTY in page.locator(".top .note").inner_text()
        assert page.locator("script").count() == 0
