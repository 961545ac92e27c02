"""What a search found, put into the answer: certificates, composition, cards, what-ifs, words."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from stepscope.advice.answer import (
    Batch,
    Card,
    Composition,
    Effort,
    Fit,
    HostRoom,
    Point,
    Room,
    Verdict,
    WhatIf,
)
from stepscope.advice.fit import Found, Options
from stepscope.advice.foresight import HUGE, USUAL_CARDS
from stepscope.advice.search import Search
from stepscope.analysis import bracket
from stepscope.analysis.memory_model import (
    Line,
    Shares,
    host_batches_in_flight,
    largest_host_batch,
    largest_host_batch_2019,
    what_bf16,
    what_checkpointing,
    what_optimizer,
)
from stepscope.trials import limits
from stepscope.trials.limits import size_text
from stepscope.workloads.probing import Parts, Told
from stepscope.workloads.spec import Workload

_MOSTLY = 0.5


def answer(
    found: Found, workload: Workload, method: str, options: Options, host: HostRoom | None
) -> Fit:
    """The whole answer for a GPU."""
    search = found.search
    fit = Fit(
        verdict=_verdict(found),
        says="",
        model=workload.model,
        knobs=workload.as_dict(),
        method=method,
        room=search.room,
        subject=search.probes.subject,
        effort=Effort(found.seconds, search.probed, search.ooms),
        largest=_batch(search, found.largest),
        fast=_batch(search, found.fast),
        curve=_curve(search),
        holes=bracket.holes(search.passed),
        composition=_composition(found),
        need=found.outlook.need if found.outlook else None,
        ease=found.outlook.ease if found.outlook else None,
        cards=_cards(found, options),
        what_if=_what_ifs(found, workload),
        host=host,
        proof=tuple(search.proof),
        notes=_notes(found),
    )
    return replace(fit, says=_says(fit, found))


def _verdict(found: Found) -> Verdict:
    if found.trouble == "too large" or (not found.trouble and not found.largest):
        return "does not fit"
    if found.trouble == "no limit":
        return "no limit"
    return "cannot tell" if found.trouble else "fits"


def _batch(search: Search, size: int | None) -> Batch | None:
    """An answer with its certificate: what it leaves, and the next above that failed."""
    if size is None:
        return None
    told = [each for each in search.told.get(size, ()) if each.is_ok]
    peak = max((each.reserved_peak for each in told), default=0)
    above = min((b for b, passed in search.passed.items() if not passed and b > size), default=None)
    failed = next((t for t in search.told.get(above or 0, ()) if not t.is_ok), None)
    return Batch(
        size=size,
        leaves=max(0, search.room.limit - peak) if peak else 0,
        passed=search.passes.get(size, 0),
        samples_per_second=search.rates.get(size),
        thrashes=not search.smooth.get(size, True),
        retries=_retries(search, size),
        above=above,
        misses=failed.missing if failed else None,
        why_above=_where(failed),
    )


def _retries(search: Search, batch: int) -> int:
    """Not of a process that went through others before: there they add up."""
    if search.smooth.get(batch, True):
        return 0
    return max((each.retries for each in search.told.get(batch, ()) if each.is_ok), default=0)


def _where(failed: Told | None) -> str:
    if failed is None:
        return ""
    place = f"in {failed.phase}" if failed.phase else "at once"
    return place if failed.is_oom else f"{place}: {failed.message}"


def _curve(search: Search) -> tuple[Point, ...]:
    return tuple(
        Point(
            batch,
            passed=search.passed.get(batch, any(each.is_ok for each in told)),
            thrashes=not search.smooth.get(batch, True),
            samples_per_second=search.rates.get(batch),
            reserved=max(each.reserved_peak for each in told),
            retries=_retries(search, batch),
        )
        for batch, told in sorted(search.told.items())
        if batch in search.passed or batch in search.rates
    )


def _composition(found: Found) -> Composition | None:
    search = found.search
    batch = found.fast or found.largest or max(search.parts, default=0)
    told = [t for t in search.told.get(batch, ()) if t.is_ok]
    if not told:
        batch = max(search.parts, default=0)
        told = [t for t in search.told.get(batch, ()) if t.is_ok]
    if not told:
        return None
    best = max(told, key=lambda each: len(each.kept))
    parts = replace(best.parts, outside=search.outside)
    state = parts.weights + parts.gradients + parts.optimizer
    named = state + parts.inputs + parts.activations
    workspace = max(0, best.allocated_peak - named)
    line = found.outlook.need if found.outlook else Line(float(best.allocated_peak), 0.0)
    return Composition(
        batch=batch,
        parts=parts,
        workspace=workspace,
        fragmentation=max(0, best.reserved_peak - best.allocated_peak),
        fixed=int(line.fixed),
        per_sample=line.per_sample,
        attack=_attack(parts, workspace, best),
    )


def _attack(parts: Parts, workspace: int, told: Told) -> str:
    """Which part to attack first."""
    peak = max(1, told.allocated_peak)
    state = parts.weights + parts.gradients + parts.optimizer
    if state > _MOSTLY * peak:
        return (
            f"Weights, gradients and optimizer state take {state / peak:.0%} of it whatever the "
            "batch: an optimizer with less state, or sharding them over GPUs, frees most."
        )
    if workspace > parts.activations:
        return (
            f"Kernels' workspace takes {workspace / peak:.0%} of it: channels_last or another "
            "precision changes the algorithms that cuDNN picks."
        )
    return (
        f"Activations take {parts.activations / peak:.0%} of it and grow with every sample: "
        "bf16 or gradient checkpointing frees most."
    )


def _cards(found: Found, options: Options) -> tuple[Card, ...]:
    """Both batches in other memory, by the same traces, corrected by how right they were here."""
    outlook = found.outlook
    if outlook is None:
        return ()
    right = [
        answered / foretold if foretold and answered else 1.0
        for answered, foretold in zip((found.largest, found.fast), found.foretold, strict=True)
    ]
    cards = []
    for size in options.cards or USUAL_CARDS:
        limit = options.limit_of(size, found.search)
        largest, fast = outlook.cards.get(limit, (0, 0))
        largest, fast = int(largest * right[0]), int(fast * right[1])
        if largest < HUGE:
            cards.append(Card(size, limit, largest, min(largest, fast)))
    return tuple(cards)


def _what_ifs(found: Found, workload: Workload) -> tuple[WhatIf, ...]:
    """Estimates, each as a part of what the present line gives, so that its error cancels out."""
    search, outlook = found.search, found.outlook
    if outlook is None or not found.largest or not search.parts:
        return ()
    batch = max(search.parts)
    parts = search.parts[batch]
    shares = Shares(
        parts.weights, parts.gradients, parts.optimizer, parts.inputs, parts.activations, batch
    )
    limit, line = search.room.limit, outlook.need
    now = line.largest(limit)
    if not now:
        return ()
    subject = search.probes.subject
    options: list[tuple[str, Line, str]] = []
    if workload.precision in ("fp32", "tf32"):
        why = "activations about halve; weights stay fp32"
        options.append(("--precision bf16", what_bf16(line, shares), why))
    if subject.layers > 4:
        why = f"keeps about 2/√{subject.layers} of the activations, for a third more compute"
        options.append(
            ("gradient checkpointing", what_checkpointing(line, shares, subject.layers), why)
        )
    for name, change in _other_optimizers(workload) if not subject.own_optimizer else ():
        line_then = what_optimizer(line, shares, name)
        options.append((change, line_then, "another optimizer state for each weight"))
    return tuple(
        WhatIf(change, int(found.largest * (then.largest(limit) or 0) / now), why)
        for change, then, why in options
        if then.per_sample > 0
    )


_OPTIMIZERS = {
    "sgd": "--optimizer sgd --momentum 0",
    "momentum": "--optimizer sgd",
    "adamw": "--optimizer adamw",
}


def _other_optimizers(workload: Workload) -> list[tuple[str, str]]:
    present = {"adam": "adamw", "sgd": "momentum" if workload.momentum else "sgd"}
    now = present.get(workload.optimizer, workload.optimizer)
    return [(name, change) for name, change in _OPTIMIZERS.items() if name != now]


def host_room(workload: Workload, sample_bytes: int, memory: int | None) -> HostRoom:
    """What the loader's batches may take on the host, now."""
    free = memory_free()
    free = min(free, memory) if memory is not None else free
    shm = _shm_free()
    pinned = workload.pin is not False
    largest, bound_by = largest_host_batch(
        sample_bytes, workload.workers, workload.prefetch, pinned, free, shm
    )
    return HostRoom(
        workers=workload.workers,
        prefetch=workload.prefetch,
        pinned=pinned,
        sample_bytes=sample_bytes,
        in_flight=host_batches_in_flight(workload.workers, workload.prefetch, pinned),
        memory_free=free,
        shm_free=shm,
        largest=largest,
        bound_by=bound_by,
        by_2019=largest_host_batch_2019(_memory("MemTotal"), workload.workers, sample_bytes),
    )


