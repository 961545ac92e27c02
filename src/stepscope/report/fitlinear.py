"""The estimate of 2019, as it was made: two small batches, a line, and what a reserve leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.advice.answer import Linear2019
from stepscope.report.fitparts import Section, batch_text, memory_text
from stepscope.report.tables import Column, Table
from stepscope.workloads.probing import Layer

_MOST_LAYERS = 10


def linear_sections(linear: Linear2019) -> Iterator[Section]:
    """The two measurements, the line through them and the batches; then the largest layers."""
    yield Section("The estimate of 2019 (linear2019)", tuple(_lines(linear)))
    if linear.layers:
        yield _layers(linear.layers)


def _layers(layers: Sequence[Layer]) -> Section:
    largest = sorted(layers, key=lambda each: each.parameters + 2 * each.output, reverse=True)
    columns = (
        Column("Layer", number=False),
        Column("Kind", number=False, spare=1),
        Column("Parameters"),
        Column("Output a sample"),
    )
    rows = tuple(
        (
            each.name or "(the model)",
            each.kind,
            memory_text(each.parameters),
            memory_text(each.output),
        )
        for each in largest[:_MOST_LAYERS]
    )
    left_out = len(layers) - len(rows)
    title = "The largest layers" + (f" ({left_out} more are in the JSON)" if left_out else "")
    return Section(title, (), Table(columns, rows))


def _lines(linear: Linear2019) -> Iterator[str]:
    yield (
        f"Batch {batch_text(linear.small)} held {memory_text(linear.small_bytes)}, "
        f"{batch_text(linear.large)} held {memory_text(linear.large_bytes)}: "
        f"s = {memory_text(linear.per_sample)} a sample, X = {memory_text(linear.fixed)}"
    )
    for reserve, batch in linear.by_reserve:
        kept = f"{memory_text(reserve)} in reserve" if reserve else "nothing in reserve"
        yield f"{batch_text(batch)} with {kept}{_on_all(batch, linear.gpus)}"
    if linear.by_layers is not None:
        yield f"{batch_text(linear.by_layers)} by the sizes of all layers (equation 4.1)"
    if linear.note:
        yield linear.note


def _on_all(batch: int, gpus: int) -> str:
    return f", {batch_text(batch * gpus)} on {gpus} GPUs" if gpus > 1 else ""
