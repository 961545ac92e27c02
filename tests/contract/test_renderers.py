"""The contract of every output format. New renderers are tested automatically."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from html import unescape
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from stepscope.report.kit.document import (
    Block,
    Charts,
    Document,
    Facts,
    Figure,
    Item,
    Listing,
    Panel,
    Paragraph,
    PlotLine,
    Section,
    SideBySide,
    Tile,
    Tiles,
    Verbatim,
)
from stepscope.report.kit.renderers import RENDERERS, Renderer
from stepscope.report.kit.table import Column, Table
from stepscope.report.kit.terminal import draw

FOREIGN = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</style></title><b>bold</b>",
    "\x1b[2J\x1b]0;title\x07",
    "[red]not markup[/red] [link=http://x]",
    "[/] [bold :smile: \\[x] [[y]] http://x.example",
    "file \udcff not in UTF-8",
    '\\" \\u0041 null \u2028 \x7f',
    "{{ 7 * 7 }} {% raw %}",
    "a\nb\r\nc\x00",
    "long" * 200,
    "\u202eright to left",
    "a | b # c\n- d `e` *f* _g_",
)
"""Texts that a run may contain: names, commands, paths, errors."""
FORMS = tuple(RENDERERS.items())


def every_block(text: str) -> tuple[Block, ...]:
    """One block of each kind, with distinct texts."""
    times = np.array([0.0, 1.0, 2.0])
    line = PlotLine(f"line {text}", "ink", times, np.array([1.0, np.nan, 3.0]), "bold")
    columns = (
        Column("titleA", number=False, colored=True),
        Column("titleB", wrap=True),
        Column(text, number=False),
    )
    table = Table(columns, (("cellA", "1,234", text), ("cellB", "–", "")), ("bad", "weak"))
    return (
        Tiles((Tile("tileA", "12.5"), Tile("tileB", "–"), Tile(text, text))),
        Paragraph(text, "lead"),
        Paragraph("labeled", "note", label="label"),
        Paragraph("badged", badge=f"badge {text}", tone="warning"),
        Verbatim("stepscope run --very " + "long-option " * 20 + "end", "Command"),
        Listing((Item("plain"), Item(f"change {text}", "train.py:41", "x = 1", "the reason"))),
        Listing((Item("first"), Item("second")), numbered=True),
        Facts((("name", text), ("", "continued"))),
        table,
        Section("Folded", (Table(columns, table.rows, ()),), folded=True),
        Section(
            f"Nested {text}",
            (
                SideBySide((Figure("<svg></svg>", "what it shows", "figure", "caption"),)),
                Section("Inner", (Paragraph("deep"),)),
            ),
            tone="good",
        ),
        Charts(
            "Timeline",
            (Panel(f"panel {text}", "GiB", (line,), "limit 4 GiB"), Panel("bare", "W", ())),
            seconds=2.0,
            epochs=((0.5, 0),),
            phases=((f"phase {text}", 0.2, 0.4),),
        ),
        Section("Nothing here", (Table(columns, ()), Facts(()), Listing(()), Paragraph(""))),
    )


def document(text: str = "plain") -> Document:
    header = (Paragraph("below the name", "note"), Verbatim(text))
    blocks = every_block(text)
    return Document(f"name {text}", "ok", "good", blocks, f"reason {text}", header, "the end")


def words(drawn: str) -> str:
    """Text without white space, which a renderer may change."""
    return re.sub(r"\s", "", drawn)


class Elements(HTMLParser):
    """The elements, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def read_back(name: str, drawn: str) -> str:
    """The text of a rendered document, as a reader sees it."""
    if name == "html":
        return Elements(drawn).text
    if name == "json":
        return "\n".join(texts_in(json.loads(drawn)))
    if name == "terminal":
        return drawn
    return re.sub(r"\\(\W)", r"\1", unescape(drawn))  # as Markdown and the like escape


