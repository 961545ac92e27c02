"""`fit` where the CPU computes: the largest batch that trains within host memory.

The story: a small batch tells what is there before any step and whether memory comes back after
each; larger ones, each a trial in fresh processes within the limit, tell how memory grows; one that
passes in three of them is the answer, and one above it that fails is the proof.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from stepscope.advice.answer import Batch, Composition, Effort, Fit, Point, Room, Verdict
from stepscope.advice.hostclimb import Search, how_it_failed
from stepscope.advice.hostprobe import HostProbes, HostTold, TrialProbes
from stepscope.advice.hostsearch import PASSES, edge_of
from stepscope.analysis.bracket import holes
from stepscope.errors import CannotTry
from stepscope.trials.limits import Limits, size_text
from stepscope.trials.limits import Room as Machine
from stepscope.workloads.probing import Parts, Subject, Told
from stepscope.workloads.spec import Workload

_ALL = 0.95
"""Of what is free, where no limit was given: others live here, too."""
_MORE, _CLEARLY_MORE = 0.9, 1.1
"""Of what is free, and of the limit: what a trial may take that is to tell how much is missing."""
_FULL_SPEED = 0.85
"""Of a faster one's rate: on a CPU, processes that do the same differ by some 10 %."""
_NEAR_LARGEST = 0.9
_SUPPORT = 2
"""Probes that have to say that smaller batches are faster: one may be disturbed, or lucky."""
_NOISE = "throughput differs by 6 to 10 % between processes on a CPU: take it as a hint"


def fit_on_host(
    workload: Workload,
    limit: int | None,
    headroom: int,
    hang_s: float,
    tell: Callable[[str], None],
    show: Callable[[str], None],
) -> Fit:
    """The answer by trials. BadWorkload where it fails for another reason than memory."""
    room = host_room(limit, headroom)
    workload = replace(workload, device="cpu")
    with TrialProbes(workload, Limits(memory=room.limit, hang_s=hang_s), tell, show) as probe:
        return fit_by(probe, workload, room, tell)


def host_room(limit: int | None, headroom: int) -> Room:
    """What batches and all else of a training may take of this machine."""
    machine = Machine.here().memory
    free = min(machine, _available() or machine)
    most = (limit if limit is not None else int(_ALL * free)) - headroom
    if most <= 0:
        raise CannotTry(
            f"--headroom {size_text(headroom)} leaves nothing of {size_text(most + headroom)}",
            "Give less",
        )
    return Room("host", most, machine, free, limit, headroom)


def _available() -> int | None:
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) << 10 if found else None


def fit_by(probe: HostProbes, workload: Workload, room: Room, tell: Callable[[str], None]) -> Fit:
    """From the first probe to the answer."""
    search = Search(probe, workload, room, tell)
    search.begin()
    if not search.first:
        return _does_not_fit(search)
    if search.leak:
        return _leaks(search, search.leak)
    search.go_on()
    if search.is_unbounded:
        return _no_limit(search)
    return _fits(search)


def _answer(search: Search, verdict: Verdict, says: str, beyond: HostTold | None = None) -> Fit:
    """What every answer has. A trial `beyond` the limit is no point of its curve."""
    tried = [*search.tried, *([beyond] if beyond else [])]
    ooms = sum(each.told.is_oom for each in tried)
    workload = search.workload
    first = search.first or (beyond if beyond and beyond.told.is_ok else None)
    return Fit(
        verdict,
        says,
        workload.model,
        workload.as_dict(),
        "auto",
        search.room,
        _subject(first, workload) if first else None,
        Effort(time.monotonic() - search.began, len(tried), ooms),
        curve=_curve(search),
        notes=_notes(tried),
        made=time.strftime("%Y-%m-%d %H:%M:%S"),
        environment=dict(tried[-1].environment or {}),
    )


# The answers


def _fits(search: Search) -> Fit:
    size = search.largest
    assert size is not None
    edge = edge_of(search.told, search.bounds)
    largest = _batch(search, size, edge.line.at)
    fast = _fast(search, largest)
    says = _says_largest(search, largest)
    if fast.size != size:
        says += f" {fast.size:,} is faster, and leaves more."
    return replace(
        _answer(search, "fits", says),
        largest=largest,
        fast=fast,
        holes=holes(_passes(search.told)),
        composition=_composition(search, size),
        need=edge.line,
        notes=(
            *_notes(search.tried),
            *_data_note(search, size),
            *_spread_note(search, size),
            _NOISE,
        ),
    )


