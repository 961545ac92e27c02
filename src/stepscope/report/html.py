"""The report as one HTML file that asks for nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from stepscope import __version__
from stepscope.analysis.series import Floats
from stepscope.report.explainhtml import finding_card
from stepscope.report.format import MISSING
from stepscope.report.headline import Headline
from stepscope.report.lines import Line, Panel
from stepscope.report.tables import Table
from stepscope.report.view import View, flattened

_STYLES = ("uPlot.min.css", "report.css")
_SCRIPTS = ("uPlot.iife.min.js", "report.js")
_HINT = "Drag to zoom all panels, double-click to reset, click a name to hide its line."
_DENSE = 130
"""A table of more characters across is set closer, to be seen as a whole."""
_Y_DIGITS = 4
_X_DECIMALS = 3


def html_of(view: View) -> str:
    """The whole page."""
    styles = [asset(name) for name in _STYLES]
    scripts = [asset(name) for name in _SCRIPTS]
    return Template(asset("report.html")).substitute(
        version=escape(__version__),
        style_sources=allowed(styles),
        script_sources=allowed(scripts),
        title=escape(f"{view.name} · stepscope"),
        styles="\n".join(f"<style>{text}</style>" for text in styles),
        name=escape(view.name),
        tone=view.tone,
        outcome=escape(view.outcome),
        reason=escape(view.ending.reason),
        command=escape(view.command),
        when=escape(f"Started {view.started}" if view.started else ""),
        evidence=_evidence(view),
        finding=finding_card(view.finding) if view.finding else "",
        tiles="\n".join(_tile(each) for each in view.headline),
        hint=_HINT if any(panel.lines for panel in view.panels) else "",
        key=_key(view),
        panels="\n".join(_panel(panel, i) for i, panel in enumerate(view.panels)),
        sections="\n".join(_sections(view)),
        footer=escape(f"Made by stepscope {__version__}. Units are decimal: 1 GB is 10⁹ bytes."),
        data=embedded_json(chart_data(view)),
        scripts="\n".join(f"<script>{text}</script>" for text in scripts),
    )


def chart_data(view: View) -> dict[str, Any]:
    """What the page's script draws."""
    return {
        "seconds": _rounded(view.seconds),
        "epochs": [[_rounded(line.seconds), line.index] for line in view.epochs],
        "phases": [[b.name, _rounded(b.begin), _rounded(b.end)] for b in view.phases],
        "panels": [
            {
                "unit": panel.unit,
                "whole": panel.whole,
                "top": panel.top,
                "tables": _by_clock(panel),
            }
            for panel in view.panels
        ],
    }


