"""A fit as a document: the answer first, then what it follows from."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from stepscope.fit.answer import Batch, Fit, MemoryBudget, Verdict
from stepscope.report.fit import sentences
from stepscope.report.fit.json import fit_dict
from stepscope.report.fit.sections import sections
from stepscope.report.fit.sentences import memory_text
from stepscope.report.kit.document import Document, Facts, Paragraph, Section, Verbatim
from stepscope.report.kit.format import rate_text, seconds_text, share_text
from stepscope.report.kit.outcomes import Tone
from stepscope.report.kit.table import Column, RowTone, Table
from stepscope.workloads.spec import NOT_FOR_FIT, SETTINGS, setting_default, trial_command

_TONES: dict[Verdict, Tone] = {
    Verdict.FITS: "good",
    Verdict.NO_LIMIT: "good",
    Verdict.DOES_NOT_FIT: "bad",
    Verdict.CANNOT_TELL: "warning",
}
_SLOWER = 0.02
"""Less than that does not matter."""


def fit_document(fit: Fit) -> Document:
    tone = _TONES[fit.verdict]
    answers = _answers(fit)
    is_said = fit.verdict == Verdict.FITS and bool(answers.rows) and fit.linear is None
    cached = ""
    if fit.cached:
        when = fit.cached[:16].replace("T", " ")
        cached = f"Found {when}, and kept; --fresh measures again"
    warnings = []
    size, loader = fit.batch_size, fit.loader
    if size is not None and loader is not None and loader.max_batch < size:
        warnings.append(
            f"The host bears a batch of {loader.max_batch:,} only ({loader.bound_by}): fewer "
            "--workers, a smaller --prefetch, or a smaller batch"
        )
    if any(not result.is_ok for result in fit.proof):
        warnings.append("Not all of the fresh processes of --prove passed: take a smaller batch")
    return Document(
        name=_head(fit),
        state=fit.verdict,
        tone=tone,
        header=(Paragraph(cached, "note"),),
        blocks=(
            Paragraph("" if is_said else sentences.summary(fit), tone=tone),
            Section(
                "",
                (
                    answers,
                    *(Paragraph(line) for line in _certificate(fit)),
                    *(Paragraph(line, "warning") for line in warnings),
                ),
            ),
            *sections(fit),
            Section("", (Facts(tuple(_facts(fit))), Verbatim(_command(fit), "Try it"))),
        ),
        data=fit_dict(fit),
    )


def _head(fit: Fit) -> str:
    budget, framework = fit.budget, sentences.framework_of(fit)
    text = fit.model
    if fit.subject and fit.subject.device_name:
        text += f" on {fit.subject.device_name}"
    precision = fit.settings.get("precision")
    text += f", {precision}, " if isinstance(precision, str) and precision else ", "
    if budget.available is None:
        text += f"{memory_text(budget.free)} free of {memory_text(budget.total)}"
    else:
        what = f"for {framework}" if budget.device == "gpu" else "of host memory"
        text += f"{memory_text(budget.available)} {what}"
    if budget.headroom:
        text += f", of which {memory_text(budget.headroom)} stay free"
    if budget.available != budget.requested:
        why = "others hold the rest" if budget.other_processes else "no more is free"
        text += f": {memory_text(budget.requested)} were asked for, {why}"
    return text


# The two batches


def _answers(fit: Fit) -> Table:
    use, largest = fit.recommended_batch or fit.max_batch, fit.max_batch
    rows: list[tuple[str, ...]] = []
    tones: list[RowTone] = []

    def add(word: str, batch: Batch, tone: RowTone, facts: list[str]) -> None:
        rows.append((word, f"--batch-size {batch.size}", ", ".join(facts)))
        tones.append("warning" if batch.retried else tone)

    if use is not None:
        is_both = largest is not None and largest.size == use.size
        facts = [*_speed(use, None), *_behaviour(use, fit.budget)]
        if is_both and use.passed and fit.verdict == Verdict.FITS:
            facts.append("the largest that fits")
        add("estimate" if fit.linear else "use", use, "good", facts)
        if largest is not None and not is_both:
            facts = [*_speed(largest, use), *_behaviour(largest, fit.budget)]
            add("largest", largest, "", facts)
    columns = (
        Column("", number=False),
        Column("", number=False, toned=True),
        Column("", number=False, wide=True),
    )
    return Table(columns, tuple(rows), tuple(tones))


def _speed(batch: Batch, than: Batch | None) -> Iterator[str]:
    rate, other = batch.samples_per_second, than.samples_per_second if than else None
    if not rate:
        return
    yield f"{rate_text(rate)} samples/s"
    if other and rate < (1 - _SLOWER) * other:
        yield f"{share_text(1 - rate / other)} slower"


def _behaviour(batch: Batch, budget: MemoryBudget) -> Iterator[str]:
    if not batch.passed:
        yield "predicted, not run"
    elif batch.retried:
        yield f"fits, but thrashes ({sentences.retries_text(batch.retries)})"
    elif budget.device == "gpu":
        yield "no allocator retry"


def _certificate(fit: Fit) -> Iterator[str]:
    largest, device = fit.max_batch, fit.budget.device
    if largest is None or fit.verdict != Verdict.FITS or not largest.passed:
        return
    is_some = largest.free_bytes > 0
    free = f"leaves {memory_text(largest.free_bytes)}" if is_some else "leaves nothing"
    text = f"{largest.size:,} fits and {free}"
    above = largest.failure_above
    if above:
        where, often = sentences.failure_text(above, device), sentences.often_text(largest)
        place = f" ({where})" if where else ""
        if often:
            text += f"; {above.batch:,} {', '.join(filter(None, (often, where)))}"
        elif above.missing:
            more = memory_text(above.missing)
            text += f"; {above.batch:,} would need at least {more} more{place}"
        else:
            text += f"; {above.batch:,} does not fit{place}"
    yield text
    if largest.passed > 1:
        yield f"It went through a whole cycle in {largest.passed} fresh processes"


# Around it


def _facts(fit: Fit) -> Iterator[tuple[str, str]]:
    size = fit.batch_size
    accumulate, ranks = (fit.settings.get(name, 1) for name in ("accumulate", "ranks"))
    are_counts = isinstance(accumulate, int) and isinstance(ranks, int)
    if size is not None and are_counts and (accumulate, ranks) != (1, 1):
        yield (
            "Global batch",
            f"{size * accumulate * ranks:,} ({size:,} × {accumulate} accumulated × {ranks} "
            f"{'rank' if ranks == 1 else 'ranks'})",
        )
    for place, other in enumerate(fit.budget.other_processes):
        yield ("Also on the GPU" if place == 0 else ""), sentences.other_process_text(other)
    for place, note in enumerate(sentences.notes(fit)):
        yield ("Note" if place == 0 else ""), note
    effort = fit.effort
    probes = "probe" if effort.probes == 1 else "probes"
    cost = f"{effort.probes} {probes} in {seconds_text(effort.seconds)}"
    if effort.ooms:
        cost += f", {effort.ooms} of which ran out of memory in processes that were thrown away"
    yield "Cost", f"{cost}; nothing of yours was touched"


def _command(fit: Fit) -> str:
    budget = fit.budget
    if fit.batch_size is None:
        return ""
    options: dict[str, Any] = {"batch_size": fit.batch_size}
    if budget.available is not None:
        size = budget.available
        if size != budget.requested:
            size = size >> 20 << 20
        units = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1, ""))
        number, unit = next((size // each, unit) for each, unit in units if size % each == 0)
        options["gpu_memory" if budget.device == "gpu" else "memory"] = f"{number}{unit}"
    for name, value in fit.settings.items():
        if name in SETTINGS and name not in NOT_FOR_FIT and value != setting_default(name):
            options[name] = value
    return shlex.join(trial_command(fit.model, options))
