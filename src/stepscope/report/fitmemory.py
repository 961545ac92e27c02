"""What the memory of a batch is made of, which of it grows, and what to attack."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stepscope.advice.answer import Composition, Device, Fit
from stepscope.analysis.memory_model import Line
from stepscope.report.fitparts import Section, batch_text, memory_text
from stepscope.report.format import share_text
from stepscope.report.tables import Column, Table

_BAR = 24
"""Characters of the longest bar."""


def memory_section(fit: Fit) -> Section | None:
    """A row for each part; what grows with the batch, and what not."""
    made_of = fit.composition
    if made_of is None:
        lines = tuple(_growth(fit))
        return Section("Memory", lines) if lines else None
    parts = [(name, size) for name, size in _parts(made_of, fit.room.device) if size > 0]
    whole = _held(fit, made_of.batch) or sum(size for _, size in parts)
    lines = (
        *_split(made_of, fit.need),
        *_growth(fit),
        *_context(made_of, fit.room.device),
        *([made_of.attack] if made_of.attack else []),
    )
    held = f": {memory_text(whole)}" if parts else ""
    table = _table(parts, whole) if parts else None
    return Section(f"Memory at {batch_text(made_of.batch)}{held}", lines, table)


def _held(fit: Fit, batch: int) -> int:
    """What it was seen to hold. The parts do not all live at once: gradients come as activations
    go."""
    return max((point.reserved for point in fit.curve if point.batch == batch), default=0)


def _table(parts: Sequence[tuple[str, int]], whole: int) -> Table:
    most = max(size for _, size in parts)
    columns = (
        Column("Part", number=False),
        Column("Memory"),
        Column("Share"),
        Column("", number=False, spare=1),
    )
    rows = tuple(
        (name, memory_text(size), share_text(size / whole), _bar(size / most))
        for name, size in parts
    )
    return Table(columns, rows)


def _parts(made_of: Composition, device: Device) -> Iterator[tuple[str, int]]:
    parts = made_of.parts
    yield "weights", parts.weights
    yield "gradients", parts.gradients
    yield "optimizer state", parts.optimizer
    yield "inputs", parts.inputs
    yield "activations", parts.activations
    yield "workspace", made_of.workspace
    yield "fragmentation", made_of.fragmentation
    if device == "host":
        yield "libraries and data", parts.outside


def _context(made_of: Composition, device: Device) -> Iterator[str]:
    """A limit for PyTorch does not hold it, but the GPU has to."""
    if device == "gpu" and made_of.parts.outside > 0:
        yield f"A context takes {memory_text(made_of.parts.outside)} on top of it"


def _split(made_of: Composition, need: Line | None) -> Iterator[str]:
    """What grows with the batch, and what not; unless what a batch needs is the same, and says
    it."""
    if need is None or _of(need) != _of(Line(made_of.fixed, made_of.per_sample)):
        yield (
            f"{memory_text(made_of.fixed)} for any batch, "
            f"{memory_text(made_of.per_sample)} for each of its samples"
        )


def _growth(fit: Fit) -> Iterator[str]:
    if fit.need is not None:
        yield f"Where memory is short, a batch needs {_of(fit.need)}"
    if fit.ease is not None:
        yield f"With ease, it takes {_of(fit.ease)}"


def _of(line: Line) -> str:
    return f"{memory_text(line.fixed)} + {memory_text(line.per_sample)} a sample"


def _bar(share: float) -> str:
    return "█" * max(1, round(share * _BAR))
