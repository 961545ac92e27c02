"""Makes the README's pictures from a run (needs Chromium): python docs/pictures.py runs/<run>."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console

from stepscope.report.derive import derive
from stepscope.report.terminal import print_summary
from stepscope.runs.reader import open_run

IMAGES = Path(__file__).parent / "images"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def draw_report(page_file: Path, target: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1180, "height": 1320})
        page.goto(page_file.absolute().as_uri())
        page.wait_for_selector("canvas")
        page.wait_for_timeout(500)
        page.screenshot(path=str(target))
        browser.close()


def main() -> None:
    run = open_run(sys.argv[1])
    view = derive(run)
    IMAGES.mkdir(exist_ok=True)
    draw_report(run.paths.report_html, IMAGES / "report.png")
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=84, file=nowhere, force_terminal=True)
        print_summary(console, view, Path("runs") / run.path.name / "derived" / "report.html")
    picture = console.export_svg(title="stepscope run -- python train.py")
    # The reader's own monospace font will do: nothing is fetched for a picture.
    picture = re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)
    (IMAGES / "summary.svg").write_text(picture)


if __name__ == "__main__":
    main()
