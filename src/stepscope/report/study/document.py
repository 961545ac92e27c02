"""The documents of a study: the page, and what a terminal shows on a screen or in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from stepscope import __version__
from stepscope.analysis.study.records import THROUGHPUT, Effects
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
from stepscope.report.study import plots, sentences, tables
from stepscope.report.study.view import Best, StudyView, skipped_groups
from stepscope.report.study.words import counted, upper_first
from stepscope.runs.paths import replace_atomically
from stepscope.studies.folder import StudyPaths

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
    path = folder / StudyPaths(view.folder).report.name
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
            Section("Effects", tuple(_effects(view, each) for each in view.analysis.effects)),
            _scaling(view),
            _trade_offs(view),
            Section("Configurations", (tables.configurations(view, rows), Paragraph(rest, "note"))),
            _noise(view),
            Section("Not tried", (tables.skipped(view).first(_MOST_ROWS),)),
            Section("Notes", (Listing.of(view.notes),)),
        ),
        footer=f"Made by stepscope {__version__}. {units}",
    )


def _document(view: StudyView, blocks: tuple[Block, ...], footer: str = "") -> Document:
    state, tone = view.state
    header = (
        Paragraph(view.headline, "lead"),
        Paragraph(view.about, "note"),
        Paragraph(view.warning and f"{view.warning}.", "warning"),
        Paragraph(view.now, label="Now"),
    )
    return Document(view.name, state, tone, blocks, header=header, footer=footer)


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
    ranked = (Section(sentences.ranking_title(each), (tables.ranking(each),)) for each in shown)
    return Section(
        "What matters",
        (
            Paragraph(about if shown else "", "note"),
            SideBySide(tuple(plots.ranking_plot(each, top) for each in shown)),
            Section("As a table", tuple(ranked), folded=True),
        ),
    )


def _effects(view: StudyView, effects: Effects) -> Section:
    response = effects.response
    most = _MOST_INTERACTIONS if response.key == THROUGHPUT else _FEW_INTERACTIONS
    told = [each for each in effects.interactions if each.is_significant]
    figures = [plots.effects_plot(effects)] if effects.main else []
    figures += [plots.interaction_plot(each, response) for each in told[:most]]
    more = [sentences.interaction_text(each, response) for each in told[most:]]
    return Section(
        upper_first(response.label),
        (
            Paragraph(sentences.effects_text(effects), "note"),
            SideBySide(tuple(figures)),
            Paragraph("What else depends on each other:" if more else "", "note"),
            Listing.of(more),
            Listing.of(view.effect_remarks[response.key]),
            Section("As a table", (tables.levels(effects),), folded=True),
        ),
    )


def _scaling(view: StudyView) -> Section:
    """Curves of all trials first, then those that have a knee."""
    curves = sorted(
        view.analysis.curves,
        key=lambda curve: (bool(curve.group), curve.knee is None, len(curve.points) < 3),
    )
    shown = curves[:_MOST_PLOTS]
    more = len(curves) - len(shown)
    rest = f"{counted(more, 'more curve')} in scaling.csv." if more else ""
    figures = tuple(map(plots.curve_plot, shown))
    return Section("Scaling", (SideBySide(figures), Paragraph(rest, "note")))


def _trade_offs(view: StudyView) -> Section:
    blocks: list[Block] = []
    for front in view.analysis.fronts:
        plot = plots.front_plot(front, view.analysis.configurations, view.factors)
        table = tables.front(view, front).first(_MOST_ROWS)
        about = Paragraph(sentences.front_text(front), "note")
        blocks.append(Section(sentences.front_title(front), (about, SideBySide((plot, table)))))
    blocks += [Paragraph(text, "note") for text in view.not_measured]
    return Section("Trade-offs", tuple(blocks))


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
    rankings = view.rankings
    for place, ranking in enumerate(rankings if full else rankings[:1]):
        others = [] if full else map(sentences.sensitivity_text, rankings[1:])
        title = f"What matters for {sentences.ranking_title(ranking) if place else 'throughput'}"
        table = tables.ranking(ranking, with_bars=True)
        blocks.append(Section(title, (table, *map(Paragraph, others))))
    in_detail = view.analysis.effects if full else ()
    for effects in in_detail:
        response = effects.response
        told = [
            sentences.interaction_text(each, response)
            for each in effects.interactions
            if each.is_significant
        ]
        about = Paragraph(sentences.effects_text(effects), "note")
        remarks = Listing.of([*told, *view.effect_remarks[response.key]])
        title = upper_first(response.label)
        blocks.append(Section(title, (about, tables.levels(effects), remarks)))
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
    curves = [each for each in view.analysis.curves if full or each.knee or not each.group]
    shown = curves[: _MOST_SHOWN if full else 2 * _FEW]
    yield from ((sentences.curve_title(each), sentences.curve_text(each)) for each in shown)
    if rest := _more(curves, shown, ", in scaling.csv"):
        yield "", rest


def _screen_tables(view: StudyView, width: int) -> Iterator[Block]:
    for front in view.analysis.fronts:
        table = tables.front(view, front)
        most = _MOST_SHOWN if table.width <= width else _MOST_WRAPPED
        about = Paragraph(sentences.front_text(front), "note")
        yield Section(sentences.front_title(front), (table.first(most), about))
    for text in view.not_measured:
        yield Paragraph(text, "note")
    shown = tables.first_rows(view, _MOST_SHOWN)
    table = tables.configurations(view, shown)
    if table.compact(width).width > width:
        shown = tables.first_rows(view, _MOST_WRAPPED)
        table = tables.configurations(view, shown, is_folded=True)
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
        for result in view.counted
        if result.outcome in (Outcome.CRASHED, Outcome.TIMEOUT)
    ]
    yield from _named("Crashed", crashed, " more, in trials.csv")
    groups = skipped_groups(view.skipped)[: _MOST_SHOWN if full else _FEW]
    skipped = [f"{counted(group.combinations, 'combination')}: {group.why}" for group in groups]
    yield from _named("Skipped", skipped)
    yield from _named("Note", view.notes)


def _more(every: Sequence[object], shown: Sequence[object], where: str = "") -> str:
    more = len(every) - len(shown)
    return f"and {more:,} more{where}" if more else ""


def _named(name: str, texts: Sequence[str], more: str = "") -> Iterator[tuple[str, str]]:
    """Under one name; where `more` says so, the first few, and how many there are besides."""
    for place, text in enumerate(texts[:_FEW] if more else texts):
        yield "" if place else name, text
    if more and len(texts) > _FEW:
        yield "", f"and {len(texts) - _FEW:,}{more}"
