"""A study as one HTML file that asks for nothing from anywhere, and needs no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from stepscope import __version__
from stepscope.analysis.study.records import THROUGHPUT
from stepscope.report.html import allowed, asset, card
from stepscope.report.outcomes import Tone
from stepscope.report.study import Best, StudyView
from stepscope.report.studyeffects import CurveView, EffectsView, FrontView
from stepscope.report.studyplots import (
    curve_plot,
    effects_plot,
    front_plot,
    interaction_plot,
    ranking_plot,
    ranking_top,
    sentinel_plot,
)
from stepscope.report.studytables import (
    CONFIGURATION,
    OUTCOME,
    block_table,
    configuration_table,
    failure_table,
    first_points,
    front_table,
    level_table,
    ranking_table,
)
from stepscope.report.studywords import counted
from stepscope.report.tables import Column, Table
from stepscope.runs.paths import replace_atomically

REPORT = "report.html"
_STYLES = ("report.css", "study.css")
_DENSE = 100
"""A table of more characters across is set closer, to be seen as a whole."""
_MOST_ROWS = 200
_MOST_PLOTS = 12
_MOST_INTERACTIONS = 6
_FEW_INTERACTIONS = 1
"""Of responses other than throughput: the rest is told in words."""
_MOST_NAMED = 8
_MOST_RANKINGS = 9
_TEXTS = (CONFIGURATION, "Why", "What held it back")


def write_report(view: StudyView, folder: Path) -> Path:
    """Write the page of a study into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REPORT
    replace_atomically(path, html_of(view))
    return path


def html_of(view: StudyView) -> str:
    """The whole page."""
    styles = [asset(name) for name in _STYLES]
    units = "Units are decimal: 1 GB is 10⁹ bytes. All tables lie beside this page as CSV."
    return Template(asset("study.html")).substitute(
        version=escape(__version__),
        style_sources=allowed(styles),
        title=escape(f"{view.name} · stepscope"),
        styles="\n".join(f"<style>{text}</style>" for text in styles),
        name=escape(view.name),
        tone=view.tone,
        state=escape(view.state),
        headline=escape(view.headline),
        about=escape(view.about),
        now=_above(view),
        sections="\n".join(part for part in _sections(view) if part),
        footer=escape(f"Made by stepscope {__version__}. {units}"),
    )


def _above(view: StudyView) -> str:
    """What a reader should know first."""
    warning = f'<p class="warned">{escape(view.warning)}.</p>' if view.warning else ""
    return warning + (f'<p class="about">Now: {escape(view.now)}</p>' if view.now else "")


def _sections(view: StudyView) -> Iterable[str]:
    """In the order of what a reader wants to know; what there is nothing to say of is left out."""
    yield _bests(view)
    yield card("What matters", _rankings(view))
    yield card("Effects", "".join(_effects(each) for each in view.effects))
    yield card("Scaling", _curves(view.curves))
    yield card("Trade-offs", _fronts(view))
    yield card("Configurations", _configurations(view))
    yield card("Noise", _noise(view))
    yield card("Not tried", _skipped(view))
    yield card("Notes", _list(view.remarks))


def _bests(view: StudyView) -> str:
    if view.lack:
        return card("Best", f"<p>{escape(view.lack)}</p>")
    told = "".join(_best(best) for best in view.bests)
    return (
        f'<section class="card finding good"><h2>Best</h2><div class="bests">{told}</div></section>'
    )


def _best(best: Best) -> str:
    rate, _, interval = best.rate.partition(" (")
    between = f" <small>({escape(interval)}</small>" if interval else ""
    return "".join(
        (
            '<div class="best">',
            f'<p class="group">{escape(best.group)}</p>' if best.group else "",
            f'<p class="rate">{escape(rate)}{between}</p>',
            f'<p class="levels">{escape(best.levels)}</p>',
            f'<p class="note">{escape(best.beats)}</p>' if best.beats else "",
            _as_good(best.as_good),
            "</div>",
        )
    )


def _as_good(names: Sequence[str]) -> str:
    if not names:
        return ""
    few = [*names[:_MOST_NAMED]]
    if len(names) > len(few):
        few.append(f"and {len(names) - len(few):,} more")
    return f'<div class="as-good">As good, as far as one can tell, with:{_list(few)}</div>'


def _rankings(view: StudyView) -> str:
    if not view.rankings:
        return ""
    shown = view.rankings[:_MOST_RANKINGS]
    top = ranking_top(shown)
    plots = _plots(_figure(each.title, "", ranking_plot(each, top)) for each in shown)
    tables = "".join(
        f"<h3>{escape(each.title)}</h3>{_scroll(ranking_table(each))}" for each in shown
    )
    note = _note(
        "How many times the throughput of the worst level the best one has, other factors alike. "
        "Grey: not told from no effect."
    )
    return f"{note}{plots}<details><summary>As a table</summary>{tables}</details>"


