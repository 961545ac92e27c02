"""What the answers follow from: memory, batches tried, proof, other cards, what-ifs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stepscope.analysis.memory.model import NO_LIMIT, MemoryLine
from stepscope.fit.answer import Fit, Linear2019, LoaderMemory
from stepscope.report.fit import sentences
from stepscope.report.fit.sentences import memory_text
from stepscope.report.kit.document import Paragraph, Section
from stepscope.report.kit.format import MISSING, rate_text, share_text
from stepscope.report.kit.table import Column, Table

_BAR = 24
"""Characters of the longest bar."""
_MOST_POINTS = 12
"""Rows of the curve. The answers, and what failed around them, are always among them."""
_MOST_LAYERS = 10


def sections(fit: Fit) -> Iterator[Section]:
    """All that there may be; those without content are not drawn."""
    if fit.linear:
        yield from _linear(fit.linear)
    yield _memory(fit)
    yield _curve(fit)
    yield _section("Proof, in fresh processes", None, _proof(fit))
    cards = (
        (Column("Card"), lambda card: memory_text(card.size)),
        (Column("For batches"), lambda card: memory_text(card.limit)),
        (Column("Use"), lambda card: _predicted(card.recommended_batch)),
        (Column("Largest"), lambda card: _predicted(card.max_batch)),
    )
    yield _section("Other cards, predicted from the same probes", Table.of(fit.cards, cards))
    what_ifs = (
        (Column("Change", number=False), sentences.change_text),
        (Column("Largest"), lambda each: _predicted(each.max_batch)),
        (Column("Why", number=False), lambda each: sentences.reason_text(each, fit)),
    )
    title = "What would change it (estimates: nothing of it was run)"
    yield _section(title, Table.of(fit.what_ifs, what_ifs))
    if fit.loader:
        yield _section("The host's side", None, _loader(fit.loader))


def _section(title: str, table: Table | None, lines: Iterable[str] = ()) -> Section:
    return Section(title, (*([table] if table else ()), *map(Paragraph, lines)))


def _with_more(title: str, left_out: int) -> str:
    return f"{title} ({left_out} more are in the JSON)" if left_out else title


def _predicted(batch: int) -> str:
    if batch >= NO_LIMIT:
        return "no limit"
    return f"{batch:,}" if batch > 0 else "does not fit"


def _line_text(line: MemoryLine) -> str:
    return f"{memory_text(line.fixed)} + {memory_text(line.per_sample)} a sample"


def _memory(fit: Fit) -> Section:
    made_of, on_gpu = fit.composition, fit.budget.device == "gpu"
    growth = []
    if fit.minimum is not None:
        growth.append(f"Where memory is short, a batch needs {_line_text(fit.minimum)}")
    if fit.comfortable is not None:
        growth.append(f"With ease, it takes {_line_text(fit.comfortable)}")
    if made_of is None:
        return _section("Memory", None, growth)
    all_parts = {
        "weights": made_of.parts.weights,
        "gradients": made_of.parts.gradients,
        "optimizer state": made_of.parts.optimizer,
        "inputs": made_of.parts.inputs,
        "activations": made_of.parts.activations,
        "workspace": made_of.workspace,
        "fragmentation": made_of.fragmentation,
        "libraries and data": 0 if on_gpu else made_of.parts.outside,
    }
    parts = {name: size for name, size in all_parts.items() if size > 0}
    # The parts do not all live at once: gradients come as activations go.
    seen = (point.reserved for point in fit.curve if point.batch == made_of.batch)
    whole = max(seen, default=0) or sum(parts.values())
    most = max(parts.values(), default=1)
    columns = (
        (Column("Part", number=False), lambda part: part[0]),
        (Column("Memory"), lambda part: memory_text(part[1])),
        (Column("Share"), lambda part: share_text(part[1] / whole)),
        (
            Column("", number=False, spare=1),
            lambda part: "█" * max(1, round(part[1] / most * _BAR)),
        ),
    )
    line = MemoryLine(made_of.fixed, made_of.per_sample)
    lines = [*growth]
    if fit.minimum is None or _line_text(fit.minimum) != _line_text(line):
        fixed, per_sample = memory_text(line.fixed), memory_text(line.per_sample)
        lines.insert(0, f"{fixed} for any batch, {per_sample} for each of its samples")
    if on_gpu and made_of.parts.outside > 0:
        lines.append(f"A context takes {memory_text(made_of.parts.outside)} on top of it")
    lines.append(sentences.advice(made_of, fit.budget))
    held = f": {memory_text(whole)}" if parts else ""
    return _section(f"Memory at {made_of.batch:,}{held}", Table.of(parts.items(), columns), lines)


def _curve(fit: Fit) -> Section:
    """All batches that were tried, or the most telling of them and others evenly between."""
    remarks: dict[int, list[str]] = {point.batch: [] for point in fit.curve}
    telling = {batch for batch, _ in fit.holes}
    for word, answer in (("use", fit.recommended_batch), ("largest", fit.max_batch)):
        if answer:
            above = answer.failure_above
            telling |= {answer.size, above.batch if above else answer.size}
            remarks.setdefault(answer.size, []).append(word)
    for point in fit.curve:
        if not point.passed:
            is_hole = any(point.batch == batch for batch, _ in fit.holes)
            remarks[point.batch].append("a hole" if is_hole else "fails")
        elif point.retried:
            remarks[point.batch].append(sentences.retries_text(point.retries))
    points = sorted(fit.curve, key=lambda point: point.batch)
    shown = [point for point in points if point.batch in telling]
    others = [point for point in points if point.batch not in telling]
    space = max(0, _MOST_POINTS - len(shown))
    if len(others) > space:
        others = [others[len(others) * n // space] for n in range(space)]
    shown = sorted([*shown, *others], key=lambda point: point.batch)
    columns = (
        (Column("Batch"), lambda point: f"{point.batch:,}"),
        (Column("Samples/s"), lambda point: rate_text(point.samples_per_second or None)),
        (Column("Held"), lambda each: memory_text(each.reserved) if each.reserved > 0 else MISSING),
        (Column("", number=False), lambda point: ", ".join(remarks[point.batch])),
    )
    title = _with_more("Batches tried", len(points) - len(shown))
    holes = (f"{failing:,} fails although {passing:,} fits" for failing, passing in fit.holes)
    return _section(title, Table.of(shown, columns).known(), holes if points else ())


def _proof(fit: Fit) -> Iterator[str]:
    for batch in sorted({result.batch for result in fit.proof}):
        results = [result for result in fit.proof if result.batch == batch]
        failed = [result for result in results if not result.is_ok]
        line = f"{batch:,} passed in {len(results) - len(failed)} of {len(results)}"
        if failed:
            line += "; it failed"
            if failed[0].phase:
                line += f" in {failed[0].phase}"
            if failed[0].message:
                line += f": {failed[0].message}"
        retries = max(result.retries for result in results)
        yield line + (f"; up to {retries} allocator retries" if retries > 0 else "")


def _loader(loader: LoaderMemory) -> Iterator[str]:
    loading = "no workers"
    if loader.workers:
        workers = "worker" if loader.workers == 1 else "workers"
        loading = f"{loader.workers} {workers} × {loader.prefetch} prefetched"
    pinned = ", pinned" if loader.pinned else ""
    yield (
        f"{loading}{pinned}: up to {loader.in_flight} batches at once, "
        f"{memory_text(loader.sample_bytes)} a sample"
    )
    shm = f", {memory_text(loader.shm_free)} in /dev/shm" if loader.shm_free is not None else ""
    yield (
        f"Bears a batch of {_predicted(loader.max_batch)}, bound by {loader.bound_by} "
        f"({memory_text(loader.memory_free)} free{shm})"
    )
    if loader.by_2019 is not None:
        yield f"Without prefetch and copies (equation 4.10): {_predicted(loader.by_2019)}"


def _linear(linear: Linear2019) -> Iterator[Section]:
    lines = [
        f"Batch {linear.small:,} held {memory_text(linear.small_bytes)}, {linear.large:,} held "
        f"{memory_text(linear.large_bytes)}: s = {memory_text(linear.per_sample)} a sample, "
        f"X = {memory_text(linear.fixed)}"
    ]
    for reserve, batch in linear.by_reserve:
        kept = f"{memory_text(reserve)} in reserve" if reserve else "nothing in reserve"
        of_all = f", {batch * linear.gpus:,} on {linear.gpus} GPUs" if linear.gpus > 1 else ""
        lines.append(f"{batch:,} with {kept}{of_all}")
    if linear.by_layers is not None:
        lines.append(f"{linear.by_layers:,} by the sizes of all layers (equation 4.1)")
    lines += filter(None, [sentences.linear_note(linear)])
    yield _section("The estimate of 2019 (linear2019)", None, lines)
    columns = (
        (Column("Layer", number=False), lambda layer: layer.name or "(the model)"),
        (Column("Kind", number=False, spare=1), lambda layer: layer.kind),
        (Column("Parameters"), lambda layer: memory_text(layer.parameters)),
        (Column("Output a sample"), lambda layer: memory_text(layer.output)),
    )
    layers = sorted(linear.layers, key=lambda each: -each.parameters - 2 * each.output)
    title = _with_more("The largest layers", max(0, len(layers) - _MOST_LAYERS))
    yield _section(title, Table.of(layers[:_MOST_LAYERS], columns))