def _no_limit(search: Search) -> Fit:
    """All that could be tried has passed."""
    size = search.largest
    assert size is not None
    held = size_text(search.peak(size))
    why = (
        f"the data set has no more than {search.most:,} samples for a batch"
        if size == search.most
        else "memory hardly grows with the batch"
    )
    largest = _batch(search, size, None)
    return replace(
        _answer(
            search,
            "no limit",
            f"Memory sets no limit here: batch {size:,} holds {held} of "
            f"{size_text(search.room.limit)}, and {why}.",
        ),
        largest=largest,
        fast=_fast(search, largest),
        composition=_composition(search, size),
        notes=(*_notes(search.tried), _NOISE),
    )


def _leaks(search: Search, grows: float) -> Fit:
    first = search.first
    assert first is not None
    left = max(0, search.room.limit - first.told.kept[-1])
    return _answer(
        search,
        "cannot tell",
        f"Memory grows by {size_text(int(grows))} with every step of batch {first.told.batch}, and "
        f"does not come back: after about {left / grows:,.0f} more steps "
        f"{size_text(search.room.limit)} are full, and sooner with a larger batch. Something keeps "
        "what belongs to a step: a list of losses (keep loss.item() instead), or a data set that "
        "keeps all that it has read.",
    )


def _does_not_fit(search: Search) -> Fit:
    """How much is missing, by a trial within more, where there clearly is more."""
    room, failed = search.room, search.tried[-1].told
    begins = f"{search.workload.model} does not fit into {size_text(room.limit)}: "
    more = int(_MORE * room.free)
    beyond = None
    if more > _CLEARLY_MORE * room.limit:
        beyond = search.probe(failed.batch, memory=more)
    if beyond is None or not beyond.told.is_ok:
        says = f"{begins}batch {failed.batch} {how_it_failed(failed)}."
        if beyond and beyond.told.is_oom:
            says += f" {size_text(more)} are not enough either."
        return _answer(search, "does not fit", says, beyond)
    return _answer(search, "does not fit", begins + _needs(beyond, room.limit, more), beyond)


def _needs(beyond: HostTold, limit: int, more: int) -> str:
    """What a trial that passed within more than the limit tells of what it takes."""
    told = beyond.told
    peak = told.reserved_peak or more
    missing = peak - limit
    needs = f"batch {told.batch} needs {size_text(peak)}"
    needs += f", {size_text(missing)} more" if missing > 0 else " at times more than that"
    parts = told.parts
    model = parts.weights + parts.gradients + parts.optimizer
    rest = max(0, beyond.before - parts.weights - beyond.data_bytes)
    data = f", the data set {size_text(beyond.data_bytes)}" if beyond.data_bytes else ""
    says = (
        f"{needs}. PyTorch and what it loads take {size_text(rest)}{data}, the model with "
        f"gradients and optimizer {size_text(model)}."
    )
    if beyond.data_bytes > missing > 0:
        says += " Fewer --samples would do."
    return says


# What they are made of


def _batch(search: Search, size: int, need: Callable[[int], float] | None) -> Batch:
    above = _failed_above(search.told, size)
    limit = search.room.limit
    return Batch(
        size,
        leaves=max(0, limit - search.peak(size)),
        passed=sum(told.is_ok for told in search.told if told.batch == size),
        samples_per_second=search.rate(size),
        thrashes=False,
        above=above.batch if above else None,
        misses=max(0, round(need(above.batch) - limit)) if above and need else None,
        why_above=_why(search.told, above) if above else "",
    )


def _failed_above(tried: Sequence[Told], size: int) -> Told | None:
    failed = [told for told in tried if not told.is_ok and told.batch > size]
    return min(failed, key=lambda told: told.batch, default=None)


def _why(tried: Sequence[Told], above: Told) -> str:
    """Where it failed, and how often where it passed, too."""
    often = _how_often(tried, above.batch)
    return ", ".join(part for part in (often, above.phase) if part)


def _how_often(tried: Sequence[Told], batch: int) -> str:
    passed = [told.is_ok for told in tried if told.batch == batch]
    return f"failed in {passed.count(False)} of {len(passed)}" if any(passed) else ""


def _fast(search: Search, largest: Batch) -> Batch:
    """The largest, unless more than one probe says that smaller ones are faster."""
    near = _NEAR_LARGEST * largest.size
    rates = [
        (told.batch, told.samples_per_second)
        for told in search.told
        if told.is_ok and told.batch <= largest.size and told.samples_per_second
    ]
    usual = statistics.median([rate for batch, rate in rates if batch >= near] or [math.inf])
    faster = [batch for batch, rate in rates if batch < near and _FULL_SPEED * rate > usual]
    return largest if len(faster) < _SUPPORT else _batch(search, max(faster), None)