def _effects(view: EffectsView) -> str:
    most = _MOST_INTERACTIONS if view.response.key == THROUGHPUT else _FEW_INTERACTIONS
    told = [each for each in view.effects.interactions if each.is_told][:most]
    figures = [_figure("Level means", "", effects_plot(view))] if view.rows else []
    figures += [
        _figure(f"{each.first} × {each.second}", each.says, interaction_plot(each, view.response))
        for each in told
    ]
    table = level_table(view)
    folded = f"<details><summary>As a table</summary>{_scroll(table)}</details>"
    return (
        f'<div class="response"><h3>{escape(view.title)}</h3>{_note(view.about)}{_plots(figures)}'
        f"{_more_interactions(view.interactions[len(told) :])}{_list(view.remarks)}"
        f"{folded if table.rows else ''}</div>"
    )


def _more_interactions(says: Sequence[str]) -> str:
    return f"{_note('What else depends on each other:')}{_list(says)}" if says else ""


def _curves(curves: Sequence[CurveView]) -> str:
    """Those of all trials first, then those that have a knee."""
    order = sorted(curves, key=_last_of_interest)
    shown = order[:_MOST_PLOTS]
    plots = _plots(_figure(each.title, each.says, curve_plot(each)) for each in shown)
    if len(curves) > len(shown):
        plots += _note(f"{counted(len(curves) - len(shown), 'more curve')} in scaling.csv.")
    return plots


def _last_of_interest(view: CurveView) -> tuple[bool, bool, bool]:
    return bool(view.curve.group), not view.has_knee, len(view.curve.points) < 3


def _fronts(view: StudyView) -> str:
    told = "".join(_front(each, view) for each in view.fronts)
    return told + "".join(_note(says) for says in view.not_measured)


def _front(front: FrontView, view: StudyView) -> str:
    plot = front_plot(front.front, view.analysis.configurations, view.factors)
    table = front_table(front)
    shown = Table(table.columns, table.rows[:_MOST_ROWS])
    figure = _figure("", "Better is up and to the left.", plot)
    return (
        f'<div class="response"><h3>{escape(front.title)}</h3>{_note(front.says)}'
        f'<div class="plots">{figure}<div class="beside">{_scroll(shown)}</div></div></div>'
    )


def _configurations(view: StudyView) -> str:
    shown = first_points(view, _MOST_ROWS)
    tones = [point.tone for point in shown]
    told = _scroll(configuration_table(view, shown), tones)
    if len(view.points) > len(shown):
        told += _note(f"and {len(view.points) - len(shown):,} more, in configurations.csv.")
    return told


def _noise(view: StudyView) -> str:
    parts = []
    if view.blocks:
        parts.append(_note(view.noise))
        if sum(block.sentinel_rate is not None for block in view.blocks) > 1:
            plot = sentinel_plot(view.blocks)
            parts.append(_plots([_figure("The sentinel", "The same configuration, once in each "
                                         "block; crossed: flagged.", plot)]))  # fmt: skip
        parts.append(_scroll(block_table(view.flagged[:_MOST_ROWS])))
        calm = _scroll(block_table(view.blocks[:_MOST_ROWS]))
        parts.append(f"<details><summary>All blocks</summary>{calm}</details>")
    if view.failures:
        table = failure_table(view, view.failures[:_MOST_ROWS])
        parts.append(f"<h3>Attempts that answered nothing</h3>{_scroll(table)}")
    return "".join(parts)


def _skipped(view: StudyView) -> str:
    rows = tuple(
        (f"{group.count:,}", group.why, group.example) for group in view.skipped[:_MOST_ROWS]
    )
    columns = (
        Column("Combinations"),
        Column("Why", number=False),
        Column("For example", number=False),
    )
    return _scroll(Table(columns, rows))


def _plots(figures: Iterable[str]) -> str:
    drawn = "".join(figures)
    return f'<div class="plots">{drawn}</div>' if drawn else ""


def _figure(title: str, says: str, plot: str) -> str:
    small = f"<small>{escape(says)}</small>" if says else ""
    caption = f"<figcaption>{escape(title)}{small}</figcaption>" if title or says else ""
    return f"<figure>{caption}{plot}</figure>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""


def _list(texts: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{items}</ul>" if items else ""


def _scroll(table: Table, tones: Sequence[Tone] = ()) -> str:
    """A table; of several outcomes, each in its colour."""
    if not table.rows:
        return ""
    head = "".join(
        f"<th{' class=number' if column.number else ''}>{escape(column.title)}</th>"
        for column in table.columns
    )
    body = "".join(
        f"<tr>{_cells(table, row, tones[place] if tones else '')}</tr>"
        for place, row in enumerate(table.rows)
    )
    kind = "data dense" if table.width > _DENSE else "data"
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cells(table: Table, row: Sequence[str], tone: str) -> str:
    cells = []
    for column, text in zip(table.columns, row, strict=True):
        kinds = ["number"] if column.number else []
        kinds += ["text"] if column.title in _TEXTS else []
        kinds += [tone] if tone and column.title == OUTCOME else []
        mark = f' class="{" ".join(kinds)}"' if kinds else ""
        cells.append(f"<td{mark}>{escape(text)}</td>")
    return "".join(cells)
