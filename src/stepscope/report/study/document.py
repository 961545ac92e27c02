"""The documents of a study: the page, and what a terminal shows on a screen or in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from stepscope import __version__
from stepscope.analysis.study.records import THROUGHPUT
from stepscope.records import Outcome
from stepscope.report.kit import html
from stepscope.report.kit.document import (
    Block,
    Document,
    Facts,
    Listing,
    Paragraph,
    Section,
    SideBySide,
    Tile,
    Tiles,
    Verbatim,
)
from stepscope.report.study import plots, tables
from stepscope.report.study.effects import EffectsView
from stepscope.report.study.view import Best, StudyView
from stepscope.report.study.words import counted
from stepscope.runs.paths import replace_atomically

REPORT = "report.html"
_MOST_ROWS = 200
_MOST_PLOTS = 12
_MOST_INTERACTIONS = 6
_FEW_INTERACTIONS = 1
"""Of responses other than throughput: the rest is told in words."""
_MOST_NAMED = 8
_MOST_RANKINGS = 9

_MOST_SHOWN = 20
_MOST_WRAPPED = 8
"""Rows of a table whose last column needs several lines."""
_FEW = 5


def write_report(view: StudyView, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REPORT
    replace_atomically(path, html.render(page_of(view)))
    return path


def page_of(view: StudyView) -> Document:
    """All of a study, in the order of what a reader wants to know."""
    best = Section("Best", (SideBySide(tuple(map(_best, view.bests))),), tone="good")
    if view.lack:
        best = Section("Best", (Paragraph(view.lack),))
    rows = tables.first_rows(view, _MOST_ROWS)
    rest = _more(view.configurations, rows, ", in configurations.csv.")
    units = "Units are decimal: 1 GB is 10⁹ bytes. All tables lie beside this page as CSV."
    return _document(
        view,
        (
            best,
            _rankings(view),
            Section("Effects", tuple(_effects(each) for each in view.effects)),
            _scaling(view),
            _trade_offs(view),
            Section("Configurations", (tables.configurations(view, rows), Paragraph(rest, "note"))),
            _noise(view),
            Section("Not tried", (tables.skipped(view.skipped[:_MOST_ROWS]),)),
            Section("Notes", (Listing.of(view.remarks),)),
        ),
        footer=f"Made by stepscope {__version__}. {units}",
    )


def _document(view: StudyView, blocks: tuple[Block, ...], footer: str = "") -> Document:
    return Document(
        name=view.name,
        state=view.state,
        tone=view.tone,
        header=(
            Paragraph(view.headline, "lead"),
            Paragraph(view.about, "note"),
            Paragraph(view.warning and f"{view.warning}.", "warning"),
            Paragraph(view.now, label="Now"),
        ),
        blocks=blocks,
        footer=footer,
    )


def _best(best: Best) -> Section:
    named = best.as_good[:_MOST_NAMED]
    rest = _more(best.as_good, named)
    as_good = "As good, as far as one can tell, with:" if named else ""
    return Section(
        "",
        (
            Tiles((Tile(best.group, best.rate, best.interval and f"({best.interval})"),)),
            Verbatim(best.levels),
            Paragraph(best.beats, "note"),
            Paragraph(as_good, "note"),
            Listing.of([*named, rest] if rest else named),
        ),
    )


def _rankings(view: StudyView) -> Section:
    shown = view.rankings[:_MOST_RANKINGS]
    top = plots.ranking_top(shown)
    about = (
        "How many times the throughput of the worst level the best one has, other factors alike. "
        "Grey: not told from no effect."
    )
    ranked = tuple(Section(each.title, (tables.ranking(each),)) for each in shown)
    return Section(
        "What matters",
        (
            Paragraph(about if shown else "", "note"),
            SideBySide(tuple(plots.ranking_plot(each, top) for each in shown)),
            Section("As a table", ranked, folded=True),
        ),
    )


def _effects(view: EffectsView) -> Section:
    most = _MOST_INTERACTIONS if view.response.key == THROUGHPUT else _FEW_INTERACTIONS
    told = [each for each in view.effects.interactions if each.is_told][:most]
    figures = [plots.effects_plot(view)] if view.rows else []
    figures += [plots.interaction_plot(each, view.response) for each in told]
    more = view.interactions[len(told) :]
    return Section(
        view.title,
        (
            Paragraph(view.about, "note"),
            SideBySide(tuple(figures)),
            Paragraph("What else depends on each other:" if more else "", "note"),
            Listing.of(more),
            Listing.of(view.remarks),
            Section("As a table", (tables.levels(view),), folded=True),
        ),
    )


def _scaling(view: StudyView) -> Section:
    """Curves of all trials first, then those that have a knee."""
    curves = sorted(
        view.curves,
        key=lambda each: (bool(each.curve.group), not each.has_knee, len(each.curve.points) < 3),
    )
    shown = curves[:_MOST_PLOTS]
    more = len(curves) - len(shown)
    rest = f"{counted(more, 'more curve')} in scaling.csv." if more else ""
    figures = tuple(map(plots.curve_plot, shown))
    return Section("Scaling", (SideBySide(figures), Paragraph(rest, "note")))


def _trade_offs(view: StudyView) -> Section:
    fronts = []
    for front in view.fronts:
        plot = plots.front_plot(front.front, view.analysis.configurations, view.factors)
        table = tables.front(front).first(_MOST_ROWS)
        about = Paragraph(front.says, "note")
        fronts.append(Section(front.title, (about, SideBySide((plot, table)))))
    not_measured = (Paragraph(text, "note") for text in view.not_measured)
    return Section("Trade-offs", (*fronts, *not_measured))


def _noise(view: StudyView) -> Section:
    blocks: list[Block] = []
    if view.blocks:
        blocks.append(Paragraph(view.noise, "note"))
        if sum(block.sentinel_rate is not None for block in view.blocks) > 1:
            blocks.append(SideBySide((plots.sentinel_plot(view.blocks),)))
        blocks.append(tables.blocks(view.flagged[:_MOST_ROWS]))
        every = tables.blocks(view.blocks[:_MOST_ROWS])
        blocks.append(Section("All blocks", (every,), folded=True))
    failures = tables.failures(view, view.failures[:_MOST_ROWS])
    blocks.append(Section("Attempts that answered nothing", (failures,)))
    return Section("Noise", tuple(blocks))


def screen_of(view: StudyView, width: int, full: bool = False) -> Document:
    """What a study came to on one screen; `full` has all tables, for a terminal of this width."""
    blocks: list[Block] = [Paragraph(view.lack), Facts(tuple(_best_facts(view)))]
    for place, ranking in enumerate(view.rankings if full else view.rankings[:1]):
        others = () if full else tuple(Paragraph(each.says) for each in view.rankings[1:])
        title = f"What matters for {ranking.title if place else 'throughput'}"
        blocks.append(Section(title, (tables.ranking(ranking, with_bars=True), *others)))
    for effects in view.effects if full else ():
        told = Listing.of((*effects.interactions, *effects.remarks))
        about = Paragraph(effects.about, "note")
        blocks.append(Section(effects.title, (about, tables.levels(effects), told)))
    blocks.append(Section("Scaling", (Facts(tuple(_knees(view, full))),)))
    if full:
        blocks += _screen_tables(view, width)
    blocks.append(Section("Noted" if full else "", (Facts(tuple(_problems(view, full))),)))
    return _document(view, tuple(blocks))


def _best_facts(view: StudyView) -> Iterator[tuple[str, str]]:
    for best in view.bests:
        rate = f"{best.rate} ({best.interval})" if best.interval else best.rate
        yield f"Best of {best.group}" if best.group else "Best", rate
        yield "", best.levels
        if best.beats:
            yield "", best.beats
        for place, each in enumerate(best.as_good[:_FEW]):
            begin = "  or" if place else "as good, as far as one can tell,"
            yield "", f"{begin} with {each}"
        if len(best.as_good) > _FEW:
            yield "", f"  or as {len(best.as_good) - _FEW:,} more do"


def _knees(view: StudyView, full: bool) -> Iterator[tuple[str, str]]:
    """Of all curves; on one screen only those of all trials and those that have a knee."""
    curves = [each for each in view.curves if each.says]
    if not full:
        curves = [each for each in curves if each.has_knee or not each.curve.group]
    shown = curves[: _MOST_SHOWN if full else 2 * _FEW]
    yield from ((each.title, each.says) for each in shown)
    if rest := _more(curves, shown, ", in scaling.csv"):
        yield "", rest


def _screen_tables(view: StudyView, width: int) -> Iterator[Block]:
    for front in view.fronts:
        table = tables.front(front)
        most = _MOST_SHOWN if table.width <= width else _MOST_WRAPPED
        yield Section(front.title, (table.first(most), Paragraph(front.says, "note")))
    for text in view.not_measured:
        yield Paragraph(text, "note")
    shown = tables.first_rows(view, _MOST_SHOWN)
    table = tables.configurations(view, shown)
    if table.compact(width).width > width:
        shown = tables.first_rows(view, _MOST_WRAPPED)
        table = tables.folded_configurations(view, shown)
    rest = _more(view.configurations, shown, ", in configurations.csv")
    yield Section("Configurations", (table, Paragraph(rest, "note")))
    few = len(view.blocks) <= _MOST_SHOWN
    table = tables.blocks(view.blocks if few else view.flagged[:_MOST_SHOWN])
    yield Section("Blocks", (Paragraph(view.noise if view.blocks else "", "note"), table))
    failures = view.failures[:_MOST_SHOWN]
    table = tables.failures(view, failures)
    rest = _more(view.failures, failures, ", in trials.csv")
    yield Section("Attempts that answered nothing", (table, Paragraph(rest)))


def _problems(view: StudyView, full: bool) -> Iterator[tuple[str, str]]:
    if not full:
        flagged = [
            f"block {block.number}: {'; '.join(block.reasons) or 'disturbed'}"
            + (" (run again)" if block.rerun else "")
            for block in view.flagged
        ]
        more = " block more" if len(flagged) == _FEW + 1 else " blocks more"
        yield from _named("Disturbed", flagged, more)
        if view.failures:
            last = view.failures[-1]
            told = counted(len(view.failures), "attempt")
            yield "Failed", f"{told}, the last: {last.reason or last.outcome.value}"
    crashed = [
        f"{result.reason.strip()} ({result.place}/stderr.log)"
        for result in view.contents.counted
        if result.outcome in (Outcome.CRASHED, Outcome.TIMEOUT)
    ]
    yield from _named("Crashed", crashed, " more, in trials.csv")
    for place, group in enumerate(view.skipped[: _MOST_SHOWN if full else _FEW]):
        text = f"{counted(group.combinations, 'combination')}: {group.why}"
        yield "" if place else "Skipped", text
    for place, each in enumerate(view.remarks):
        yield "" if place else "Note", each


def _more(every: Sequence[object], shown: Sequence[object], where: str = "") -> str:
    more = len(every) - len(shown)
    return f"and {more:,} more{where}" if more else ""


def _named(name: str, texts: Sequence[str], more: str) -> Iterator[tuple[str, str]]:
    """The first few, under one name, and how many there are besides."""
    for place, text in enumerate(texts[:_FEW]):
        yield "" if place else name, text
    if len(texts) > _FEW:
        yield "", f"and {len(texts) - _FEW:,}{more}"