def _passes(tried: Sequence[Told]) -> dict[int, bool]:
    """By batch, whether it never failed."""
    return {t.batch: all(o.is_ok for o in tried if o.batch == t.batch) for t in tried}


def _curve(search: Search) -> tuple[Point, ...]:
    return tuple(
        Point(batch, passed, False, search.rate(batch), search.peak(batch))
        for batch, passed in sorted(_passes(search.told).items())
    )


def _composition(search: Search, size: int) -> Composition:
    first, workload = search.first, search.workload
    assert first is not None
    fixed = search.base
    if workload.ranks > 1 or workload.workers:  # there are others, which no rank tells of
        fixed = max(fixed, int(edge_of(search.told, search.bounds).line.fixed))
    parts, inputs = first.told.parts, first.sample_bytes * size
    grown = max(0, search.peak(size) - fixed)
    whole = replace(
        parts,
        inputs=inputs,
        activations=max(0, grown - inputs),
        outside=max(0, fixed - parts.weights - parts.gradients - parts.optimizer),
    )
    data = first.data_bytes * workload.ranks
    attack = _attack(whole, data, search.room.limit, size)
    return Composition(size, whole, 0, 0, fixed, grown / size, attack)


def _attack(parts: Parts, data: int, limit: int, size: int) -> str:
    per_sample = size_text(round((parts.activations + parts.inputs) / size))
    if data > 0.25 * limit:
        return (
            f"The data set takes {size_text(data)} of {size_text(limit)}: fewer --samples leave "
            f"more for batches, of which each sample takes {per_sample}."
        )
    if parts.weights + parts.gradients + parts.optimizer > parts.activations:
        return (
            "Of what you can change, the model, its gradients and optimizer take most: sgd without "
            "momentum keeps less."
        )
    return (
        f"Of what you can change, what the forward pass keeps takes most, {per_sample} for each "
        "sample: smaller inputs, checkpointing, or --accumulate with smaller batches."
    )


def _subject(first: HostTold, workload: Workload) -> Subject:
    return Subject(
        device="cpu",
        device_name="CPU",
        parameters=first.parameters,
        sample_bytes=first.sample_bytes,
        samples=None if first.data_bytes and workload.samples is None else first.samples,
        optimizer=workload.optimizer,
        versions=dict(first.versions or {}),
    )


# Words


def _says_largest(search: Search, largest: Batch) -> str:
    leaves = f"leaves {size_text(largest.leaves)}" if largest.leaves else "leaves nothing"
    says = (
        f"{largest.size:,} is the largest batch that trains within "
        f"{size_text(search.room.limit)}: it passed in {largest.passed} fresh "
        f"{'process' if largest.passed == 1 else 'processes'} of {largest.passed} and {leaves}"
    )
    above = _failed_above(search.told, largest.size)
    if above is None:
        return f"{says}."
    often = _how_often(search.told, above.batch)
    return f"{says}; {above.batch:,} {often}{': it ' * bool(often)}{how_it_failed(above)}."


def _notes(tried: Sequence[HostTold]) -> tuple[str, ...]:
    notes = [note for each in tried for note in each.told.notes]
    if any(each.by == "soft" for each in tried):
        notes.append(
            "no control group can be had here: the limit was kept by looking, which is late by "
            "nature, so that the answer may be too large"
        )
    return tuple(dict.fromkeys(notes))


def _data_note(search: Search, size: int) -> tuple[str, ...]:
    return (f"the data set has no more than {size:,} samples",) if size == search.most else ()


def _spread_note(search: Search, size: int) -> tuple[str, ...]:
    peaks = [t.reserved_peak for t in search.told if t.batch == size and t.reserved_peak]
    if len(peaks) < PASSES:
        return ()
    apart = max(peaks) - min(peaks)
    middle = statistics.median(peaks)
    if apart < 0.005 * middle:
        return ()
    return (
        f"the same batch of {size:,} held between {size_text(min(peaks))} and "
        f"{size_text(max(peaks))} in different processes: malloc keeps what was freed, more or "
        "less of it, so that there is no sharp limit. With MALLOC_MMAP_THRESHOLD_=1048576 in the "
        "environment of both training and fit there is one",
    )
