"""Make the pictures of the README and the docs from real output.

    export FORCE_COLOR=1 COLUMNS=84
    stepscope explain RUN | python docs/pictures.py explain "stepscope explain"
    python docs/pictures.py report RUN/derived/report.html [HEIGHT]     # needs Chromium

The first form draws the output of a command as docs/images/NAME.svg, the second takes a screenshot
of a page as docs/images/NAME.png.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def draw_terminal(output: str, title: str, target: Path) -> None:
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=84, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(output.rstrip()))
    picture = console.export_svg(title=title)
    # Use the reader's own monospace font: nothing is fetched for a picture.
    target.write_text(re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL))


def draw_page(page_file: Path, target: Path, height: int) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1180, "height": height})
        page.goto(page_file.absolute().as_uri())
        page.wait_for_timeout(1000)  # the charts are drawn after the page is loaded
        page.screenshot(path=str(target))
        browser.close()


def main(name: str, source: str, height: str = "1320") -> None:
    IMAGES.mkdir(exist_ok=True)
    if source.endswith(".html"):
        draw_page(Path(source), IMAGES / f"{name}.png", int(height))
    else:
        draw_terminal(sys.stdin.read(), source, IMAGES / f"{name}.svg")


if __name__ == "__main__":
    main(*sys.argv[1:])
