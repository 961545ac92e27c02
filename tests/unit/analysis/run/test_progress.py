"""How far a run is and how fast it goes, of loops as people write them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from stepscope.analysis.run.progress import (
    EpochNow,
    LiveThroughput,
    ReportedProgress,
    counted_on,
    progress_of,
    throughput_of,
)
from stepscope.inject import events
from stepscope.runs.events import ProcessEvents, parse
from stepscope.runs.timelines import timeline_of

SECOND = 10**9
TRAIN, TEST = 1, 2


def record(at: float, kind: int, number: int = 0, a: float = 0, b: int = 0) -> bytes:
    """`a` of what a loader reports is in seconds."""
    waited = (
        int(a * SECOND)
        if kind in (events.LOADER_BEGIN, events.BATCH, events.LOADER_END)
        else int(a)
    )
    packed: bytes = events.RECORD.pack(int(at * SECOND), kind, 0, number, waited, b)
    return packed


def one_pass(
    begin: float,
    batches: int,
    *,
    loader: int,
    every: float = 1.0,
    wait: float = 0.25,
    samples: int = 32,
    of: int | None = None,
    steps: bool = True,
    ends: bool = True,
) -> Iterator[bytes]:
    """One pass over a loader: `iter` takes no time, a batch comes after `wait` of `every`."""
    yield record(begin, events.LOADER_BEGIN, loader, b=batches if of is None else of)
    for index in range(batches):
        at = begin + index * every + wait
        yield record(at, events.BATCH, loader, a=wait, b=samples)
        if steps:
            yield record(at + 0.5 * every, events.STEP, 1, a=1)
    if ends:
        yield record(begin + batches * every, events.LOADER_END, loader)


def process(*records: bytes, pid: int = 7, rank: int | None = None) -> ProcessEvents:
    data = record(1, events.START) + b"".join(records)
    return ProcessEvents(pid, rank, parse(data), {events.name_id("step"): "step"})


def told(*processes: ProcessEvents, now: float) -> ReportedProgress:
    return progress_of(list(map(timeline_of, processes)), 1 * SECOND, int(now * SECOND))


def pace(*processes: ProcessEvents, now: float) -> LiveThroughput:
    loaders = told(*processes, now=now).loaders
    return throughput_of(list(map(timeline_of, processes)), loaders, int(now * SECOND))


def test_in_the_middle_of_an_epoch() -> None:
    found = told(
        process(
            *one_pass(10, 4, loader=TRAIN),
            *one_pass(20, 3, loader=TRAIN, of=4, ends=False),
        ),
        now=23,
    )
    assert found.epoch == EpochNow(1, "training", 3, 4)
    assert found.steps == 7
    assert found.loaders == {7: [TRAIN]}


def test_an_evaluation_belongs_to_the_epoch_before_it() -> None:
    trained = list(one_pass(10, 4, loader=TRAIN))
    evaluates = one_pass(15, 2, loader=TEST, of=5, steps=False, ends=False)
    found = told(process(*trained, *evaluates), now=17)
    assert found.epoch == EpochNow(0, "evaluation", 2, 5)
    evaluated = one_pass(15, 5, loader=TEST, steps=False)
    assert told(process(*trained, *evaluated), now=21).epoch == EpochNow(0, "done")
    assert told(process(*trained), now=21).epoch == EpochNow(0, "done", 4, 4)


def test_an_epoch_begins_before_its_first_step() -> None:
    """Workers start for seconds: nobody should think that the last epoch still goes on."""
    waits = record(20, events.LOADER_BEGIN, TRAIN, b=4)
    found = told(process(*one_pass(10, 4, loader=TRAIN), waits), now=25)
    assert found.epoch == EpochNow(1, "training", 0, 4)


def test_a_loader_that_does_not_tell_its_length() -> None:
    found = told(process(*one_pass(10, 3, loader=TRAIN, of=-1, ends=False)), now=13)
    assert found.epoch == EpochNow(0, "training", 3, None)


def test_marks_without_any_loader() -> None:
    name = events.name_id("epoch")
    marks = [
        events.RECORD.pack(at * SECOND, events.MARK, events.VALUE_INT, 0, name, number)
        for at, number in ((10, 4), (20, 5))
    ]
    steps = [record(10 + n, events.STEP, 1, a=1) for n in range(15)]
    data = record(1, events.START) + b"".join(sorted(marks + steps, key=events.RECORD.unpack))
    teller = ProcessEvents(7, None, parse(data), {name: "epoch"})
    found = told(teller, now=25)
    assert found.epoch is not None
    assert (found.epoch.index, found.epoch.batches) == (5, None)
    assert found.steps == 15


def test_nothing_was_told() -> None:
    assert told(now=5) == ReportedProgress()
    assert told(process(), now=5) == ReportedProgress(until={7: 0})
    assert pace(process(), now=5) == LiveThroughput()


def test_what_came_since_is_counted_on() -> None:
    records = list(one_pass(10, 30, loader=TRAIN, of=40, ends=False))
    whole = process(*records)
    before = told(process(*records[:31]), now=25)
    assert before.epoch == EpochNow(0, "training", 15, 40)
    now = counted_on(before, [timeline_of(whole)])
    assert (now.epoch, now.steps) == (EpochNow(0, "training", 30, 40), 30)
    assert (now.epoch, now.steps) == (told(whole, now=40).epoch, told(whole, now=40).steps)
    assert (
        counted_on(before, [timeline_of(replace(whole, pid=8))]) == before
    )  # nothing is known of that process


def test_no_more_is_counted_than_there_are() -> None:
    """Another epoch has begun: that is seen when all events are looked at again."""
    passes = [*one_pass(10, 4, loader=TRAIN), *one_pass(20, 4, loader=TRAIN)]
    before = told(process(*passes[:7]), now=13)
    assert before.epoch == EpochNow(0, "training", 3, 4)
    now = counted_on(before, [timeline_of(process(*passes))])
    assert (now.epoch, now.steps) == (EpochNow(0, "training", 4, 4), 8)


def test_pace_of_a_loop() -> None:
    found = pace(process(*one_pass(10, 30, loader=TRAIN, ends=False)), now=39.5)
    assert found.samples_per_second == pytest.approx(32)
    assert found.data_wait_share == pytest.approx(0.25)
    assert found.steps_per_second == pytest.approx(1)


def test_a_batch_that_was_only_fetched_does_not_count() -> None:
    found = pace(process(*one_pass(10, 3, loader=TRAIN, ends=False)), now=12.3)
    assert found.samples_per_second == pytest.approx(2 * 32 / 2.25)


def test_ranks_add_up_and_step_together() -> None:
    ranks = [
        process(*one_pass(10, 30, loader=TRAIN, wait=wait, ends=False), pid=pid, rank=pid)
        for pid, wait in ((0, 0.25), (1, 0.75))
    ]
    found = pace(*ranks, now=40)
    assert found.samples_per_second == pytest.approx(64, rel=0.05)
    assert found.data_wait_share == pytest.approx(0.5, rel=0.05)
    assert found.steps_per_second == pytest.approx(1, rel=0.3)


def test_a_rank_that_has_ended_no_longer_counts() -> None:
    before = process(*one_pass(10, 30, loader=TRAIN), pid=1)
    going = process(*one_pass(100, 30, loader=TRAIN, ends=False), pid=2)
    assert pace(before, going, now=130).samples_per_second == pytest.approx(32, rel=0.05)


def test_training_and_evaluation_are_not_mixed() -> None:
    trained = list(one_pass(10, 20, loader=TRAIN))
    evaluated = list(one_pass(30, 4, loader=TEST, every=0.1, wait=0.09, samples=64, steps=False))
    in_evaluation = pace(process(*trained, *evaluated), now=30.4)
    assert in_evaluation.samples_per_second == pytest.approx(32, rel=0.05)
    at_the_end = pace(process(*trained, *evaluated), now=80)
    assert at_the_end.samples_per_second == pytest.approx(32, rel=0.05)
    only_evaluated = pace(process(*evaluated), now=30.4)
    assert only_evaluated.samples_per_second == pytest.approx(640)
    assert only_evaluated.data_wait_share == pytest.approx(0.9)
    trains_again = one_pass(30.5, 3, loader=TRAIN, ends=False)
    training = pace(process(*trained, *evaluated, *trains_again), now=33)
    assert training.samples_per_second == pytest.approx(32, rel=0.05)


def test_a_loop_that_hangs_gets_slower_and_slower() -> None:
    hangs = process(*one_pass(10, 30, loader=TRAIN, ends=False))
    rates = [pace(hangs, now=now).samples_per_second for now in (39.5, 45, 50, 100)]
    assert None not in rates
    assert rates == sorted(rates, reverse=True)  # type: ignore[type-var]
    assert rates[0] == pytest.approx(32)
    assert rates[-1] is not None and rates[-1] < 1


def test_steps_that_take_longer_than_one_looks_back() -> None:
    slow = process(*one_pass(10, 4, loader=TRAIN, every=30, wait=15, ends=False))
    found = pace(slow, now=125)
    assert found.samples_per_second == pytest.approx(32 / 30)
    assert found.data_wait_share == pytest.approx(0.5)
    assert found.steps_per_second == pytest.approx(1 / 30)


def test_a_loop_that_takes_one_batch_of_every_pass() -> None:
    """`next(iter(loader))`: what is between the passes is the rest of the loop."""
    records = [
        each
        for second in range(10, 30)
        for each in one_pass(second, 1, loader=TRAIN, of=5, ends=False)
    ]
    found = pace(process(*records), now=30)
    assert found.samples_per_second == pytest.approx(32, rel=0.1)
    assert found.data_wait_share == pytest.approx(0.25, rel=0.1)


def test_two_loaders_side_by_side() -> None:
    """`zip(a, b)`: the samples of one, the waits of both."""
    both = [
        record(at, kind, loader, a=wait, b=samples)
        for second in range(10, 30)
        for at, kind, loader, wait, samples in (
            (second + 0.2, events.BATCH, 1, 0.2, 16),
            (second + 0.5, events.BATCH, 2, 0.3, 8),
            (second + 0.9, events.STEP, 1, 1, 0),
        )
    ]
    begins = [record(9.9, events.LOADER_BEGIN, loader, b=100) for loader in (1, 2)]
    found = pace(process(*begins, *both), now=30)
    assert found.samples_per_second == pytest.approx(16, rel=0.1)
    assert found.data_wait_share == pytest.approx(0.5, rel=0.1)


def test_batches_that_do_not_tell_their_size() -> None:
    found = pace(process(*one_pass(10, 30, loader=TRAIN, samples=-1, ends=False)), now=40)
    assert found.samples_per_second is None
    assert found.data_wait_share == pytest.approx(0.25, rel=0.05)


def test_steps_that_the_script_marks() -> None:
    marks = [record(10 + n / 4, events.MARK, a=events.name_id("step")) for n in range(80)]
    assert pace(process(*marks), now=30).steps_per_second == pytest.approx(4, rel=0.05)