def texts_in(value: Any) -> Iterator[str]:
    """All texts of a document or of parsed JSON."""
    if is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts_in([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for each in value:
            yield from texts_in(each)


@pytest.mark.parametrize(("name", "render"), FORMS)
def test_all_texts_are_shown(name: str, render: Renderer) -> None:
    shown = words(read_back(name, render(document())))
    for text in (
        *("name plain", "ok", "reason plain", "below the name", "the end"),
        *(
            "tileA",
            "12.5",
            "label",
            "labeled",
            "badged",
            "badge plain",
            "the reason",
            "train.py:41",
        ),
        *("stepscope run --very", "long-option end", "continued", "titleA", "cellA", "1,234"),
        *("figure", "what it shows", "caption", "Nested plain", "Inner", "deep", "limit 4 GiB"),
        *("change plain", "x = 1", "first", "second", "Timeline", "panel plain", "Folded"),
    ):
        assert words(text) in shown or (name, text) == ("html", "what it shows")


@pytest.mark.parametrize(("name", "render"), FORMS)
def test_empty_section_has_no_heading(name: str, render: Renderer) -> None:
    assert name == "json" or "Nothing here" not in render(document())


@pytest.mark.parametrize("text", FOREIGN)
@pytest.mark.parametrize(("name", "render"), FORMS)
def test_texts_are_escaped(name: str, render: Renderer, text: str) -> None:
    drawn = render(document(text))
    assert "\x1b" not in drawn and "\x07" not in drawn
    drawn.encode()  # must not fail, even for texts that are not UTF-8
    shown = words(read_back(name, drawn))
    printable = "".join(
        c if c.isprintable() or c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text
    )
    assert words(text) in shown or words(printable) in shown


@pytest.mark.parametrize("text", FOREIGN)
def test_texts_add_no_elements_to_a_page(text: str) -> None:
    render = RENDERERS["html"]
    foreign, plain = Elements(render(document(text))), Elements(render(document()))
    assert foreign.tags == plain.tags
    assert foreign.attributes == plain.attributes
    assert not {"src", "onerror", "style", "onclick"} & foreign.attributes


@pytest.mark.parametrize("text", FOREIGN)
def test_texts_add_no_styles_to_a_terminal(text: str) -> None:
    """Rich interprets markup, links and emoji codes, and highlights numbers and paths."""

    def styles(text: str) -> set[str]:
        out = io.StringIO()
        options = {"force_terminal": True, "color_system": "truecolor", "legacy_windows": False}
        draw(Console(file=out, width=80, **options), document(text))  # type: ignore[arg-type]
        drawn = out.getvalue()
        plain = re.sub(r"\x1b\[[\d;]*m", "", drawn)
        assert words(plain) == words(RENDERERS["terminal"](document(text)))
        return set(re.findall(r"\x1b\[[\d;]*m", drawn))

    assert styles(text) == styles("plain")


@pytest.mark.parametrize("text", FOREIGN)
def test_json_preserves_all_texts(text: str) -> None:
    def reject(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    drawn = RENDERERS["json"](document(text))
    assert drawn.isascii() and drawn.count("\n") == 1, "one line of ASCII"
    read = json.loads(drawn, parse_constant=reject)
    assert set(texts_in(document(text))) <= set(texts_in(read))
    data = {text: [text, {"nested": text}]}
    drawn = RENDERERS["json"](Document("a", "ok", "good", (), data=data))
    assert json.loads(drawn) == data


@pytest.mark.parametrize(("name", "render"), FORMS)
def test_empty_document(name: str, render: Renderer) -> None:
    assert "nothing" in render(Document("nothing", "", "neutral", ()))


def test_terminal_wraps_everything_except_verbatim_texts() -> None:
    lines = RENDERERS["terminal"](document("long" * 200)).splitlines()
    wide = [line for line in lines if len(line.rstrip()) > 80]
    assert [line.split()[:2] for line in wide[1:]] == [["Command", "stepscope"]]
    assert wide[0] == "long" * 200, "the command in the header"


def test_json_of_a_document_with_data() -> None:
    drawn = RENDERERS["json"](Document("a", "ok", "good", (), data={"rate": float("nan")}))
    assert json.loads(drawn) == {"rate": None}


def test_page_without_charts_has_no_script() -> None:
    page = RENDERERS["html"](Document("a", "ok", "good", (Paragraph("text"),)))
    assert "<script" not in page
    assert "script-src" not in page
    assert RENDERERS["html"](document()).count("<script") == 3
