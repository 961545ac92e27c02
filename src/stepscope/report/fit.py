"""What a fit found, in words and tables: the answer first, then what it follows from.

Nothing is drawn here. Any part of a fit may be missing; what is not there is not said.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepscope.advice.answer import Batch, Fit, HostRoom, Room
from stepscope.advice.notasked import NOT_ASKED
from stepscope.analysis.memory_model import NO_LIMIT
from stepscope.report.fitcurve import curve_section
from stepscope.report.fitlinear import linear_sections
from stepscope.report.fitmemory import memory_section
from stepscope.report.fitparts import (
    Section,
    batch_text,
    given_text,
    memory_text,
    retries_text,
)
from stepscope.report.format import rate_text, seconds_text, share_text
from stepscope.report.tables import Column, Table
from stepscope.workloads.probing import Told
from stepscope.workloads.spec import KNOBS, knob_default, option_name

_TONES = {"fits": "good", "no limit": "good", "does not fit": "bad", "cannot tell": "warning"}
_SLOWER = 0.02
"""Less than that is no difference to speak of."""


@dataclass(frozen=True)
class Answer:
    """One of the two batches."""

    word: str
    """What it is: "use", "largest", or only an "estimate"."""
    option: str
    """To be copied: "--batch-size 156"."""
    facts: str
    tone: str


@dataclass(frozen=True)
class FitView:
    """All that is shown of a fit, in its order."""

    head: str
    cached: str
    """Where it is from the cache: since when, and how to measure again."""
    says: str
    """The answer in sentences, where there are no batches to show or that is not all."""
    tone: str
    answers: tuple[Answer, ...]
    certificate: tuple[str, ...]
    warnings: tuple[str, ...]
    """What the batch that fits the device would break elsewhere."""
    sections: tuple[Section, ...]
    facts: tuple[tuple[str, str], ...]
    """A name and a text: neighbours on the GPU, notes, what it cost."""
    command: str
    """The recommended batch as a trial, to be copied."""


def fit_view(fit: Fit) -> FitView:
    """The one view that terminals draw."""
    answers = tuple(_answers(fit))
    is_said = fit.verdict == "fits" and bool(answers) and fit.linear is None
    return FitView(
        head=_head(fit),
        cached=_cached(fit.cached) if fit.cached else "",
        says="" if is_said else fit.says,
        tone=_TONES.get(fit.verdict, "neutral"),
        answers=answers,
        certificate=tuple(_certificate(fit)),
        warnings=tuple(_warnings(fit)),
        sections=tuple(section for section in _sections(fit) if section),
        facts=tuple(_facts(fit)),
        command=_command(fit),
    )


def _cached(when: str) -> str:
    return f"Found {when[:16].replace('T', ' ')}, and kept; --fresh measures again"


def _head(fit: Fit) -> str:
    name = fit.subject.device_name if fit.subject else ""
    on = f" on {name}" if name else ""
    precision = fit.knobs.get("precision")
    by = f", {precision}" if isinstance(precision, str) and precision else ""
    return f"{fit.model}{on}{by}, {_room_text(fit.room)}"


def _room_text(room: Room) -> str:
    what = "for PyTorch" if room.device == "gpu" else "of host memory"
    had = _had(room)
    if had is None:
        text = f"{memory_text(room.free)} free of {memory_text(room.total)}"
    else:
        text = f"{memory_text(had)} {what}"
    if room.headroom:
        text += f", of which {memory_text(room.headroom)} stay free"
    if had == room.asked:
        return text
    why = "others hold the rest" if room.tenants else "no more is free"
    return f"{text}: {memory_text(room.asked)} were asked for, {why}"


def _had(room: Room) -> int | None:
    """What there was of what was asked for: on a GPU, others may hold some of it."""
    return None if room.asked is None else min(room.asked, room.limit + room.headroom)


# The two batches


def _answers(fit: Fit) -> Iterator[Answer]:
    use, largest = fit.fast or fit.largest, fit.largest
    if use is None:
        return
    both = largest is not None and largest.size == use.size
    facts = [*_speed(use, None), *_behaviour(use, fit.room)]
    if both and use.passed and fit.verdict == "fits":
        facts.append("the largest that fits")
    word = "estimate" if fit.linear else "use"
    yield Answer(word, _option(use), ", ".join(facts), "warning" if use.thrashes else "good")
    if largest is not None and not both:
        facts = [*_speed(largest, use), *_behaviour(largest, fit.room)]
        yield Answer(
            "largest", _option(largest), ", ".join(facts),
            "warning" if largest.thrashes else "neutral",
        )  # fmt: skip


def _option(batch: Batch) -> str:
    return f"--batch-size {batch.size}"


def _speed(batch: Batch, than: Batch | None) -> Iterator[str]:
    rate, other = batch.samples_per_second, than.samples_per_second if than else None
    if not rate:
        return
    yield f"{rate_text(rate)} samples/s"
    if other and rate < (1 - _SLOWER) * other:
        yield f"{share_text(1 - rate / other)} slower"


def _behaviour(batch: Batch, room: Room) -> Iterator[str]:
    if not batch.passed:
        yield "predicted, not run"
    elif batch.thrashes:
        yield f"fits, but thrashes ({retries_text(batch.retries)})"
    elif room.device == "gpu":
        yield "no allocator retry"


def _certificate(fit: Fit) -> Iterator[str]:
    """Why the largest is the largest, and how often it was seen to pass."""
    largest = fit.largest
    if largest is None or fit.verdict != "fits" or not largest.passed:
        return
    leaves = f"leaves {memory_text(largest.leaves)}" if largest.leaves > 0 else "leaves nothing"
    text = f"{batch_text(largest.size)} fits and {leaves}"
    if largest.above is not None:
        text += f"; {batch_text(largest.above)} {_failure(largest)}"
    yield text
    if largest.passed > 1:
        yield f"It went through a whole cycle in {largest.passed} fresh processes"


def _failure(largest: Batch) -> str:
    if largest.why_above.startswith("failed in"):
        return largest.why_above
    where = f" ({largest.why_above})" if largest.why_above else ""
    if largest.misses:
        return f"would need at least {memory_text(largest.misses)} more{where}"
    return f"does not fit{where}"


def _warnings(fit: Fit) -> Iterator[str]:
    size, host = fit.batch_size, fit.host
    if size is not None and host is not None and host.largest < size:
        yield (
            f"The host bears a batch of {batch_text(host.largest)} only ({host.bound_by}): fewer "
            "--workers, a smaller --prefetch, or a smaller batch"
        )
    if any(not told.is_ok for told in fit.proof):
        yield "Not all of the fresh processes of --prove passed: take a smaller batch"


# What they follow from


def _sections(fit: Fit) -> Iterator[Section | None]:
    if fit.linear is not None:
        yield from linear_sections(fit.linear)
    yield memory_section(fit)
    yield curve_section(fit)
    yield _proof(fit.proof)
    yield _cards(fit)
    yield _what_if(fit)
    yield _host(fit.host) if fit.host else None


def _proof(proof: Sequence[Told]) -> Section | None:
    if not proof:
        return None
    lines = []
    for batch in sorted({told.batch for told in proof}):
        every = [told for told in proof if told.batch == batch]
        failed = [told for told in every if not told.is_ok]
        line = f"{batch_text(batch)} passed in {len(every) - len(failed)} of {len(every)}"
        if failed:
            where = f" in {failed[0].phase}" if failed[0].phase else ""
            line += f"; it failed{where}{': ' * bool(failed[0].message)}{failed[0].message}"
        retries = max(told.retries for told in every)
        lines.append(line + (f"; up to {retries} allocator retries" if retries > 0 else ""))
    return Section("Proof, in fresh processes", tuple(lines))


def _cards(fit: Fit) -> Section | None:
    if not fit.cards:
        return None
    columns = Column("Card"), Column("For batches"), Column("Use"), Column("Largest")
    rows = tuple(
        (
            memory_text(card.size),
            memory_text(card.limit),
            _predicted(card.fast),
            _predicted(card.largest),
        )
        for card in fit.cards
    )
    return Section("Other cards, predicted from the same probes", (), Table(columns, rows))


def _predicted(batch: int) -> str:
    if batch >= NO_LIMIT:
        return "no limit"
    return batch_text(batch) if batch > 0 else "does not fit"


def _what_if(fit: Fit) -> Section | None:
    if not fit.what_if:
        return None
    columns = Column("Change", number=False), Column("Largest"), Column("Why", number=False)
    rows = tuple((each.change, _predicted(each.largest), each.why) for each in fit.what_if)
    title = "What would change it (estimates: nothing of it was run)"
    return Section(title, (), Table(columns, rows))


def _host(host: HostRoom) -> Section:
    loading = (
        f"{host.workers} worker{'s' * (host.workers != 1)} × {host.prefetch} prefetched"
        if host.workers
        else "no workers"
    )
    pinned = ", pinned" if host.pinned else ""
    lines = [
        f"{loading}{pinned}: up to {host.in_flight} batches at once, "
        f"{memory_text(host.sample_bytes)} a sample",
        f"Bears a batch of {_predicted(host.largest)}, bound by {host.bound_by} "
        f"({_free_text(host)})",
    ]
    if host.by_2019 is not None:
        lines.append(f"Without prefetch and copies (equation 4.10): {_predicted(host.by_2019)}")
    return Section("The host's side", tuple(lines))


def _free_text(host: HostRoom) -> str:
    shm = f", {memory_text(host.shm_free)} in /dev/shm" if host.shm_free is not None else ""
    return f"{memory_text(host.memory_free)} free{shm}"


# Around it


def _facts(fit: Fit) -> Iterator[tuple[str, str]]:
    factors = [fit.batch_size, *(_count(fit.knobs, knob) for knob in ("accumulate", "ranks"))]
    if fit.batch_size is not None and None not in factors and factors[1:] != [1, 1]:
        each, accumulated, ranks = (int(factor or 0) for factor in factors)
        yield (
            "Global batch",
            f"{each * accumulated * ranks:,} ({each:,} × {accumulated} accumulated × {ranks} "
            f"rank{'s' * (ranks != 1)})",
        )
    told = " ".join(fit.notes)
    for place, tenant in enumerate(each for each in fit.room.tenants if each not in told):
        yield ("Also on the GPU" if place == 0 else ""), tenant
    notes = dict.fromkeys((*fit.notes, *(fit.subject.notes if fit.subject else ())))
    for place, note in enumerate(notes):
        yield ("Note" if place == 0 else ""), note
    yield "Cost", _cost(fit)


def _count(knobs: Mapping[str, Any], knob: str) -> int | None:
    value = knobs.get(knob, 1)
    return value if isinstance(value, int) else None


def _cost(fit: Fit) -> str:
    effort = fit.effort
    text = f"{effort.probes} probe{'s' * (effort.probes != 1)} in {seconds_text(effort.seconds)}"
    if effort.ooms:
        text += f", {effort.ooms} of which ran out of memory in processes that were thrown away"
    return f"{text}; nothing of yours was touched"


def _command(fit: Fit) -> str:
    """As a trial: what was said of the workload is said again, and the limit."""
    size = fit.batch_size
    if size is None:
        return ""
    words = ["stepscope", "trial", fit.model, "--batch-size", str(size)]
    had = _had(fit.room)
    if had is not None:
        limit = "--gpu-memory" if fit.room.device == "gpu" else "--memory"
        words += [limit, given_text(had if had == fit.room.asked else had >> 20 << 20)]
    for knob, value in fit.knobs.items():
        if knob in KNOBS and knob not in NOT_ASKED and value != knob_default(knob):
            words += _as_option(knob, value)
    return shlex.join(words)


def _as_option(knob: str, value: Any) -> list[str]:
    option = option_name(knob)
    if isinstance(value, bool):
        return [option if value else option.replace("--", "--no-", 1)]
    return [option, str(value)]