def _memory(name: str) -> int:
    found = re.search(rf"{name}: +(\d+) kB", Path("/proc/meminfo").read_text())
    return 1024 * int(found[1]) if found else 0


def memory_free() -> int:
    return min(_memory("MemAvailable"), limits.Room.here().memory)


def _shm_free() -> int | None:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def _notes(found: Found) -> tuple[str, ...]:
    search = found.search
    notes = [*search.probes.subject.notes, *search.notes]
    if search.probes.subject.varies:
        notes.append("samples differ in size: batches of the largest that was seen were probed")
    if search.room.tenants:
        notes.append(f"on this GPU already: {'; '.join(search.room.tenants)}")
    if search.most is not None and found.largest == search.most:
        notes.append(f"the data set has no more than {search.most:,} samples")
    if found.largest and not found.trouble and not search.passes.get(found.largest):
        notes.append("estimated from smaller batches: nothing near the limit was run")
    for batch, told in sorted(search.told.items()):
        kinds = ("error", "workload", "killed")
        odd = next((each for each in told if each.kind in kinds), None)
        if odd:
            notes.append(f"batch {batch:,} fails for another reason than memory: {odd.message}")
            break
    return tuple(dict.fromkeys(notes))


def _says(fit: Fit, found: Found) -> str:
    room = _in_words(fit.room)
    if found.trouble == "leaks":
        return _leaks(found)
    if found.trouble == "no limit":
        assert found.largest is not None
        return (
            f"Memory hardly grows with the batch: {found.largest:,} samples were trained within "
            f"{room}, and there is no telling a largest one. Something else limits it."
        )
    if fit.largest is None:
        return _too_large(found, room)
    assert fit.fast is not None
    return f"{_fast(fit)} {_largest(fit, room)}"


