"""What a search knows of the batches so far, and the probes that told it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stepscope.advice.answer import Room
from stepscope.advice.prober import Probed, Probes
from stepscope.analysis import bracket
from stepscope.analysis.memory_model import Trace
from stepscope.errors import CannotTry
from stepscope.workloads.probing import Ask, Parts, Told

CONTEXT = 1 << 30
"""What a process takes beside the allocator, until one has told."""
LASTING = 10
"""Steps before and after the end of an epoch, of a probe that is to prove something."""
_LANES = 6
_WIDE, _SHARED = 3, 0.8
"""How many times the limit, and what part of what is free, a probe beyond the limit may take."""
_BUSY = "busy or unavailable"
"""What CUDA says where one process at a time may use a GPU."""
_SPARED = 0.02
"""Of the device's free memory, where several probes share it."""


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
    lasted: set[int] = field(default_factory=set)
    """Batches that passed for longer."""
    looked_beyond: bool = False
    one_at_a_time: bool = False

    @property
    def cap(self) -> int | None:
        """What probes near the limit get; a whole GPU limits them by itself."""
        whole = self.room.asked is None and not self.room.headroom
        return None if whole else self.room.limit

    @property
    def roomy(self) -> bool:
        """Whether the GPU has more than the limit, so that a probe can be larger than allowed."""
        return self.cap is not None and self.room.free - CONTEXT > 1.5 * self.room.limit

    @property
    def wide(self) -> int | None:
        """What probes get that may be larger than allowed: not all of a GPU that others use too."""
        if not self.roomy:
            return self.cap
        return int(min(_WIDE * self.room.limit, _SHARED * (self.room.free - CONTEXT)))

    @property
    def lanes(self) -> int:
        """How many probes of the limit have room beside each other."""
        if self.cap is None or self.one_at_a_time:
            return 1
        each = self.cap + max(self.outside, CONTEXT // 2)
        return max(1, min(_LANES, int(self.room.free * (1 - _SPARED)) // each))

    @property
    def edge(self) -> int | None:
        """The largest that passed, once something above it failed."""
        low, high = bracket.edges(self.passed)
        return low if high is not None and low else None

    def ask(self, asks: Sequence[Ask]) -> list[Probed]:
        """Probe, as many at once as there is room for, and note what they told."""
        found: list[Probed] = []
        waiting = list(asks)
        while waiting:
            some, waiting = waiting[: self.lanes], waiting[self.lanes :]
            self.show(f"batch {', '.join(f'{b:,}' for ask in some for b in ask.batches)}")
            probed = self.probes.ask(some)
            if len(some) > 1 and any(_BUSY in each.last.message for each in probed):
                self.one_at_a_time = True  # this GPU takes no second process
                waiting = [*some, *waiting]
                continue
            found += probed
        for each in found:
            self._note(each)
        return found

    def _note(self, probed: Probed) -> None:
        self.probed += 1
        for each in probed.told:
            if each.kind == "timeout":  # says nothing of memory, so that no answer can be trusted
                raise CannotTry(
                    f"A batch of {each.batch:,} hangs: {each.message}", "Give it longer: --hang S"
                )
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
            if told.is_ok and ask.again >= LASTING:
                self.lasted.add(batch)
        elif told.is_ok and told.reserved_peak <= self.room.limit:
            self.passed.setdefault(batch, True)
            self.smooth.setdefault(batch, True)
        elif told.is_ok:
            self.smooth.setdefault(batch, False)
        elif not told.is_oom:  # more memory was no help
            self.passed[batch] = self.smooth[batch] = False
