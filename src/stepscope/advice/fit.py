"""From probes to an answer: the largest batch that fits a GPU, and the largest that is still fast.

    climb      a few small batches tell what a sample takes, and whether anything is wrong
    trace      two larger ones keep every allocation of a whole cycle of training
    foresee    replayed through a model of the allocator, for any batch, these tell both edges
    close in   real probes at those edges, in fresh processes, until each is known
    settle     the answers pass once more, the largest for longer; a faster smaller batch wins
    answer     the records of `answer.py`, with other cards, what-ifs and the host (`wording.py`)

Every probe is a throw-away process under the limit. Two edges are sought at once: that of the
batches which pass, and that of those which pass *smoothly*, without a retry of the allocator. Where
the GPU has room for several probes of the limit, they run at once; those that are timed take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from stepscope.advice.answer import Room
from stepscope.advice.foresight import NONE, USUAL_CARDS, Answers, Foresight, Outlook
from stepscope.advice.prober import Probes
from stepscope.advice.search import CONTEXT, LASTING, Search
from stepscope.analysis import bracket
from stepscope.analysis.memory_model import Line, leak
from stepscope.errors import BadWorkload, CannotTry
from stepscope.trials.limits import size_text
from stepscope.workloads.probing import Ask, Told

_SMALL = (2, 16, 64)
_LARGER = (512, 4096)
"""Where the small ones tell little: their memory is that of the weights."""
_TELLING = 50
"""How many times the largest that was tried a batch can be foreseen from its memory."""
_TRACED = (0.4, 0.8)
"""Which parts of the expected largest batch are traced."""
_LEAK = 1e-4
"""Bytes that stay after every step, as a part of the limit: less is no leak to speak of."""
_FINE_FAST = 0.015
_MUST_BE = 0.25
"""Of workspace, where a batch does not pass without: what cuDNN's other algorithms still want."""
_FULL_SPEED = 0.985
"""Of the best rate: a batch is to keep 98 %, and two measurements of one differ a little."""
_RATED = (0.6, 0.85, 0.95)
"""Parts of the smooth edge whose rates are compared with its own."""
_NEAR_ENOUGH = 0.025
"""How far below the next that is too slow the fast batch may stay."""
_MOST_ROUNDS = 25
_PROOFS = 3


@dataclass(frozen=True)
class Options:
    """What of the search is up to the user."""

    estimate: bool = False
    """Only climb and foresee: nothing runs near the limit."""
    prove: bool = False
    """Both answers three times more, each in a fresh process and for longer."""
    trace_to: tuple[int, int] | None = None
    """Sizes between which to trace, where they are not those of the room."""
    cards: tuple[int, ...] = ()
    """Other sizes to foresee both batches for; nothing: the usual cards."""

    def limit_of(self, size: int, search: Search) -> int:
        """What of a card is for batches: of the usual ones, all but the context."""
        context = 0 if self.cards else search.outside
        return size - context - search.room.headroom


@dataclass(frozen=True)
class Found:
    """What the search found out, before it is put into words."""

    search: Search
    largest: int | None = None
    fast: int | None = None
    outlook: Outlook | None = None
    foretold: tuple[int, int] = (0, 0)
    """Both, as they were foreseen."""
    seconds: float = 0.0
    trouble: str = ""
    """Why there is no answer: "too large", "no limit", "leaks"."""
    amount: float = 0.0
    """Bytes that miss, or that leak with each step."""


def fit_on_gpu(probes: Probes, room: Room, options: Options, show: Callable[[str], None]) -> Found:
    """The story, from the first small batch to both answers."""
    began = time.monotonic()
    search = Search(probes, room, show, probes.subject.samples)
    found = climb(search) or trace(search, options.trace_to) or Found(search)
    if not found.trouble:
        foresight = Foresight(search.traces, fixed_bytes(search))
        foretold = foresight.at(search.room.limit, search.most)
        limits = [options.limit_of(size, search) for size in options.cards or USUAL_CARDS]
        aside = ThreadPoolExecutor(1)
        try:
            outlook = aside.submit(Outlook.of, foresight, limits)  # while probes run
            answers = foretold
            if not options.estimate:
                answers = seek(search, foresight, foretold, options.prove)
            largest, fast = (batch or None for batch in answers)
            found = Found(search, largest, fast, outlook.result(), foretold)
        finally:
            aside.shutdown(wait=False, cancel_futures=True)
    return replace(found, seconds=time.monotonic() - began)


