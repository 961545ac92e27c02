"""The sections below the answer: memory, batch sizes tried, verification and predictions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stepscope.analysis.memory.model import NO_LIMIT, MemoryLine
from stepscope.fit.result import FitResult, Linear2019, LoaderMemory
from stepscope.report.fit import messages
from stepscope.report.fit.messages import memory_text
from stepscope.report.kit.document import Paragraph, Section
from stepscope.report.kit.format import plural, rate_text, share_text
from stepscope.report.kit.table import Column, Table

_BAR_WIDTH = 24
_MAX_POINTS = 12
"""Rows of the curve. They always include the answers and the failures next to them."""
_MAX_LAYERS = 10


def sections(fit: FitResult) -> Iterator[Section]:
    """Yield all sections. Those without content are not drawn."""
    if fit.linear2019:
        yield from _linear(fit.linear2019)
    yield _memory(fit)
    yield _curve(fit)
    yield _section("Verification in fresh processes", None, _verification(fit))
    predictions = (
        (Column("GPU memory"), lambda each: memory_text(each.memory_bytes)),
        (Column("Available for batches"), lambda each: memory_text(each.limit_bytes)),
        (Column("Recommended"), lambda each: _batch_text(each.recommended_batch)),
        (Column("Max"), lambda each: _batch_text(each.max_batch)),
    )
    title = "Predictions for other GPU memory sizes"
    yield _section(title, Table.of(fit.predictions, predictions))
    what_ifs = (
        (Column("Change", number=False), messages.change_text),
        (Column("Max batch size"), lambda each: _batch_text(each.max_batch)),
        (Column("Reason", number=False), lambda each: messages.reason_text(each, fit)),
    )
    yield _section("What-if estimates (not run)", Table.of(fit.what_ifs, what_ifs))
    if fit.loader:
        yield _section("Host memory limit of the data loader", None, _loader(fit.loader))


def _section(title: str, table: Table | None, lines: Iterable[str] = ()) -> Section:
    return Section(title, (*([table] if table else ()), *map(Paragraph, lines)))


def _with_omitted(title: str, omitted: int) -> str:
    return f"{title} ({omitted} more in the JSON output)" if omitted else title


def _batch_text(batch: int) -> str:
    if batch >= NO_LIMIT:
        return "no limit"
    return f"{batch:,}" if batch > 0 else "does not fit"


def _line_text(line: MemoryLine) -> str:
    return f"{memory_text(line.fixed_bytes)} + {memory_text(line.per_sample_bytes)} per sample"


def _memory(fit: FitResult) -> Section:
    breakdown, on_gpu = fit.memory_breakdown, fit.budget.device == "gpu"
    growth = []
    if fit.minimum_memory is not None:
        growth.append(f"Minimum memory: {_line_text(fit.minimum_memory)}")
    if fit.retry_free_memory is not None:
        growth.append(f"Without allocator retries: {_line_text(fit.retry_free_memory)}")
    if breakdown is None:
        return _section("Memory", None, growth)
    all_parts = {
        "weights": breakdown.parts.weights_bytes,
        "gradients": breakdown.parts.gradients_bytes,
        "optimizer state": breakdown.parts.optimizer_bytes,
        "inputs": breakdown.parts.inputs_bytes,
        "activations": breakdown.parts.activations_bytes,
        "workspace": breakdown.workspace_bytes,
        "fragmentation": breakdown.fragmentation_bytes,
        "libraries and data": 0 if on_gpu else breakdown.parts.context_bytes,
    }
    parts = {name: size for name, size in all_parts.items() if size > 0}
    # The parts may add up to more than the total, because they do not all exist at once: gradients
    # are allocated while activations are freed.
    peaks = (point.reserved_peak_bytes for point in fit.curve if point.batch == breakdown.batch)
    total = max(peaks, default=0) or sum(parts.values())
    largest = max(parts.values(), default=1)
    columns = (
        (Column("Part", number=False), lambda part: part[0]),
        (Column("Memory"), lambda part: memory_text(part[1])),
        (Column("Share"), lambda part: share_text(part[1] / total)),
        (
            Column("", number=False, drop=1),
            lambda part: "█" * max(1, round(part[1] / largest * _BAR_WIDTH)),
        ),
    )
    line = MemoryLine(breakdown.fixed_bytes, breakdown.per_sample_bytes)
    lines = [*growth]
    if fit.minimum_memory is None or _line_text(fit.minimum_memory) != _line_text(line):
        lines.insert(0, f"Memory use: {_line_text(line)}")
    if on_gpu and breakdown.parts.context_bytes > 0:
        context = memory_text(breakdown.parts.context_bytes)
        lines.append(f"CUDA context, outside the limit: {context}")
    lines.append(messages.recommendation(breakdown, fit.budget))
    title = f"Memory breakdown at batch size {breakdown.batch:,}"
    title += f" ({memory_text(total)})" if parts else ""
    return _section(title, Table.of(parts.items(), columns), lines)


def _curve(fit: FitResult) -> Section:
    """Return the batch sizes tried: the most important ones, and others evenly between them."""
    remarks: dict[int, list[str]] = {point.batch: [] for point in fit.curve}
    below_max = {batch for batch, _ in fit.failures_below_max}
    important = set(below_max)
    for name, answer in (("recommended", fit.recommended_batch), ("max", fit.max_batch)):
        if answer:
            above = answer.failure_above
            important |= {answer.size, above.batch if above else answer.size}
            remarks.setdefault(answer.size, []).append(name)
    for point in fit.curve:
        if not point.passed:
            is_below_max = point.batch in below_max
            remarks[point.batch].append("fails below the max" if is_below_max else "fails")
        elif point.retried:
            remarks[point.batch].append(messages.retries_text(point.retries))
    points = sorted(fit.curve, key=lambda point: point.batch)
    shown = [point for point in points if point.batch in important]
    others = [point for point in points if point.batch not in important]
    space = max(0, _MAX_POINTS - len(shown))
    if len(others) > space:
        others = [others[len(others) * n // space] for n in range(space)]
    shown = sorted([*shown, *others], key=lambda point: point.batch)
    columns = (
        (Column("Batch"), lambda point: f"{point.batch:,}"),
        (Column("Samples/s"), lambda point: rate_text(point.samples_per_second or None)),
        (
            Column("Peak memory"),
            lambda point: memory_text(point.reserved_peak_bytes or None),
        ),
        (Column("", number=False), lambda point: ", ".join(remarks[point.batch])),
    )
    title = _with_omitted("Batch sizes tried", len(points) - len(shown))
    lines = (
        f"{failing:,} fails although {larger:,} fits" for failing, larger in fit.failures_below_max
    )
    return _section(
        title, Table.of(shown, columns).without_empty_columns(), lines if points else ()
    )


def _verification(fit: FitResult) -> Iterator[str]:
    for batch in sorted({result.batch for result in fit.verification}):
        results = [result for result in fit.verification if result.batch == batch]
        failed = [result for result in results if not result.is_ok]
        line = f"{batch:,} passed in {len(results) - len(failed)} of {len(results)} processes"
        if failed:
            line += f"; {messages.failure_text(failed[0])}"
        retries = max(result.retries for result in results)
        yield line + (f"; up to {messages.retries_text(retries)}" if retries > 0 else "")


def _loader(loader: LoaderMemory) -> Iterator[str]:
    loading = "No workers"
    if loader.workers:
        workers = plural(loader.workers, "worker")
        loading = f"{loader.workers} {workers} × {loader.prefetch} prefetched batches"
    pinned = ", pinned" if loader.pinned else ""
    yield (
        f"{loading}{pinned}: up to {loader.batches_in_flight} batches in memory, "
        f"{memory_text(loader.sample_bytes)} per sample"
    )
    shm = loader.shm_free_bytes
    free = f"{memory_text(loader.memory_free_bytes)} of host memory"
    free += f" and {memory_text(shm)} of /dev/shm" if shm is not None else ""
    limited = f", limited by {loader.limited_by}" if 0 < loader.max_batch < NO_LIMIT else ""
    yield f"Max batch size: {_batch_text(loader.max_batch)}{limited} ({free} free)"
    if loader.max_batch_2019 is not None:
        yield (
            "Equation 4.10 of Tripathi 2019, without prefetch and copies: "
            f"{_batch_text(loader.max_batch_2019)}"
        )


def _linear(linear: Linear2019) -> Iterator[Section]:
    line = MemoryLine(linear.fixed_bytes, linear.per_sample_bytes)
    lines = [
        f"Batch size {linear.small_batch:,} used {memory_text(linear.small_batch_bytes)}, batch "
        f"size {linear.large_batch:,} used {memory_text(linear.large_batch_bytes)}: "
        f"{_line_text(line)}"
    ]
    for reserve, batch in linear.max_batch_by_reserve:
        kept = f"{memory_text(reserve)} in reserve" if reserve else "no reserve"
        total = f" ({batch * linear.gpus:,} on {linear.gpus} GPUs)" if linear.gpus > 1 else ""
        lines.append(f"Max batch size with {kept}: {batch:,}{total}")
    if linear.max_batch_by_layers is not None:
        lines.append(
            "Max batch size from the sizes of all layers (equation 4.1 of Tripathi 2019): "
            f"{linear.max_batch_by_layers:,}"
        )
    if note := messages.linear_note(linear):
        lines.append(f"Note: {note}")
    yield _section("Baseline: linear2019", None, lines)
    columns = (
        (Column("Layer", number=False), lambda layer: layer.name or "(model)"),
        (Column("Kind", number=False, drop=1), lambda layer: layer.kind),
        (Column("Parameters"), lambda layer: memory_text(layer.parameter_bytes)),
        (Column("Output per sample"), lambda layer: memory_text(layer.output_bytes)),
    )
    layers = sorted(linear.layers, key=lambda each: -each.parameter_bytes - 2 * each.output_bytes)
    title = _with_omitted("Largest layers", max(0, len(layers) - _MAX_LAYERS))
    yield _section(title, Table.of(layers[:_MAX_LAYERS], columns))
