"""A fit as a document: the answer first, then what it follows from."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from stepscope.fit.result import Batch, FitResult, Verdict
from stepscope.report.fit import messages
from stepscope.report.fit.json import fit_dict
from stepscope.report.fit.messages import memory_text
from stepscope.report.fit.sections import sections
from stepscope.report.kit.document import Document, Facts, Paragraph, Section, Verbatim
from stepscope.report.kit.format import plural, seconds_text
from stepscope.report.kit.outcomes import Tone
from stepscope.report.kit.table import Column, RowTone, Table
from stepscope.workloads.spec import NOT_FOR_FIT, SETTINGS, setting_default, trial_command

_TONES: dict[Verdict, Tone] = {
    Verdict.FITS: "good",
    Verdict.NO_LIMIT: "good",
    Verdict.DOES_NOT_FIT: "bad",
    Verdict.UNKNOWN: "warning",
}


def fit_document(fit: FitResult) -> Document:
    tone = _TONES[fit.verdict]
    answers = _answers(fit)
    is_clear = fit.verdict == Verdict.FITS and bool(answers.rows) and fit.linear2019 is None
    cached = ""
    if fit.from_cache:
        when = fit.created[:16].replace("T", " ")
        cached = f"From the cache (measured {when}). Use --no-cache to measure again"
    warnings = []
    size, loader = fit.batch_size, fit.loader
    if size is not None and loader is not None and loader.max_batch < size:
        warnings.append(
            f"Host memory limits the batch to {loader.max_batch:,} ({loader.limited_by}). Use "
            "fewer --workers, a smaller --prefetch, or a smaller batch"
        )
    if any(not result.is_ok for result in fit.verification):
        warnings.append("Some processes of `--verify` failed. Use a smaller batch")
    return Document(
        name=_heading(fit),
        state=fit.verdict.replace("_", " "),
        tone=tone,
        header=(Paragraph(cached, "note"),),
        blocks=(
            Paragraph("" if is_clear else messages.summary(fit), tone=tone),
            Section(
                "",
                (
                    answers,
                    *(Paragraph(line) for line in _evidence(fit)),
                    *(Paragraph(line, "warning") for line in warnings),
                ),
            ),
            *sections(fit),
            Section("", (Facts(tuple(_facts(fit))), Verbatim(_command(fit), "Try it"))),
        ),
        data=fit_dict(fit),
    )


def _heading(fit: FitResult) -> str:
    budget, framework = fit.budget, messages.framework_of(fit)
    text = fit.model
    if fit.subject and fit.subject.device_name:
        text += f" on {fit.subject.device_name}"
    precision = fit.settings.get("precision")
    text += f", {precision}, " if isinstance(precision, str) and precision else ", "
    if budget.available_bytes is None:
        text += f"{memory_text(budget.free_bytes)} free of {memory_text(budget.total_bytes)}"
    else:
        memory = f"for {framework}" if budget.device == "gpu" else "of host memory"
        text += f"{memory_text(budget.available_bytes)} {memory}"
    if budget.headroom_bytes:
        text += f", {memory_text(budget.headroom_bytes)} headroom"
    if budget.available_bytes != budget.requested_bytes:
        why = "other processes use the rest" if budget.other_processes else "no more is free"
        text += f" ({memory_text(budget.requested_bytes)} requested, {why})"
    return text


# The two batch sizes


def _answers(fit: FitResult) -> Table:
    recommended, max_batch = fit.recommended_batch or fit.max_batch, fit.max_batch
    device = fit.budget.device
    rows: list[tuple[str, ...]] = []
    tones: list[RowTone] = []

    def add(name: str, batch: Batch, tone: RowTone, facts: list[str]) -> None:
        rows.append((name, f"{batch.size:,}", ", ".join(facts)))
        tones.append("warning" if batch.retried else tone)

    if recommended is not None:
        is_both = max_batch is not None and max_batch.size == recommended.size
        facts = [*messages.batch_facts(recommended, device)]
        if is_both and recommended.passes and fit.verdict == Verdict.FITS:
            facts.append("also the max batch size")
        name = "Estimated max batch size" if fit.linear2019 else "Recommended batch size"
        add(name, recommended, "good", facts)
        if max_batch is not None and not is_both:
            name = "Max batch size"
            if fit.verdict == Verdict.NO_LIMIT:
                name = "Largest batch size tried"
            add(name, max_batch, "", [*messages.batch_facts(max_batch, device, recommended)])
    columns = (
        Column("", number=False),
        Column("", colored=True),
        Column("", number=False, wrap=True),
    )
    return Table(columns, tuple(rows), tuple(tones))


def _evidence(fit: FitResult) -> Iterator[str]:
    max_batch = fit.max_batch
    if max_batch is None or fit.verdict != Verdict.FITS or not max_batch.passes:
        return
    free, above = messages.free_text(max_batch), messages.next_batch_text(max_batch)
    yield f"At {max_batch.size:,}, {free}" + (f"; {above}" if above else "")
    if max_batch.passes > 1:
        yield (f"Verified: one full training cycle in each of {max_batch.passes} fresh processes")


# Facts and command


def _facts(fit: FitResult) -> Iterator[tuple[str, str]]:
    size = fit.batch_size
    accumulate, ranks = (fit.settings.get(name, 1) for name in ("accumulate", "ranks"))
    are_counts = isinstance(accumulate, int) and isinstance(ranks, int)
    if size is not None and are_counts and (accumulate, ranks) != (1, 1):
        yield (
            "Global batch size",
            f"{size * accumulate * ranks:,} ({size:,} × {accumulate} accumulated × {ranks} "
            f"{plural(ranks, 'rank')})",
        )
    for number, other in enumerate(fit.budget.other_processes):
        yield ("Other processes" if number == 0 else ""), messages.other_process_text(other)
    for number, note in enumerate(messages.notes(fit)):
        yield ("Note" if number == 0 else ""), note
    cost = fit.cost
    text = f"{cost.probes} {plural(cost.probes, 'probe')} in {seconds_text(cost.seconds)}"
    if cost.ooms:
        text += f"; {cost.ooms} of them ran out of memory"
    yield "Cost", f"{text}. Each probe is a disposable process"


def _command(fit: FitResult) -> str:
    budget = fit.budget
    if fit.batch_size is None:
        return ""
    options: dict[str, Any] = {"batch_size": fit.batch_size}
    if budget.available_bytes is not None:
        size = budget.available_bytes
        if size != budget.requested_bytes:
            size = size >> 20 << 20
        units = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1, ""))
        number, unit = next((size // each, unit) for each, unit in units if size % each == 0)
        options["gpu_memory" if budget.device == "gpu" else "memory"] = f"{number}{unit}"
    for name, value in fit.settings.items():
        if name in SETTINGS and name not in NOT_FOR_FIT and value != setting_default(name):
            options[name] = value
    return shlex.join(trial_command(fit.model, options))
