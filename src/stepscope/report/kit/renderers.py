"""All output formats. To add one, write a module with a `render` function and list it here."""

from __future__ import annotations

from typing import Protocol

from stepscope.report.kit import html, json, terminal
from stepscope.report.kit.document import Document


class Renderer(Protocol):
    """Draws every kind of block and escapes what its format would interpret."""

    def __call__(self, document: Document, /) -> str: ...


RENDERERS: dict[str, Renderer] = {
    "terminal": terminal.render,
    "html": html.render,
    "json": json.render,
}
