"""Renders a document as one self-contained HTML file."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from stepscope import __version__
from stepscope.analysis.run.series import Floats
from stepscope.report.kit.document import Block, Charts, Document, Section, SideBySide, is_empty
from stepscope.report.kit.format import MISSING

_FOLDER = files("stepscope.report")
_CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0xD800, 0xE000))
    if chr(code) not in "\t\n"
} | {ord("\r"): "\n"}
"""Includes characters that reverse the order of a text, and lone surrogates (file names that are
not UTF-8), which cannot be encoded."""
_X_DECIMALS = 3
_Y_DIGITS = 4


def render(document: Document) -> str:
    """Return the page. Its content security policy allows only the embedded styles and scripts."""
    charts = _charts((*document.header, *document.blocks))
    styles, scripts = [_asset("page.css")], []
    if charts:
        styles.insert(0, _asset("uPlot.min.css"))
        scripts += [_asset("uPlot.iife.min.js"), _asset("charts.js")]
    return (
        _environment()
        .get_template("page.html")
        .render(
            document=document,
            version=__version__,
            styles=styles,
            scripts=scripts,
            chart_data=_chart_data(charts) if charts else None,
        )
    )


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(str(_FOLDER / "templates")),
        autoescape=True,
        finalize=_without_controls,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "kind": lambda block: type(block).__name__,
        "sources": _sources,
        "trusted": Markup,
    }
    environment.tests["empty"] = is_empty
    environment.globals["MISSING"] = MISSING
    return environment


def _without_controls(value: Any) -> Any:
    return value.replace("\r\n", "\n").translate(_CONTROLS) if isinstance(value, str) else value


def _asset(name: str) -> str:
    return (_FOLDER / "assets" / name).read_text(encoding="utf-8")


def _sources(texts: Iterable[str]) -> Markup:
    """Return the hashes of inline texts for the content security policy."""
    digests = (base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in texts)
    return Markup(" ".join(f"'sha256-{digest}'" for digest in digests))


def _charts(blocks: Iterable[Block]) -> Charts | None:
    """Return the first charts of a page: its script draws only one set."""
    for block in blocks:
        if isinstance(block, Charts):
            return block
        if isinstance(block, Section | SideBySide) and (nested := _charts(block.blocks)):
            return nested
    return None


def _chart_data(charts: Charts) -> Markup:
    """Return the input of `charts.js` as JSON that is safe inside a script element.

    Consecutive lines with equal times share them.
    """

    def numbers(values: Floats | None) -> list[float | None] | None:
        if values is None:
            return None
        return [float(f"{v:.{_Y_DIGITS}g}") if math.isfinite(v) else None for v in values.tolist()]

    panels = []
    for panel in charts.panels:
        tables: list[dict[str, Any]] = []
        for line in panel.lines:
            x = [round(value, _X_DECIMALS) for value in line.x.tolist()]
            if not tables or tables[-1]["x"] != x:
                tables.append({"x": x, "lines": []})
            tables[-1]["lines"].append(
                {
                    "label": line.label,
                    "color": line.color,
                    "style": line.style,
                    "shown": line.shown,
                    "y": numbers(line.y),
                    "low": numbers(line.low),
                    "high": numbers(line.high),
                }
            )
        panels.append(
            {
                "unit": panel.unit,
                "fullScale": panel.full_scale,
                "top": panel.top,
                "tables": tables,
            }
        )
    data = {
        "seconds": round(charts.seconds, _X_DECIMALS),
        "epochs": [[round(begin, _X_DECIMALS), index] for begin, index in charts.epochs],
        "phases": [
            [name, round(begin, _X_DECIMALS), round(end, _X_DECIMALS)]
            for name, begin, end in charts.phases
        ],
        "panels": panels,
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":  # names in it may contain markup
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
