"""From probes to an answer: the largest batch that fits a GPU, and the largest that is still fast.

    climb      a few small batches tell what a sample takes, and whether anything is wrong
    trace      two larger ones keep every allocation of a whole cycle of training
    foresee    replayed through a model of the allocator, for any batch, these tell both edges
    close in   real probes at those edges, in fresh processes, until each is known
    settle     the answers pass once more, and none of them is slower than a smaller batch
    answer     the records of `answer.py`, with other cards, what-ifs and the host (`wording.py`)

Every probe is a throw-away process under the limit. Two edges are sought at once: that of the
batches which pass, and that of those which pass *smoothly*, without a retry of the allocator. Where
the GPU has room for several probes of the limit, they are alive at once and take turns in training,
so that each is timed alone and none waits for the start of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from stepscope.advice.answer import Room
from stepscope.advice.prober import Probed, Probes
from stepscope.analysis import bracket
from stepscope.analysis.memory_model import (
    Line,
    Trace,
    allocated_peak,
    ease,
    foreseen,
    growth,
    leak,
    need,
    predicted,
    scratch,
)
from stepscope.errors import BadWorkload
from stepscope.workloads.probing import Ask, Parts, Told

GiB = 1 << 30

_SMALL = (2, 16, 64)
_LARGER = (512, 4096)
"""Where the small ones tell little: their memory is that of the weights."""
_TELLING = 50
"""How many times the largest that was tried a batch can be foreseen from its memory."""
_TRACED = (0.4, 0.8)
"""Which parts of the expected largest batch are traced."""
_LANES = 4
_CONTEXT = GiB
"""What a process takes beside the allocator, until one has told."""
_SPARED = 0.02
"""Of the device's free memory, where several probes share it."""
_FINE_FAST = 0.012
_FULL_SPEED = 0.985
"""Of the best rate: a batch is to keep 98 %, and two measurements of one differ a little."""
_RATED = (0.5, 0.8, 0.93)
"""Parts of the smooth edge whose rates are compared with its own."""
_NEAR_ENOUGH = 0.025
"""How far below the next that is too slow the fast batch may stay."""
_MOST_ROUNDS = 25
_HUGE = 1 << 24
"""A batch that nobody trains: where memory would allow it, memory is not what limits."""
_LEAK = 1e-4
"""Bytes that stay after every step, as a part of the limit: less is no leak to speak of."""
USUAL_CARDS = tuple(size * GiB for size in (11, 16, 24, 40, 80))
_PROOFS = 3
_PROVING_STEPS = 10


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