def climb(search: Search) -> Found | None:
    """Small batches in one process: what is wrong with a workload shows before it is large."""
    room, cap = search.room, search.wide
    small = tuple(batch for batch in _SMALL if search.most is None or batch <= search.most) or (1,)
    first = search.ask([Ask(small, cap, 2, cycle=False, free_before=room.free)])[0]
    _raise_if_no_workload(first.told[0])
    if not first.told[0].is_ok or first.told[0].allocated_peak > room.limit:
        one = search.ask([Ask((1,), cap, 2, cycle=False, free_before=room.free)])[0].last
        if not one.is_ok or one.allocated_peak > room.limit:
            return Found(search, trouble="too large", amount=_missing(search, one))
    search.outside = max(parts.outside for parts in search.parts.values())
    if search.outside > 2 * CONTEXT:  # somebody else came meanwhile
        search.outside = CONTEXT
    most = room.free - search.outside
    limit = (most if room.asked is None else min(room.asked, most)) - room.headroom
    if limit <= 0:
        raise CannotTry(
            f"--headroom {size_text(room.headroom)} leaves nothing: {size_text(room.free)} are "
            f"free, of which the context takes {size_text(search.outside)}",
            "Give less",
        )
    search.room = replace(room, limit=limit)
    return _climb_on(search, cap)


def _climb_on(search: Search, cap: int | None) -> Found | None:
    """Further, while batches take hardly more than the weights; where they never do, there is no
    largest one."""
    for larger in (*_LARGER, *(4096 << 4 * n for n in range(1, 4))):
        tried = max(search.parts)
        foretold = _allocated_line(search).largest(search.room.limit)
        if foretold is not None and foretold <= _TELLING * tried:
            return None
        if search.most is not None and tried >= search.most:
            return None
        if larger > tried:
            ask = Ask((min(larger, search.most or larger),), cap, 2, cycle=False)
            if not search.ask([ask])[0].last.is_ok:
                return None
    largest = max(search.parts)
    return Found(search, largest, largest, trouble="no limit")


def _allocated_line(search: Search) -> Line:
    points = [
        (batch, float(max(each.allocated_peak for each in told if each.is_ok)))
        for batch, told in search.told.items()
        if any(each.is_ok for each in told)
    ]
    return Line.through(sorted(points)[-2:], fixed_bytes(search))


def fixed_bytes(search: Search) -> float:
    """What any batch needs: weights, their gradients, and the optimizer's state."""
    parts = search.parts[max(search.parts)]
    return float(parts.weights + parts.gradients + parts.optimizer)


def trace(search: Search, between: tuple[int, int] | None) -> Found | None:
    """Every allocation of a whole cycle, of two larger batches. A leak shows in them too."""
    limit, cap = search.room.limit, search.wide
    if between is not None and cap is not None:
        cap = search.room.free - CONTEXT
    low, high = between or (_TRACED[0] * limit, _TRACED[1] * limit)
    wanted = {_foreseen_by_peak(search, size) for size in (low, high)}
    tried: set[int] = set()
    while wanted:
        tried |= wanted
        probed = search.ask([Ask((batch,), cap, trace=True) for batch in sorted(wanted)])
        growing = [leak(each.last.kept[: each.ask.steps]) for each in probed]
        leaking = max((each for each in growing if each is not None), default=0.0)
        if leaking > max(_LEAK * limit, 0):
            return Found(search, trouble="leaks", amount=leaking)
        failed = [each.last for each in probed if not each.last.is_ok]
        wanted = {_further_below(search, each) for each in failed} - tried
        if len(search.traces) > 1 or (search.traces and 1 in search.traces):
            break
    if search.traces:
        return None
    _raise_if_no_workload(failed[0])
    return Found(search, trouble="too large", amount=_missing(search, failed[0]))