def _fast(fit: Fit) -> str:
    assert fit.fast is not None
    rate = fit.fast.samples_per_second
    speed = f" at {rate:,.0f} samples/s" if rate else ""
    how = "with allocator retries" if fit.fast.thrashes else "without an allocator retry"
    return f"Use a batch of {fit.fast.size:,}: it trains{speed} {how}."


def _largest(fit: Fit, room: str) -> str:
    batch = fit.largest
    assert batch is not None
    if not batch.passed:
        return f"{batch.size:,} should be the largest within {room}: foreseen, not tried."
    words = f"{batch.size:,} is the largest: it fits"
    words += ", but thrashes," if batch.thrashes else ""
    words += f" and leaves {size_text(batch.leaves)} of {room}"
    if batch.above is None:
        return words + "."
    if batch.misses:
        return f"{words}; {batch.above:,} would need at least {size_text(batch.misses)} more."
    return f"{words}; {batch.above:,} fails {batch.why_above}.".replace(" .", ".")


def _leaks(found: Found) -> str:
    batch = max(found.search.traces or found.search.parts)
    left = found.search.room.limit - max(t.allocated_peak for t in found.search.told[batch])
    return (
        f"The training leaks: {size_text(int(found.amount))} more stay in memory after every step. "
        f"A batch of {batch:,} would run out after some {max(0, int(left / found.amount)):,} "
        "steps, and so would any other, sooner or later. Something keeps tensors: a list of losses "
        "without .item() or .detach(), for example."
    )


def _too_large(found: Found, room: str) -> str:
    told = found.search.told.get(1, [])
    one = told[-1] if told else None
    more = f" At least {size_text(int(found.amount))} more would be needed." if found.amount else ""
    where = f" It fails {_where(one)}." if one and not one.is_ok else ""
    parts = one.parts if one else Parts()
    state = parts.weights + parts.gradients + parts.optimizer
    why = ""
    if state:
        why = (
            f" Weights, gradients and optimizer state alone take {size_text(state)}, and one "
            f"sample keeps {size_text(parts.activations)}."
        )
    elif found.search.probes.subject.parameters:
        weights = 4 * found.search.probes.subject.parameters
        why = f" Its weights take {size_text(weights)}, and as much again for their gradients."
    return f"Not even a batch of 1 fits into {room}.{more}{where}{why}"


def _in_words(room: Room) -> str:
    what = "GPU memory" if room.device == "gpu" else "host memory"
    return f"{size_text(room.limit)} of {what}"