@dataclass
class Search:
    """What is known of the batches so far, and the probes that told it."""

    probes: Probes
    room: Room
    show: Callable[[str], None]
    most: int | None = None
    """A batch of all samples that there are."""
    told: dict[int, list[Told]] = field(default_factory=dict)
    passed: dict[int, bool] = field(default_factory=dict)
    smooth: dict[int, bool] = field(default_factory=dict)
    traces: dict[int, Trace] = field(default_factory=dict)
    passes: dict[int, int] = field(default_factory=dict)
    """In how many fresh processes a batch went through the whole cycle under the limit."""
    rates: dict[int, float] = field(default_factory=dict)
    """Samples/s, of batches that were alone on the GPU."""
    parts: dict[int, Parts] = field(default_factory=dict)
    outside: int = 0
    probed: int = 0
    ooms: int = 0
    notes: list[str] = field(default_factory=list)
    proof: list[Told] = field(default_factory=list)

    @property
    def cap(self) -> int | None:
        """What probes near the limit get; a whole GPU limits them by itself."""
        whole = self.room.asked is None and not self.room.headroom
        return None if whole else self.room.limit

    @property
    def roomy(self) -> bool:
        """Whether the GPU has more than the limit, so that a probe can be larger than allowed."""
        return self.cap is not None and self.room.free - _CONTEXT > 1.5 * self.room.limit

    @property
    def lanes(self) -> int:
        """How many probes of the limit have room beside each other."""
        if self.cap is None:
            return 1
        each = self.cap + max(self.outside, _CONTEXT // 2)
        return max(1, min(_LANES, int(self.room.free * (1 - _SPARED)) // each))

    @property
    def edge(self) -> int | None:
        """The largest that passed, once something above it failed."""
        low, high = bracket.edges(self.passed)
        return low if high is not None and low else None

    def ask(self, asks: Sequence[Ask]) -> list[Probed]:
        """Probe, as many at once as there is room for, and note what they told."""
        found: list[Probed] = []
        for begin in range(0, len(asks), self.lanes):
            some = asks[begin : begin + self.lanes]
            self.show(f"batch {', '.join(f'{b:,}' for ask in some for b in ask.batches)}")
            found += self.probes.ask(some)
        for probed in found:
            self._note(probed)
        return found

    def _note(self, probed: Probed) -> None:
        self.probed += 1
        for each in probed.told:
            self.told.setdefault(each.batch, []).append(each)
            self.ooms += each.is_oom
            self.notes += [note for note in each.notes if note not in self.notes]
            if each.is_ok:
                self.parts[each.batch] = each.parts
                if probed.ask.turn and each.samples_per_second:
                    self.rates[each.batch] = each.samples_per_second
        if probed.trace is not None and probed.last.is_ok:
            self.traces[probed.last.batch] = probed.trace
        if len(probed.ask.batches) == 1:
            self._judge(probed.ask, probed.last)

    def _judge(self, ask: Ask, told: Told) -> None:
        """What a process of its own proves. One without the limit proves only what stays below it;
        and since a batch must pass every time, a failure counts for more than what passed."""
        batch, is_smooth = told.batch, told.is_ok and told.retries == 0
        if ask.cap == self.cap:
            self.passed[batch] = told.is_ok and self.passed.get(batch, True)
            self.smooth[batch] = is_smooth and self.smooth.get(batch, True)
            self.passes[batch] = self.passes.get(batch, 0) + (told.is_ok and ask.cycle)
        elif told.is_ok and told.reserved_peak <= self.room.limit:
            self.passed.setdefault(batch, True)
            self.smooth.setdefault(batch, True)
        elif told.is_ok:
            self.smooth.setdefault(batch, False)


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


@dataclass(frozen=True)
class Outlook:
    """What the traces tell of any batch in any memory."""

    need: Line
    """Bytes that a batch needs where memory is short."""
    ease: Line
    """Bytes that it takes where memory is not."""
    cards: Mapping[int, tuple[int, int]]
    """The largest batch and the smooth one, by the limit."""

    @classmethod
    def of(cls, foresight: Foresight, limits: Iterable[int]) -> Outlook:
        traces, fixed = foresight.traces, foresight.fixed
        needs = [(batch, float(need(each, scratch(each)))) for batch, each in traces.items()]
        cards = {limit: foresight.at(limit, thorough=False) for limit in limits if limit > 0}
        return cls(Line.through(needs, fixed), foresight.ease, cards)


class Foresight:
    """Both edges in any memory, by replays of the traces at any batch."""

    def __init__(self, traces: Mapping[int, Trace], fixed: float) -> None:
        self.traces, self.fixed = traces, fixed
        self.ease = Line.through([(b, float(ease(each))) for b, each in traces.items()], fixed)
        needed = [(b, float(allocated_peak(t, scratch(t)))) for b, t in traces.items()]
        self._need = Line.through(needed, fixed)
        (small, one), (large, other) = min(traces.items()), max(traces.items())
        self._grows = growth(one, small, other, large)

    def at(self, limit: int, most: int | None = None, thorough: bool = True) -> tuple[int, int]:
        """The largest batch and the smooth one in so much memory."""
        guess = predicted(self._need, self.ease, limit)
        if most is not None:
            guess = min(guess[0], most), min(guess[1], most)
        if self._grows is None or not 0 < guess[0] < _HUGE:
            return guess
        return foreseen(self._grows, limit, guess, most, thorough)


def fit_on_gpu(probes: Probes, room: Room, options: Options, show: Callable[[str], None]) -> Found:
    """The story, from the first small batch to both answers."""
    began = time.monotonic()
    search = Search(probes, room, show, probes.subject.samples)
    found = climb(search) or trace(search, options.trace_to) or Found(search)
    if not found.trouble:
        foresight = Foresight(search.traces, fixed_bytes(search))
        foretold = foresight.at(search.room.limit, search.most)
        with ThreadPoolExecutor(1) as aside:  # other cards, while probes run
            limits = [options.limit_of(size, search) for size in options.cards or USUAL_CARDS]
            outlook = aside.submit(Outlook.of, foresight, limits)
            largest, fast = foretold if options.estimate else seek(search, foretold, options)
            found = Found(search, largest or None, fast or None, outlook.result(), foretold)
    return replace(found, seconds=time.monotonic() - began)


def seek(search: Search, foretold: tuple[int, int], options: Options) -> tuple[int, int]:
    """From what was foreseen to what is true."""
    close_in(search, *foretold)
    largest, fast = settle(search)
    while options.prove and largest and not prove(search, largest, fast):
        largest, fast = settle(search)
    return largest, fast


def climb(search: Search) -> Found | None:
    """Small batches in one process: what is wrong with a workload shows before it is large."""
    room, cap = search.room, None if search.roomy else search.cap
    small = tuple(batch for batch in _SMALL if search.most is None or batch <= search.most) or (1,)
    first = search.ask([Ask(small, cap, 2, cycle=False, free_before=room.free)])[0]
    if first.told[0].kind in ("error", "workload"):
        raise BadWorkload(_said(first.told[0]), first.told[0].hint)
    if not first.told[0].is_ok or first.told[0].allocated_peak > room.limit:
        one = search.ask([Ask((1,), cap, 2, cycle=False, free_before=room.free)])[0].last
        if not one.is_ok or one.allocated_peak > room.limit:
            return Found(search, trouble="too large", amount=_missing(one, room))
    search.outside = max(parts.outside for parts in search.parts.values())
    if search.outside > 2 * _CONTEXT:  # somebody else came meanwhile
        search.outside = _CONTEXT
    if room.asked is None or room.limit > room.free - search.outside:
        search.room = replace(room, limit=room.free - search.outside - room.headroom)
    return _climb_on(search, cap)


def _climb_on(search: Search, cap: int | None) -> Found | None:
    """Further, while batches take hardly more than the weights; where they never do, there is no
    largest one."""
    for larger in (*_LARGER, *(4096 << 4 * n for n in range(1, 4))):
        tried = max(search.parts)
        foretold = _allocated_line(search).largest(search.room.limit)
        if foretold is not None and foretold <= _TELLING * tried:
            return None
        if tried >= (search.most or _HUGE):
            break
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
    cap = None if search.roomy else search.cap
    limit = search.room.limit
    low, high = between or (_TRACED[0] * limit, _TRACED[1] * limit)
    wanted = {_foreseen_by_peak(search, size) for size in (low, high)}
    while wanted:
        probed = search.ask([Ask((batch,), cap, trace=True) for batch in sorted(wanted)])
        growing = [leak(each.last.kept) for each in probed]
        leaking = max((each for each in growing if each is not None), default=0.0)
        if leaking > _LEAK * limit:
            return Found(search, trouble="leaks", amount=leaking)
        failed = [each.last for each in probed if not each.last.is_ok]
        # A sample took more than the small batches showed: once more, further below.
        wanted = {max(1, each.batch * 2 // 3) for each in failed} - set(search.traces)
        if len(search.traces) > 1 or (search.traces and 1 in search.traces):
            break
    return None


def _foreseen_by_peak(search: Search, size: float) -> int:
    batch = _allocated_line(search).largest(size) or 1
    return max(1, min(batch, search.most or batch))


def close_in(search: Search, largest: int, smooth: int) -> None:
    """Probe at both foretold edges until each is known, or the data has no more samples."""
    looked_beyond = False
    for _ in range(_MOST_ROUNDS):
        lanes = max(1, search.lanes // 2)
        wanted = bracket.next_batches(search.passed, largest, lanes, most=search.most)
        if search.lanes > 1 or not wanted:
            most = search.edge or search.most
            more = bracket.next_batches(search.smooth, smooth, lanes, _FINE_FAST, most)
            if more and not wanted and not looked_beyond:  # is what failed a hole?
                looked_beyond = True
                more += bracket.beyond(search.passed, lanes, search.most)
            wanted += more
        if not wanted:
            return
        search.ask([Ask((batch,), search.cap) for batch in dict.fromkeys(wanted)])


def settle(search: Search) -> tuple[int, int]:
    """Both answers, once each has passed twice, timed alone, and a smaller batch is no faster."""
    largest = fast = 0
    for _ in range(_MOST_ROUNDS):
        largest = bracket.edges(search.passed)[0]
        smooth = min(bracket.edges(search.smooth)[0], largest)
        if not largest:
            break
        fast, wanted = _fastest(search, smooth) if smooth else (largest, set())
        wanted |= {batch for batch in (largest, fast) if batch not in search.rates}
        if not search.passes.get(fast):
            wanted.add(fast)
        if not wanted:
            break
        asks = [Ask((batch,), search.cap, turn=True) for batch in sorted(wanted)]
        search.ask(asks + (_smaller(search, smooth) if not search.rates else []))
    return largest, fast


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


def prove(search: Search, largest: int, fast: int) -> bool:
    """Whether both pass in three more fresh processes, for longer; fast without a retry."""
    asks = [
        Ask((batch,), search.cap, _PROVING_STEPS, _PROVING_STEPS, turn=True)
        for batch in dict.fromkeys((largest, fast))
        for _ in range(_PROOFS)
    ]
    search.proof = [probed.last for probed in search.ask(asks)]
    return all(
        told.is_ok and (told.batch != fast or search.smooth.get(fast) or fast == largest)
        for told in search.proof
    )


def _said(told: Told) -> str:
    return f"A batch of {told.batch} failed in {told.phase or 'its process'}: {told.message}"


def _missing(one: Told, room: Room) -> float:
    """How much more a batch of one would need, as far as it is known."""
    if one.is_ok:
        return float(one.allocated_peak - room.limit)
    return float(one.missing or 0)