def _further_below(search: Search, failed: Told) -> int:
    """Where to trace instead: a sample took more than the small batches showed; or, if it was not
    for memory, midway to what went well."""
    if failed.is_oom:
        return max(1, failed.batch * 2 // 3)
    well = max((batch for batch in search.parts if batch < failed.batch), default=failed.batch)
    return int((well * failed.batch) ** 0.5)


def _foreseen_by_peak(search: Search, size: float) -> int:
    batch = _allocated_line(search).largest(size) or 1
    return max(min(search.parts), min(batch, search.most or batch))


def seek(search: Search, foresight: Foresight, foretold: Answers, prove: bool) -> Answers:
    """From what was foreseen to what is true, as often as an answer does not hold."""
    answers = NONE
    for _ in range(_MOST_ROUNDS):
        close_in(search, foresight, *foretold)
        largest = bracket.edges(search.passed)[0]
        if not largest:
            return NONE
        asks, answers = settle(search, largest)
        if not asks and (not prove or proven(search, answers)):
            return answers
        search.ask(asks)
    search.notes.append("the edge did not hold still: what passed once did not again")
    return answers


def close_in(search: Search, foresight: Foresight, largest: int, smooth: int) -> None:
    """Probe at both foretold edges until each is known, or the data has no more samples."""
    foretold = ((largest, search.passed), (smooth, search.smooth))
    hidden = {b for b, tried in foretold if b not in tried and b > (bracket.edges(tried)[1] or b)}
    search.ask([_try(search, batch) for batch in sorted(hidden)])  # beyond a hole, perhaps
    for _ in range(_MOST_ROUNDS):
        lanes = max(1, search.lanes // 2)
        wanted = bracket.next_batches(search.passed, largest, lanes, most=search.most)
        if wanted and wanted[-1] < largest and search.passed.get(largest) is False:
            # It was too much: some workspace has to be there.
            largest = min(largest, foresight.at(search.room.limit, largest, False, _MUST_BE)[0])
            wanted = bracket.next_batches(search.passed, largest, lanes, most=search.most)
        if search.lanes > 1 or not wanted:
            most = search.edge or search.most
            wanted += bracket.next_batches(search.smooth, smooth, lanes, _FINE_FAST, most)
        wanted = wanted or _beyond(search, foresight)
        if not wanted:
            return
        search.ask([_try(search, batch) for batch in dict.fromkeys(wanted)])


def _try(search: Search, batch: int) -> Ask:
    return Ask((batch,), search.cap, steps=2)


def _beyond(search: Search, foresight: Foresight) -> tuple[int, ...]:
    """Once: batches above both edges that may pass again, since near the limit some do."""
    if search.looked_beyond:
        return ()
    search.looked_beyond = True
    edge, smooth = bracket.edges(search.passed)[0], bracket.edges(search.smooth)[0]
    found = foresight.smooth_above(smooth, edge, search.room.limit) if smooth else []
    further = [batch for batch in found if batch not in search.smooth][-2:]
    if search.lanes > 1 and bracket.holes(search.passed):
        further += bracket.beyond(search.passed, 3, search.most)
    return tuple(further)


def settle(search: Search, largest: int) -> tuple[list[Ask], Answers]:
    """What is still to be tried, each alone on the GPU, and both answers as they are by now."""
    smooth = min(bracket.edges(search.smooth)[0], largest)
    fast, wanted = _fastest(search, smooth) if smooth else (largest, set())
    lasting = [batch for batch in dict.fromkeys((largest, fast)) if batch not in search.lasted]
    asks = [Ask((batch,), search.cap, turn=True) for batch in sorted(wanted - set(lasting))]
    asks += [_lasting(search, batch) for batch in lasting]
    if smooth and not search.rates:
        asks += _smaller(search, smooth)
    return asks, (largest, fast)


def _lasting(search: Search, batch: int) -> Ask:
    """What passes for a moment may not after some steps more, while memory still gets scattered."""
    return Ask((batch,), search.cap, LASTING, LASTING, turn=True)


def _smaller(search: Search, smooth: int) -> list[Ask]:
    """The rates of smaller batches, in one process: is any of them faster?"""
    smaller = sorted({round(part * smooth) for part in _RATED} - {0, smooth})
    return [Ask(tuple(smaller), search.cap, 3, cycle=False, turn=True)] if smaller else []


def _fastest(search: Search, smooth: int) -> tuple[int, set[int]]:
    """The largest batch whose rate is as good as the best, among those without a retry; and what
    to try between it and the next, which was too slow."""
    rates = {
        batch: rate
        for batch, rate in search.rates.items()
        if batch <= smooth and search.smooth.get(batch, True)
    }
    if smooth not in rates:
        return smooth, {smooth}
    enough = _FULL_SPEED * max(rates.values())
    fast = max(batch for batch, rate in rates.items() if rate >= enough)
    slower = min((batch for batch in rates if batch > fast), default=fast)
    if slower - fast > max(1, _NEAR_ENOUGH * fast):
        return fast, {(fast + slower) // 2}
    return fast, set()


def proven(search: Search, answers: Answers) -> bool:
    """Whether both pass in three more fresh processes, for longer; fast without a retry."""
    batches = [batch for batch in dict.fromkeys(answers) for _ in range(_PROOFS)]
    was_smooth = search.smooth.get(answers[1])
    search.proof = [each.last for each in search.ask([_lasting(search, b) for b in batches])]
    all_passed = all(told.is_ok for told in search.proof)
    return all_passed and search.smooth.get(answers[1]) == was_smooth


def _raise_if_no_workload(told: Told) -> None:
    """What fails for another reason than memory is no matter of the batch."""
    if not (told.is_ok or told.is_oom):
        where = told.phase or "its process"
        raise BadWorkload(f"A batch of {told.batch} failed in {where}: {told.message}", told.hint)


def _missing(search: Search, one: Told) -> float:
    """How much more a batch of one would need, at least."""
    limit = search.room.limit
    if one.is_ok:
        return float(one.allocated_peak - limit)
    weights = 4 * search.probes.subject.parameters
    return float(max(one.missing or 0, 2 * weights - limit))
