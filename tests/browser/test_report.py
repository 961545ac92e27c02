"""The report in a real browser, opened from a file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, sync_playwright

from stepscope.records import Diagnosis
from stepscope.report.bottleneck.view import diagnosis_view
from stepscope.report.run.derive import derive
from stepscope.runs.paths import RunPaths
from stepscope.runs.reader import open_run
from synthetic import Plan, write_cut_off_run, write_empty_run, write_run
from synthetic_diagnoses import BAD, HEALTHY, LOADER, WEAK

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
OPTIONS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--disable-gpu",
    "--no-first-run",
]
NASTY = '<script>alert(1)</script> & "x"'

if CHROMIUM is None and not os.environ.get("CI"):
    pytest.skip("chromium is not installed", allow_module_level=True)


@dataclass
class Opened:
    """A page with its requests and its console messages."""

    page: Page
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def plot(self, number: int) -> Locator:
        return self.page.locator(f"#plot-{number}")

    def ranges(self) -> list[tuple[float, float]]:
        """The time range of each panel."""
        count = self.page.locator(".plot").count()
        data = [self.plot(i).evaluate("plot => ({...plot.dataset})") for i in range(count)]
        return [(float(each["from"]), float(each["to"])) for each in data]

    def drag(self, number: int, begin: float, end: float) -> None:
        """Drag over a part of a panel; `begin` and `end` are fractions of its width."""
        area = self.plot(number).locator(".u-over")
        area.scroll_into_view_if_needed()
        box = area.bounding_box()
        assert box is not None
        y = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + box["width"] * begin, y)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + box["width"] * end, y, steps=4)
        self.page.mouse.up()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None, "chromium is required in CI"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


def open_report(browser: Browser, paths: RunPaths) -> Iterator[Opened]:
    """Open the page of a run, and check at the end that it made no requests and logged nothing."""
    derive(open_run(paths.folder))
    opened = Opened(browser.new_page(viewport={"width": 1400, "height": 1400}))
    page = opened.page
    page.on("request", lambda request: opened.requests.append(request.url))
    page.on("console", lambda message: opened.messages.append(message.text))
    page.on("pageerror", lambda error: opened.messages.append(str(error)))
    page.on("dialog", lambda dialog: opened.messages.append(dialog.message))
    page.goto(paths.report_html.as_uri())
    yield opened
    page.close()
    assert opened.requests == [paths.report_html.as_uri()]
    assert not opened.messages


@pytest.fixture
def report(browser: Browser, tmp_path: Path) -> Iterator[Opened]:
    yield from open_report(browser, write_run(tmp_path / "run"))


COLOR_COUNT = """canvas => {
  const {width, height} = canvas;
  const pixels = new Uint32Array(
    canvas.getContext("2d").getImageData(0, 0, width, height).data.buffer);
  return new Set(pixels).size;
}"""


def test_three_panels_are_drawn(report: Opened) -> None:
    assert report.page.locator("canvas").count() == 3
    for number in range(3):
        assert report.plot(number).locator("canvas").evaluate(COLOR_COUNT) > 20
    assert report.ranges() == [(0, 60)] * 3


def test_zoom_is_linked_and_double_click_resets_it(report: Opened) -> None:
    reset = report.page.locator("#reset")
    assert reset.is_hidden()
    report.drag(1, 0.25, 0.5)
    begin, end = report.ranges()[0]
    assert begin == pytest.approx(15, abs=0.5)
    assert end == pytest.approx(30, abs=0.5)
    assert len(set(report.ranges())) == 1
    report.plot(2).locator(".u-over").dblclick()
    assert report.ranges() == [(0, 60)] * 3
    report.drag(2, 0.5, 0.9)
    assert len(set(report.ranges())) == 1
    assert report.ranges() != [(0, 60)] * 3
    reset.click()
    assert report.ranges() == [(0, 60)] * 3


def test_legend_shows_the_values_under_the_cursor_in_every_panel(report: Opened) -> None:
    report.plot(0).locator(".u-over").hover()
    values = report.page.locator(".u-legend tr.line .u-value")
    texts = values.all_inner_texts()
    assert len(texts) == report.page.locator(".u-legend tr.line").count()
    assert any(text.endswith(" GiB") for text in texts)
    assert any(text.endswith(" MiB/s") for text in texts)
    assert any(" cores · " in text for text in texts)
    assert "3.73 GiB" in texts  # the limit, which has no point near the cursor


def test_line_can_be_hidden_by_mouse_and_keyboard(report: Opened) -> None:
    before = report.plot(0).locator("canvas").evaluate("canvas => canvas.toDataURL()")
    is_same = "before => (document.querySelector('canvas').toDataURL() == before)"
    name = report.plot(0).get_by_role("button", name="memory", exact=True)
    name.click()
    report.page.wait_for_function(f"{is_same} == false", arg=before)
    name.press("Enter")
    report.page.wait_for_function(is_same, arg=before)


def test_tables_and_tiles(report: Opened) -> None:
    page = report.page
    assert page.locator(".identity .badge").inner_text() == "ok"
    assert page.locator(".tile").count() == 8
    epochs = page.locator("section.card", has=page.get_by_role("heading", name="Epochs"))
    assert epochs.locator("tbody tr").count() == 4
    statistics = page.locator("details", has_text="All metrics")
    assert statistics.locator("table").is_hidden()
    statistics.locator("summary").click()
    assert statistics.locator("table").is_visible()


@pytest.mark.parametrize(("width", "scheme"), [(1400, "dark"), (390, "light")])
def test_page_fits_its_window_in_both_color_schemes(
    report: Opened, width: int, scheme: str
) -> None:
    page = report.page
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.wait_for_function("document.querySelector('.u-over').clientWidth < innerWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    light = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(245, 246, 248)"
    assert light == (scheme == "light")


def test_texts_of_a_run_are_not_executed(browser: Browser, tmp_path: Path) -> None:
    plan = Plan(name=NASTY, command=("python", NASTY, "</script>"), seconds=5)
    for opened in open_report(browser, write_run(tmp_path / "run", plan)):
        assert opened.page.locator("h1").inner_text() == NASTY
        assert opened.page.title() == f"{NASTY} · stepscope"
        assert NASTY in opened.page.locator(".command").inner_text()
        assert opened.page.locator("canvas").count() == 3


@pytest.fixture
def gpu_report(browser: Browser, tmp_path: Path) -> Iterator[Opened]:
    yield from open_report(browser, write_run(tmp_path / "run", Plan(gpus=2, idle_gpus=1)))


ALL_INSIDE = """card => {
  const {right} = card.getBoundingClientRect();
  const all = [...card.querySelectorAll("*")];
  return right < innerWidth && all.every((each) => each.getBoundingClientRect().right <= right);
}"""


@pytest.mark.parametrize("verdict", [BAD, HEALTHY, WEAK], ids=["bad", "healthy", "without_steps"])
def test_bottleneck_is_at_the_top(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: Diagnosis
) -> None:
    monkeypatch.setattr("stepscope.report.bottleneck.view.explain", lambda data: verdict)
    view = diagnosis_view(verdict)
    for opened in open_report(browser, write_run(tmp_path / "run", Plan(seconds=5))):
        page = opened.page
        card = page.locator("main > header + section.finding")
        assert card.locator("h2").inner_text() == view.first.summary
        assert (card.get_by_text("so this diagnosis is").count() == 1) == verdict.without_steps
        tone = "good" if verdict.first.healthy else "warning"
        assert f"finding {tone}" in (card.get_attribute("class") or "")
        assert card.locator("tbody tr:visible").count() == len(verdict.first.evidence)
        assert card.locator(".advice li:visible").count() == len(verdict.first.recommendations)
        for width in (1400, 390):
            page.set_viewport_size({"width": width, "height": 900})
            assert card.evaluate(ALL_INSIDE)


def test_other_findings_are_folded_and_code_is_shown_as_code(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.report.bottleneck.view.explain", lambda data: BAD)
    for opened in open_report(browser, write_run(tmp_path / "run", Plan(seconds=5))):
        card = opened.page.locator("section.finding")
        assert card.locator(".advice code").first.inner_text() == LOADER.code.strip()
        other = card.get_by_text(diagnosis_view(BAD).others[0].summary)
        assert other.is_hidden()
        card.locator("summary").click()
        assert other.is_visible()


EPOCH_LINES = """canvas => {
  const {width, height} = canvas;
  const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
  const isRed = (x, y) => {
    const [r, g, b] = data.slice(4 * (y * width + x), 4 * (y * width + x) + 3);
    return r > g + 60 && Math.abs(g - b) < 40;
  };
  const isLine = (x) => {
    let red = 0;
    for (let y = 0; y < height; y++) red += isRed(x, y);
    return red > height / 2;
  };
  const columns = [...Array(width).keys()].filter(isLine);
  return columns.filter((x) => !columns.includes(x - 1)).length;
}"""

TOP_OF_BLUE = """canvas => {
  const {width, height} = canvas;
  const {data} = canvas.getContext("2d").getImageData(0, 0, width, height);
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] > 200 && data[i] < 30 && data[i + 2] > 160) return i / 4 / width / height;
  return 1;
}"""


def test_gpu_panels_share_the_time_axis(gpu_report: Opened) -> None:
    page = gpu_report.page
    titles = page.locator(".panel h3").all_inner_texts()
    assert titles[2:] == ["CPU usage", "GPU activity", "GPU memory", "GPU transfers", "GPU power"]
    assert gpu_report.ranges() == [(0, 60)] * 7
    for number in range(3, 7):
        assert gpu_report.plot(number).locator("canvas").evaluate(EPOCH_LINES) == 4
    gpu_report.drag(3, 0.25, 0.5)
    assert len(set(gpu_report.ranges())) == 1
    assert gpu_report.ranges() != [(0, 60)] * 7


def test_legend_of_gpus_shows_values_and_hidden_lines(gpu_report: Opened) -> None:
    gpu_report.plot(3).locator(".u-over").hover()
    use = gpu_report.plot(3).locator(".u-legend tr.line")
    assert use.locator(".u-value").first.inner_text().endswith("%")
    power = gpu_report.plot(6).locator(".u-legend tr.line .u-value").first.inner_text()
    assert " W · " in power and power.endswith("%")
    hidden = gpu_report.plot(3).locator(".u-legend tr.line.u-off")
    assert hidden.locator("th").all_inner_texts() == ["GPU 0 SM activity", "GPU 1 SM activity"]
    before = gpu_report.plot(3).locator("canvas").evaluate("canvas => canvas.toDataURL()")
    gpu_report.plot(3).get_by_role("button", name="GPU 1 SM activity").click()
    changed = "before => document.querySelector('#plot-3 canvas').toDataURL() != before"
    gpu_report.page.wait_for_function(changed, arg=before)
    assert hidden.count() == 1


def test_gpu_activity_has_a_scale_to_100_percent(browser: Browser, tmp_path: Path) -> None:
    """A GPU that is half idle must look half idle, whatever else is drawn."""
    paths = write_run(tmp_path / "run", Plan(gpus=1, gpm=False))
    for opened in open_report(browser, paths):
        before = opened.plot(3).locator("canvas").evaluate("canvas => canvas.toDataURL()")
        opened.plot(3).get_by_role("button", name="utilization", exact=True).click()
        changed = "before => document.querySelector('#plot-3 canvas').toDataURL() != before"
        opened.page.wait_for_function(changed, arg=before)
        top = opened.plot(3).locator("canvas").evaluate(TOP_OF_BLUE)
        assert 0.3 < top < 0.7, "the memory controller is at about 50%"


def test_gpu_tables_do_not_scroll(gpu_report: Opened) -> None:
    page = gpu_report.page
    assert page.locator(".tile").count() == 12
    card = page.locator("section.card", has=page.get_by_role("heading", name="GPUs", exact=True))
    assert card.locator("tbody tr").count() == 2
    epochs = page.locator("section.card", has=page.get_by_role("heading", name="Epochs"))
    assert epochs.locator("table").count() == 2
    assert epochs.locator("table").last.locator("th").last.inner_text() == "Samples/J"
    for table in page.locator(".scroll").all():
        if table.is_visible():
            assert table.evaluate("place => place.scrollWidth <= place.clientWidth")


@pytest.mark.parametrize("width", [1280, 390])
def test_gpu_page_fits_its_window(gpu_report: Opened, width: int) -> None:
    gpu_report.page.set_viewport_size({"width": width, "height": 900})
    gpu_report.page.wait_for_function("document.querySelector('.u-over').clientWidth < innerWidth")
    assert gpu_report.page.evaluate("document.documentElement.scrollWidth") <= width


def test_page_without_gpus_does_not_mention_them(report: Opened) -> None:
    assert report.page.locator("main").inner_text().count("GPU") == 0


def test_empty_run(browser: Browser, tmp_path: Path) -> None:
    for opened in open_report(browser, write_empty_run(tmp_path / "run")):
        assert opened.page.get_by_text("No data was recorded").count() == 3
        assert opened.page.locator("canvas").count() == 0


def test_cut_off_run(browser: Browser, tmp_path: Path) -> None:
    for opened in open_report(browser, write_cut_off_run(tmp_path / "run")):
        assert opened.page.locator(".identity .badge.warning").inner_text() == "lost"
        assert opened.page.locator("canvas").count() == 3


def test_long_run_has_bands_without_legend_entries(browser: Browser, tmp_path: Path) -> None:
    paths = write_run(tmp_path / "run", Plan(seconds=450, epochs=3))
    for opened in open_report(browser, paths):
        assert opened.plot(2).locator("canvas").evaluate(COLOR_COUNT) > 20
        assert opened.page.locator(".u-legend tr.edge").count() > 0
        assert opened.page.locator(".u-legend tr.edge").first.is_hidden()
