"""The decisions of `fit` on the host, with a model of memory in the place of trials."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stepscope.advice.answer import Fit, Room
from stepscope.advice.hostfit import fit_by, host_room
from stepscope.advice.hostprobe import HostTold
from stepscope.advice.hostsearch import MOST_TRIALS, PASSES, PRESSED
from stepscope.errors import BadWorkload, CannotTry
from stepscope.workloads.probing import Parts, Told
from stepscope.workloads.spec import Workload

MB = 10**6
BASE = 1_126 * MB
LIMIT = 2_147 * MB


@dataclass
class Machine:
    """Processes that take so much for any batch, so much for each sample, and some at random."""

    per_sample: float = 0.45 * MB
    base: int = BASE
    limit: int = LIMIT
    free: int = 4 * LIMIT
    spread: float = 0.0
    """Standard deviation of a full process, as part of what batches take."""
    samples: int | None = None
    leaks: int = 0
    fails: Callable[[int], Told | None] = lambda batch: None
    rate: Callable[[int], float] = float
    """Samples per second; a step takes a second, whatever the batch, if it is not told."""
    seed: int = 0
    asked: list[int] = field(default_factory=list)
    within: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    @property
    def edge(self) -> float:
        """The batch at which an average process reaches the limit."""
        return (self.limit - self.base) / self.per_sample

    def peak(self, batch: int) -> float:
        noise = self._random.gauss(0, self.spread) * min(1.0, batch / self.edge)
        return self.base + self.per_sample * batch + noise * (self.limit - self.base)

    def __call__(self, batch: int, steps: int = 3, memory: int | None = None) -> HostTold:
        limit = memory or self.limit
        self.asked.append(batch)
        self.within.append(limit)
        if self.samples is not None and batch > self.samples:
            raise BadWorkload(
                f"The data has {self.samples} samples: less than one batch of {batch}"
            )
        failed = self.fails(batch)
        if failed is not None:
            return HostTold(failed, reached="training")
        peak = self.peak(batch)
        if self.base > limit:
            return HostTold(Told(batch, "host_oom", "while the data set was made"), reached="data")
        if peak > limit:
            return HostTold(Told(batch, "host_oom", "in step 1"), reached="first step")
        kept = tuple(self.base + self.leaks * step for step in range(1, steps + 3))
        seen = 0 if peak > limit - PRESSED else int(peak)
        parts = Parts(MB, MB, MB, 12_288 * batch)
        took = (batch / self.rate(batch),) * steps
        told = Told(batch, "ok", reserved_peak=seen, step_s=took, kept=kept, parts=parts)
        return HostTold(told, self.base, self.samples, 0, 250_000, 12_288, "cgroup v1")


def fit(machine: Machine) -> Fit:
    room = Room("host", machine.limit, 5 * LIMIT, machine.free, machine.limit)
    return fit_by(machine, Workload("cnn"), room, lambda text: None)


@given(st.floats(0.01 * MB, 12 * MB), st.integers(0, 1000))
@example(0.45 * MB, 0)
def test_a_sharp_edge_is_found_to_a_few_per_cent(per_sample: float, seed: int) -> None:
    machine = Machine(per_sample, spread=0.001, seed=seed)
    found = fit(machine)
    assert found.verdict == "fits" and found.largest is not None
    assert 0.95 * int(0.998 * machine.edge) <= found.largest.size <= machine.edge
    assert found.largest.passed >= PASSES
    assert found.largest.above is not None and found.largest.above > found.largest.size
    assert len(machine.asked) <= 10


def test_processes_that_differ_leave_a_margin() -> None:
    """Where they differ by 2 %, the answer passes nearly always, and is little below the rest."""
    shares = []
    for seed in range(60):
        machine = Machine(spread=0.02, seed=seed)
        found = fit(machine)
        assert found.largest is not None and found.largest.passed >= PASSES
        assert len(machine.asked) <= MOST_TRIALS
        shares.append(found.largest.size / machine.edge)
    shares.sort()
    assert 0.94 < shares[30] < 0.97
    assert shares[3] > 0.92 and shares[56] < 0.99


def test_what_failed_is_above_the_answer() -> None:
    for seed in range(30):
        found = fit(Machine(spread=0.03, seed=seed))
        assert found.largest is not None
        failed = [point.batch for point in found.curve if not point.passed]
        assert all(batch > found.largest.size for batch in failed)


def test_what_is_told_of_a_batch_whose_peak_the_limit_hides() -> None:
    lines: list[str] = []
    room = Room("host", BASE + 2 * MB, LIMIT, LIMIT)
    fit_by(Machine(limit=room.limit, per_sample=MB / 8), Workload("cnn"), room, lines.append)
    assert lines[0] == "batch 8 just fits"


def test_the_certificate() -> None:
    found = fit(Machine())
    largest = found.largest
    assert largest is not None and found.room.device == "host"
    assert largest.leaves == pytest.approx(LIMIT - BASE - 0.45 * MB * largest.size, abs=MB)
    assert largest.why_above == "in step 1" and (largest.misses or 0) > 0
    assert f"{largest.size:,} is the largest batch" in found.says
    assert "passed in 3 fresh processes of 3" in found.says
    assert f"{largest.above:,} ran out of host memory in step 1" in found.says
    assert found.composition is not None and found.composition.fixed == BASE + 2 * MB
    assert found.composition.attack.startswith("Of what you can change, what the forward pass")
    assert found.composition.per_sample == pytest.approx(0.45 * MB, rel=0.01)
    assert found.need is not None and found.need.per_sample == pytest.approx(0.45 * MB, rel=0.05)
    assert found.effort.probes == sum(1 for _ in found.curve) + PASSES - 1
    assert found.effort.ooms == 1


def test_a_batch_that_fails_now_and_then() -> None:
    """It passes twice, then fails once: it is not the answer, but it is not said never to fit."""
    tries: Counter[int] = Counter()

    def once(batch: int) -> Told | None:
        tries[batch] += 1
        is_first = tries[batch] == PASSES and list(tries.values()).count(PASSES) == 1
        return Told(batch, "host_oom", "in step 2") if is_first else None

    found = fit(Machine(fails=once))
    largest = found.largest
    assert largest is not None and largest.above is not None
    assert tries[largest.above] == PASSES and largest.why_above == "failed in 1 of 3, in step 2"
    assert "failed in 1 of 3: it ran out of host memory in step 2" in found.says


def test_the_fast_one_is_the_largest_at_full_speed() -> None:
    machine = Machine()
    found = fit(machine)
    assert found.fast == found.largest  # a step takes a second, whatever the batch


def test_smaller_batches_that_are_faster() -> None:
    found = fit(Machine(rate=lambda batch: 4_000 if batch < 1_500 else 3_000))
    assert found.fast is not None and found.largest is not None
    assert 1_000 < found.fast.size < 1_500 < found.largest.size
    assert f"{found.fast.size:,} is faster" in found.says


def test_one_fast_process_is_noise() -> None:
    found = fit(Machine(rate=lambda batch: 4_354 if 500 < batch < 1_500 else 3_000))
    assert found.curve[1].samples_per_second == pytest.approx(4_354)
    assert found.fast == found.largest


@pytest.mark.parametrize("samples", [1, 5, 8, 300])
def test_the_data_set_bounds_the_batch(samples: int) -> None:
    found = fit(Machine(samples=samples))
    assert found.verdict == "no limit"
    assert found.largest is not None and found.largest.size == samples
    assert f"no more than {samples} samples" in found.says


@pytest.mark.parametrize("share", [0.85, 0.98])
def test_a_data_set_that_ends_little_below_the_limit(share: float) -> None:
    """That it fits has to be shown as always."""
    found = fit(Machine(samples=5_000, per_sample=(share * LIMIT - BASE) / 5_000))
    assert found.verdict == "fits" and found.largest is not None
    assert (found.largest.size, found.largest.passed, found.largest.above) == (5_000, PASSES, None)
    assert "the data set has no more than 5,000 samples" in found.notes


def test_memory_that_does_not_grow() -> None:
    machine = Machine(per_sample=0.0, spread=0.0)
    machine.limit = 2 * BASE
    machine.peak = lambda batch: BASE + 5 * MB  # type: ignore[method-assign]
    found = fit(machine)
    assert found.verdict == "no limit" and "hardly grows" in found.says
    assert len(machine.asked) <= 8


def test_a_leak_is_told_after_one_probe() -> None:
    machine = Machine(leaks=20 * MB)
    found = fit(machine)
    assert found.verdict == "cannot tell" and machine.asked == [8]
    assert "19.07 MiB with every step" in found.says
    assert f"after about {(LIMIT - BASE - 180 * MB) / (20 * MB):.0f} more steps" in found.says


def test_a_small_drift_is_no_leak() -> None:
    assert fit(Machine(leaks=MB // 2)).verdict == "fits"


def test_a_limit_below_what_is_there_before_any_step() -> None:
    machine = Machine(base=LIMIT + 100 * MB)
    found = fit(machine)
    assert found.verdict == "does not fit" and found.largest is None
    assert machine.asked == [8, 8] and machine.within == [LIMIT, int(0.9 * 4 * LIMIT)]
    assert "batch 8 needs" in found.says and "98.8 MiB more" in found.says
    assert found.subject is not None and (found.effort.probes, found.effort.ooms) == (2, 1)
    (point,) = found.curve
    assert not point.passed and point.samples_per_second is None and point.reserved == 0


def test_what_is_missing_is_not_tried_where_there_is_no_more() -> None:
    machine = Machine(base=LIMIT + 100 * MB, free=int(LIMIT / 0.95))
    found = fit(machine)
    assert found.verdict == "does not fit" and machine.asked == [8]
    assert "batch 8 ran out of host memory while the data set was made." in found.says


def test_all_that_is_free_is_not_enough() -> None:
    machine = Machine(base=9 * LIMIT)
    found = fit(machine)
    assert found.verdict == "does not fit" and found.effort.ooms == 2
    assert "7.198 GiB are not enough either" in found.says


def test_a_limit_that_no_batch_fits_into() -> None:
    machine = Machine(per_sample=2_000 * MB)
    found = fit(machine)
    assert found.verdict == "does not fit"
    assert machine.asked == [8, 2, 1, 1]
    assert "needs" in found.says


def test_only_a_batch_of_one_fits() -> None:
    found = fit(Machine(per_sample=600 * MB))
    assert found.verdict == "fits" and found.largest is not None and found.largest.size == 1
    assert found.largest.above == 2


def test_a_step_that_fails_is_no_matter_of_memory() -> None:
    def fails(batch: int) -> Told:
        return Told(
            batch, "error", "in step 1", message="ValueError: no (own.py:4)", hint="mend it"
        )

    machine = Machine(fails=fails)
    with pytest.raises(BadWorkload) as raised:
        fit(machine)
    assert "not for lack of memory: ValueError: no (own.py:4)" in raised.value.message
    assert raised.value.hint == "mend it" and machine.asked == [8]


def test_a_larger_batch_that_fails_for_another_reason_bounds_it_too() -> None:
    def fails(batch: int) -> Told | None:
        message = "RuntimeError: too many"
        return Told(batch, "error", "in step 1", message=message) if batch > 700 else None

    found = fit(Machine(fails=fails))
    assert found.verdict == "fits" and found.largest is not None
    assert 600 <= found.largest.size <= 700
    assert "RuntimeError: too many" in found.says


def test_a_step_that_hangs() -> None:
    machine = Machine(fails=lambda batch: Told(batch, "timeout", message="nothing was heard of it"))
    with pytest.raises(CannotTry, match="nothing was heard"):
        fit(machine)


def test_room() -> None:
    room = host_room(2 << 30, 256 << 20)
    assert (room.limit, room.asked, room.headroom) == (1792 << 20, 2 << 30, 256 << 20)
    assert 0 < host_room(None, 0).limit < room.total
    with pytest.raises(CannotTry, match="leaves nothing"):
        host_room(1 << 30, 1 << 30)
