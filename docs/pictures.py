"""Makes the README's pictures from real runs: python docs/pictures.py runs/<run> [explain].

Of a trial it makes `trial.svg`, of a study `study.svg` and `study.png`, of any other run
`report.png` and `summary.svg` (the .png need Chromium); with the word `explain` it makes
`explain.svg` instead.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

from stepscope.report.bottleneck.document import explained_document
from stepscope.report.bottleneck.view import explained_view
from stepscope.report.kit.terminal import draw
from stepscope.report.run.derive import derive
from stepscope.report.run.document import summary_of
from stepscope.report.study.document import screen_of, write_report
from stepscope.report.study.read import read_view
from stepscope.report.trial.document import trials_document
from stepscope.report.trial.view import trial_view
from stepscope.runs.load import load
from stepscope.runs.reader import Run, open_run
from stepscope.runs.trial import is_trial
from stepscope.studies.folder import is_study

IMAGES = Path(__file__).parent / "images"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def draw_report(page_file: Path, target: Path, drawn: str = "canvas") -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1180, "height": 1320})
        page.goto(page_file.absolute().as_uri())
        page.wait_for_selector(drawn)
        page.wait_for_timeout(500)
        page.screenshot(path=str(target))
        browser.close()


def draw_terminal(write: Callable[[Console], None], title: str, target: Path) -> None:
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=84, file=nowhere, force_terminal=True)
        write(console)
    picture = console.export_svg(title=title)
    # The reader's own monospace font will do: nothing is fetched for a picture.
    target.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


def draw_trial(run: Run) -> None:
    view = replace(trial_view(run), folder=Path("runs") / run.path.name)
    title = shlex.join(view.record.trial.command)
    draw_terminal(
        lambda console: draw(console, trials_document([view])), title, IMAGES / "trial.svg"
    )


def draw_study(folder: Path) -> None:
    view = read_view(folder)
    title = f"stepscope study show {view.name}"
    draw_terminal(
        lambda console: draw(console, screen_of(view, console.width)), title, IMAGES / "study.svg"
    )
    with tempfile.TemporaryDirectory() as name:
        page = write_report(view, Path(name))
        draw_report(page, IMAGES / "study.png", "svg")


def draw_run(run: Run) -> None:
    view, page = derive(run), Path("runs") / run.path.name / "derived" / "report.html"
    draw_report(run.paths.report_html, IMAGES / "report.png")
    draw_terminal(
        lambda console: draw(console, summary_of(view, page)),
        "stepscope run -- python train.py",
        IMAGES / "summary.svg",
    )


def draw_explained(run: Run) -> None:
    view = explained_view(load(run))
    changes = (replace(each, where=_short(each.where)) for each in view.first.recommendations)
    first = replace(view.first, recommendations=tuple(changes))
    view = replace(view, findings=(first, *view.others))
    draw_terminal(
        lambda console: draw(console, explained_document("train", run.ending, view)),
        "stepscope explain",
        IMAGES / "explain.svg",
    )


def _short(where: str | None) -> str | None:
    """The line of a script, whatever it is called."""
    return "train.py:" + where.rpartition(":")[2] if where else None


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    if is_study(Path(sys.argv[1])):
        draw_study(Path(sys.argv[1]))
        return
    run = open_run(sys.argv[1])
    if sys.argv[2:] == ["explain"]:
        draw_explained(run)
    else:
        (draw_trial if is_trial(run) else draw_run)(run)


if __name__ == "__main__":
    main()