def embedded_json(data: Any) -> str:
    """JSON that can stand in a script element, whatever names are in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _by_clock(panel: Panel) -> list[dict[str, Any]]:
    """The lines of a panel; neighbours with the same times have them once."""
    found: list[dict[str, Any]] = []
    for line in panel.lines:
        x = [_rounded(value) for value in line.x.tolist()]
        if not found or found[-1]["x"] != x:
            found.append({"x": x, "lines": []})
        found[-1]["lines"].append(_line(line))
    return found


def _line(line: Line) -> dict[str, Any]:
    return {
        "label": line.label,
        "colour": line.colour,
        "style": line.style,
        "shown": line.shown,
        "y": _numbers(line.y),
        "low": None if line.low is None else _numbers(line.low),
        "high": None if line.high is None else _numbers(line.high),
    }


def _numbers(values: Floats) -> list[float | None]:
    """Values as exactly as they can be drawn; a break is null."""
    return [float(f"{v:.{_Y_DIGITS}g}") if math.isfinite(v) else None for v in values.tolist()]


def _rounded(seconds: float) -> float:
    return round(seconds, _X_DECIMALS)


def asset(name: str) -> str:
    return (files("stepscope.report") / "assets" / name).read_text(encoding="utf-8")


def allowed(texts: list[str]) -> str:
    """The content security policy's word for exactly these inline texts."""
    digests = (base64.b64encode(hashlib.sha256(t.encode()).digest()).decode() for t in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _tile(headline: Headline) -> str:
    unknown = " unknown" if headline.value == MISSING else ""
    return (
        f'<div class="tile{unknown}"><div class="label">{escape(headline.label)}</div>'
        f'<div class="value">{escape(headline.value)}</div>'
        f'<div class="detail">{escape(headline.detail)}</div></div>'
    )


def _key(view: View) -> str:
    """What the red lines and the grey bands of the panels are."""
    parts = ['<span><i class="epoch"></i>an epoch begins</span>'] if view.epochs else []
    names = dict.fromkeys(band.name for band in view.phases)
    parts += [f'<span><i class="phase"></i>{escape(name)}</span>' for name in names]
    return "".join(parts)


def _panel(panel: Panel, number: int) -> str:
    plot = f'<div class="plot" id="plot-{number}"></div>'
    if not panel.lines:
        plot = '<p class="empty">Nothing was recorded.</p>'
    detail = f"{panel.unit} · {panel.detail}" if panel.detail else panel.unit
    return (
        f'<div class="panel"><div class="panel-head"><h3>{escape(panel.title)}</h3>'
        f'<span class="detail">{escape(detail)}</span></div>{plot}</div>'
    )


def _sections(view: View) -> list[str]:
    """Everything below the panels; what there is nothing to say about is left out."""
    notes = "".join(f"<li>{escape(note)}</li>" for note in view.notes)
    watching = f"<p>{escape(view.watching)}.</p>" if view.watching else ""
    return [
        card("Trial", _facts(view.trial)),
        card("Epochs", _ledger(view.ledger)),
        card("GPUs", _scroll(view.gpus)),
        card("Processes by role", _scroll(view.roles)),
        _pair(
            card("Phases", _table(view.phase_totals)),
            card("What watching cost", watching),
        ),
        card("Notes", f"<ul>{notes}</ul>" if notes else ""),
        _folded("Statistics of every metric", _scroll(view.statistics)),
        _folded("Environment", _facts(view.environment)),
    ]


def _ledger(ledger: Table) -> str:
    """The ledger; what it tells of GPUs is a table of its own, or it would be too wide to read."""
    rest, of_gpus = ledger.parts()
    if not ledger.rows or len(of_gpus.columns) < 2:
        return _scroll(rest)
    return f"{_scroll(rest)}<h3>On the GPUs of the run</h3>{_scroll(of_gpus)}"


def card(title: str, content: str) -> str:
    return f'<section class="card"><h2>{escape(title)}</h2>{content}</section>' if content else ""


def _pair(*cards: str) -> str:
    """Small cards beside each other, where the page is wide enough."""
    return f'<div class="pair">{"".join(cards)}</div>' if any(cards) else ""


def _folded(title: str, content: str) -> str:
    if not content:
        return ""
    return f'<details class="card"><summary>{escape(title)}</summary>{content}</details>'


def _evidence(view: View) -> str:
    facts = _facts(tuple(flattened(view.ending.evidence)))
    if not facts:
        return ""
    return f'<details class="evidence"><summary>Evidence</summary>{facts}</details>'


def _facts(rows: tuple[tuple[str, str], ...]) -> str:
    cells = (f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in rows)
    return f'<table class="data facts"><tbody>{"".join(cells)}</tbody></table>' if rows else ""


def _scroll(table: Table) -> str:
    return f'<div class="scroll">{_table(table)}</div>' if table.rows else ""


def _table(table: Table) -> str:
    if not table.rows:
        return ""
    marks = [' class="number"' if column.number else "" for column in table.columns]
    head = (f"<th{m}>{escape(c.title)}</th>" for m, c in zip(marks, table.columns, strict=True))
    rows = (
        "".join(f"<td{m}>{escape(text)}</td>" for m, text in zip(marks, row, strict=True))
        for row in table.rows
    )
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    kind = "data dense" if table.width > _DENSE else "data"
    titles = f"<tr>{''.join(head)}</tr>"
    return f'<table class="{kind}"><thead>{titles}</thead><tbody>{body}</tbody></table>'
