"""The documents of a study: the page, and the short and full terminal output."""

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
from stepscope.report.kit.format import upper_first
from stepscope.report.study import messages, plots, tables
from stepscope.report.study.format import counted
from stepscope.report.study.view import Best, StudyView, skipped_groups
from stepscope.runs.files import replace_atomically
from stepscope.studies.folder import StudyPaths

# Limits of the page.
_MAX_ROWS = 200
_MAX_CURVES = 12
_MAX_INTERACTION_PLOTS = 6
_MAX_OTHER_INTERACTION_PLOTS = 1
"""For responses other than throughput; further interactions are listed as text."""
_MAX_EQUIVALENT = 8
_MAX_RANKINGS = 9

# Limits of the terminal.
_MAX_LINES = 20
_MAX_WRAPPED_LINES = 8
"""Rows of a table whose last column wraps."""
_FEW = 5


def write_report(view: StudyView, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / StudyPaths(view.folder).report.name
    replace_atomically(path, html.render(page_of(view)), folder.parent)
    return path


def page_of(view: StudyView) -> Document:
    """Return the page of a study, the most important results first."""
    best = Section("Best configuration", (SideBySide(tuple(map(_best, view.bests))),), tone="good")
    if view.missing_results:
        best = Section("Best configuration", (Paragraph(view.missing_results),))
    rows = tables.first_rows(view, _MAX_ROWS)
    rest = _more(view.configurations, rows, " in configurations.csv")
    return _document(
        view,
        (
            best,
            _main_effects(view),
            _interactions(view),
            _scaling(view),
            _trade_offs(view),
            Section("Configurations", (tables.configurations(view, rows), Paragraph(rest, "note"))),
            _noise(view),
            Section("Skipped combinations", (tables.skipped(view).first(_MAX_ROWS),)),
            Section("Notes", (Listing.of(view.notes),)),
        ),
        footer=f"Made by stepscope {__version__}. The CSV files next to this page have all tables.",
    )


def _document(view: StudyView, blocks: tuple[Block, ...], footer: str = "") -> Document:
    state, tone = view.state
    header = (
        Paragraph(view.headline, "lead"),
        Paragraph(view.about, "note"),
        Paragraph(view.warning and f"{view.warning}.", "warning"),
        Paragraph(view.now, label="Running"),
    )
    return Document(view.name, state, tone, blocks, header=header, footer=footer)


def _best(best: Best) -> Section:
    shown = best.equivalent[:_MAX_EQUIVALENT]
    rest = _more(best.equivalent, shown)
    equivalent = "Not significantly different from the best:" if shown else ""
    return Section(
        "",
        (
            Tiles((Tile(best.group, best.throughput, best.interval and f"({best.interval})"),)),
            Verbatim(best.levels),
            Paragraph(best.speedup, "note"),
            Paragraph(equivalent, "note"),
            Listing.of([*shown, rest] if rest else shown),
        ),
    )


def _main_effects(view: StudyView) -> Section:
    shown = view.rankings[:_MAX_RANKINGS]
    top = plots.ranking_top(shown)
    about = (
        "Throughput of the best level divided by that of the worst, averaged over the levels of "
        "all other factors. Gray: not statistically significant."
    )
    ranked = (Section(messages.ranking_title(each), (tables.ranking(each),)) for each in shown)
    return Section(
        "Main effects",
        (
            Paragraph(about if shown else "", "note"),
            SideBySide(tuple(plots.ranking_plot(each, top) for each in shown)),
            Section("Table", tuple(ranked), folded=True),
            _marginal_means(view),
        ),
    )


def _marginal_means(view: StudyView) -> Section:
    effects = [each for each in view.analysis.effects if each.main]
    others = [each for each in view.analysis.effects if not each.main]
    remarks = [text for each in view.effect_remarks.values() for text in each]
    by_response = (
        Section(upper_first(each.response.label), (tables.levels(each),)) for each in effects
    )
    return Section(
        "Marginal means",
        (
            SideBySide(tuple(map(plots.effects_plot, effects))),
            *(
                Paragraph(
                    messages.effects_text(each), "note", label=upper_first(each.response.label)
                )
                for each in others
            ),
            Listing.of(remarks),
            Section("Table", tuple(by_response), folded=True),
        ),
    )


def _interactions(view: StudyView) -> Section:
    figures, more = [], []
    for effects in view.analysis.effects:
        response = effects.response
        is_throughput = response.key == THROUGHPUT
        most = _MAX_INTERACTION_PLOTS if is_throughput else _MAX_OTHER_INTERACTION_PLOTS
        significant = [each for each in effects.interactions if each.is_significant]
        figures += [plots.interaction_plot(each, response) for each in significant[:most]]
        more += [
            f"{upper_first(response.label)}: {messages.interaction_text(each, response)}"
            for each in significant[most:]
        ]
    return Section(
        "Interactions",
        (
            SideBySide(tuple(figures)),
            Paragraph("Other significant interactions:" if more else "", "note"),
            Listing.of(more),
        ),
    )


def _scaling(view: StudyView) -> Section:
    """Curves of all trials first, then those with a knee."""
    curves = sorted(
        view.analysis.curves,
        key=lambda curve: (bool(curve.group), curve.knee is None, len(curve.points) < 3),
    )
    shown = curves[:_MAX_CURVES]
    figures = tuple(map(plots.curve_plot, shown))
    rest = _more(curves, shown, " in scaling.csv")
    return Section("Scaling", (SideBySide(figures), Paragraph(rest, "note")))


def _trade_offs(view: StudyView) -> Section:
    blocks: list[Block] = []
    for front in view.analysis.fronts:
        plot = plots.front_plot(front, view.analysis.configurations, view.factors)
        table = tables.front(view, front).first(_MAX_ROWS)
        about = Paragraph(messages.front_text(front), "note")
        blocks.append(Section(messages.front_title(front), (about, SideBySide((plot, table)))))
    blocks += [Paragraph(text, "note") for text in view.not_measured]
    return Section("Trade-offs (Pareto fronts)", tuple(blocks))


def _noise(view: StudyView) -> Section:
    blocks: list[Block] = []
    if view.blocks:
        blocks.append(Paragraph(view.block_summary, "note"))
        if sum(block.reference_throughput is not None for block in view.blocks) > 1:
            blocks.append(SideBySide((plots.reference_plot(view.blocks),)))
        blocks.append(tables.blocks(view.flagged[:_MAX_ROWS]))
        every = tables.blocks(view.blocks[:_MAX_ROWS])
        blocks.append(Section("All blocks", (every,), folded=True))
    failures = tables.failures(view, view.failures[:_MAX_ROWS])
    return Section(
        "Noise",
        (Section("Blocks", tuple(blocks)), Section("Failed attempts", (failures,))),
    )


def screen_of(view: StudyView, width: int, full: bool = False) -> Document:
    """Return the results on one screen; `full` has all tables, for a terminal of this width."""
    blocks: list[Block] = [Paragraph(view.missing_results), Facts(tuple(_best_facts(view)))]
    rankings = view.rankings
    for ranking in rankings if full else rankings[:1]:
        others = [] if full else map(messages.sensitivity_text, rankings[1:])
        group = f", {messages.ranking_title(ranking)}" if ranking.group else ""
        table = tables.ranking(ranking, with_bars=True)
        section = Section(f"Main effects on throughput{group}", (table, *map(Paragraph, others)))
        blocks.append(section)
    if full:
        blocks += [_screen_effects(view, effects) for effects in view.analysis.effects]
    blocks.append(Section("Scaling", (Facts(tuple(_knees(view, full))),)))
    if full:
        blocks += _screen_tables(view, width)
    blocks.append(Section("Notes" if full else "", (Facts(tuple(_problems(view, full))),)))
    return _document(view, tuple(blocks))


def _screen_effects(view: StudyView, effects: Effects) -> Section:
    response = effects.response
    interactions = [
        f"interaction: {messages.interaction_text(each, response)}"
        for each in effects.interactions
        if each.is_significant
    ]
    return Section(
        f"Marginal means: {response.label}",
        (
            Paragraph(messages.effects_text(effects), "note"),
            tables.levels(effects),
            Listing.of([*interactions, *view.effect_remarks[response.key]]),
        ),
    )


def _best_facts(view: StudyView) -> Iterator[tuple[str, str]]:
    for best in view.bests:
        interval = f" ({best.interval})" if best.interval else ""
        label = f"Best for {best.group}" if best.group else "Best configuration"
        yield label, f"{best.throughput}{interval}"
        yield "", best.levels
        if best.speedup:
            yield "", best.speedup
        for place, each in enumerate(best.equivalent[:_FEW]):
            yield "", f"  or {each}" if place else f"not significantly slower: {each}"
        if rest := _more(best.equivalent, best.equivalent[:_FEW]):
            yield "", f"  {rest}"


def _knees(view: StudyView, full: bool) -> Iterator[tuple[str, str]]:
    """Yield all curves, or only those of all trials and those with a knee."""
    curves = [each for each in view.analysis.curves if full or each.knee or not each.group]
    shown = curves[: _MAX_LINES if full else 2 * _FEW]
    yield from ((messages.curve_title(each), messages.curve_text(each)) for each in shown)
    if rest := _more(curves, shown, " in scaling.csv"):
        yield "", rest


def _screen_tables(view: StudyView, width: int) -> Iterator[Block]:
    for front in view.analysis.fronts:
        table = tables.front(view, front)
        most = _MAX_LINES if table.width <= width else _MAX_WRAPPED_LINES
        about = Paragraph(messages.front_text(front), "note")
        yield Section(messages.front_title(front), (table.first(most), about))
    for text in view.not_measured:
        yield Paragraph(text, "note")
    shown = tables.first_rows(view, _MAX_LINES)
    table = tables.configurations(view, shown)
    if table.compact(width).width > width:
        shown = tables.first_rows(view, _MAX_WRAPPED_LINES)
        table = tables.configurations(view, shown, is_folded=True)
    rest = _more(view.configurations, shown, " in configurations.csv")
    yield Section("Configurations", (table, Paragraph(rest, "note")))
    few = len(view.blocks) <= _MAX_LINES
    table = tables.blocks(view.blocks if few else view.flagged[:_MAX_LINES])
    yield Section("Blocks", (Paragraph(view.block_summary if view.blocks else "", "note"), table))
    failures = view.failures[:_MAX_LINES]
    table = tables.failures(view, failures)
    rest = _more(view.failures, failures, " in trials.csv")
    yield Section("Failed attempts", (table, Paragraph(rest)))


def _problems(view: StudyView, full: bool) -> Iterator[tuple[str, str]]:
    if not full:
        flagged = [
            f"block {block.number}: {'; '.join(block.reasons)}"
            + (" (rerun)" if block.rerun else "")
            for block in view.flagged
        ]
        yield from _labeled("Flagged", flagged, " in blocks.csv")
        if view.failures:
            last = view.failures[-1]
            attempts = counted(len(view.failures), "attempt")
            yield "Failed", f"{attempts}; last reason: {last.reason or last.outcome.value}"
    crashed = [
        f"{result.reason.strip()} ({result.place}/stderr.log)"
        for result in view.counted
        if result.outcome in (Outcome.CRASHED, Outcome.TIMEOUT)
    ]
    yield from _labeled("Crashed", crashed, " in trials.csv")
    groups = skipped_groups(view.skipped)[: _MAX_LINES if full else _FEW]
    skipped = [f"{counted(group.combinations, 'combination')}: {group.reason}" for group in groups]
    yield from _labeled("Skipped", skipped)
    yield from _labeled("Note", view.notes)


def _more(every: Sequence[object], shown: Sequence[object], where: str = "") -> str:
    more = len(every) - len(shown)
    return f"and {more:,} more{where}" if more else ""


def _labeled(label: str, texts: Sequence[str], where: str = "") -> Iterator[tuple[str, str]]:
    """Yield texts under one label; only the first few if `where` has the rest."""
    shown = texts[:_FEW] if where else texts
    for place, text in enumerate(shown):
        yield "" if place else label, text
    if rest := _more(texts, shown, where):
        yield "", rest
