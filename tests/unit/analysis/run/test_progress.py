"""Progress and throughput of various training loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from stepscope.analysis.run.progress import (
    EpochNow,
    LiveThroughput,
    ReportedProgress,
    progress_of,
    throughput_of,
    updated,
)
from stepscope.inject import events
from stepscope.runs.events import ProcessEvents, parse
from stepscope.runs.timelines import timeline_of

SECOND = 10**9
TRAIN, TEST = 1, 2


def record(at: float, kind: int, number: int = 0, a: float = 0, b: int = 0) -> bytes:
    """A packed event; `a` of loader events is in seconds."""
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
    """One pass over a loader: a batch every `every` seconds, `wait` of which is data wait."""
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


def progress(*processes: ProcessEvents, now: float) -> ReportedProgress:
    return progress_of(list(map(timeline_of, processes)), 1 * SECOND, int(now * SECOND))


def throughput(*processes: ProcessEvents, now: float) -> LiveThroughput:
    loaders = progress(*processes, now=now).loaders
    return throughput_of(list(map(timeline_of, processes)), loaders, int(now * SECOND))


def test_in_the_middle_of_an_epoch() -> None:
    found = progress(
        process(
            *one_pass(10, 4, loader=TRAIN),
            *one_pass(20, 3, loader=TRAIN, of=4, ends=False),
        ),
        now=23,
    )
    assert found.epoch == EpochNow(2, "training", 3, 4)
    assert found.steps == 7
    assert found.loaders == {7: [TRAIN]}


def test_evaluation_belongs_to_the_epoch_before_it() -> None:
    trained = list(one_pass(10, 4, loader=TRAIN))
    evaluates = one_pass(15, 2, loader=TEST, of=5, steps=False, ends=False)
    found = progress(process(*trained, *evaluates), now=17)
    assert found.epoch == EpochNow(1, "evaluation", 2, 5)
    evaluated = one_pass(15, 5, loader=TEST, steps=False)
    assert progress(process(*trained, *evaluated), now=21).epoch == EpochNow(1, "done")
    assert progress(process(*trained), now=21).epoch == EpochNow(1, "done", 4, 4)


def test_epoch_starts_before_its_first_step() -> None:
    """Loader workers take seconds to start: the previous epoch is not shown during that time."""
    waits = record(20, events.LOADER_BEGIN, TRAIN, b=4)
    found = progress(process(*one_pass(10, 4, loader=TRAIN), waits), now=25)
    assert found.epoch == EpochNow(2, "training", 0, 4)


def test_loader_of_unknown_length() -> None:
    found = progress(process(*one_pass(10, 3, loader=TRAIN, of=-1, ends=False)), now=13)
    assert found.epoch == EpochNow(1, "training", 3, None)


def test_marks_without_a_loader() -> None:
    name = events.name_id("epoch")
    marks = [
        events.RECORD.pack(at * SECOND, events.MARK, events.VALUE_INT, 0, name, number)
        for at, number in ((10, 4), (20, 5))
    ]
    steps = [record(10 + n, events.STEP, 1, a=1) for n in range(15)]
    data = record(1, events.START) + b"".join(sorted(marks + steps, key=events.RECORD.unpack))
    marked = ProcessEvents(7, None, parse(data), {name: "epoch"})
    found = progress(marked, now=25)
    assert found.epoch is not None
    assert (found.epoch.index, found.epoch.batches) == (5, None)
    assert found.steps == 15


def test_lightning_epochs_are_numbered_from_0() -> None:
    name = events.name_id("lightning")
    data = record(1, events.START) + record(2, events.SEEN, a=name)
    data += b"".join(one_pass(10, 3, loader=TRAIN, of=4, ends=False))
    found = progress(ProcessEvents(7, None, parse(data), {name: "lightning"}), now=13)
    assert found.epoch == EpochNow(0, "training", 3, 4)


def test_no_events() -> None:
    assert progress(now=5) == ReportedProgress()
    assert progress(process(), now=5) == ReportedProgress(until={7: 0})
    assert throughput(process(), now=5) == LiveThroughput()


def test_recent_events_are_added() -> None:
    records = list(one_pass(10, 30, loader=TRAIN, of=40, ends=False))
    whole = process(*records)
    before = progress(process(*records[:31]), now=25)
    assert before.epoch == EpochNow(1, "training", 15, 40)
    now = updated(before, [timeline_of(whole)])
    assert (now.epoch, now.steps) == (EpochNow(1, "training", 30, 40), 30)
    assert (now.epoch, now.steps) == (progress(whole, now=40).epoch, progress(whole, now=40).steps)
    assert updated(before, [timeline_of(replace(whole, pid=8))]) == before, "an unknown process"


def test_batches_do_not_exceed_the_total() -> None:
    """A new epoch is seen only when all events are read again."""
    passes = [*one_pass(10, 4, loader=TRAIN), *one_pass(20, 4, loader=TRAIN)]
    before = progress(process(*passes[:7]), now=13)
    assert before.epoch == EpochNow(1, "training", 3, 4)
    now = updated(before, [timeline_of(process(*passes))])
    assert (now.epoch, now.steps) == (EpochNow(1, "training", 4, 4), 8)


def test_throughput_of_a_loop() -> None:
    found = throughput(process(*one_pass(10, 30, loader=TRAIN, ends=False)), now=39.5)
    assert found.samples_per_second == pytest.approx(32)
    assert found.data_wait_share == pytest.approx(0.25)
    assert found.steps_per_second == pytest.approx(1)


def test_batch_without_a_step_does_not_count() -> None:
    found = throughput(process(*one_pass(10, 3, loader=TRAIN, ends=False)), now=12.3)
    assert found.samples_per_second == pytest.approx(2 * 32 / 2.25)


def test_samples_of_ranks_add_up() -> None:
    ranks = [
        process(*one_pass(10, 30, loader=TRAIN, wait=wait, ends=False), pid=pid, rank=pid)
        for pid, wait in ((0, 0.25), (1, 0.75))
    ]
    found = throughput(*ranks, now=40)
    assert found.samples_per_second == pytest.approx(64, rel=0.05)
    assert found.data_wait_share == pytest.approx(0.5, rel=0.05)
    assert found.steps_per_second == pytest.approx(1, rel=0.3)


def test_exited_rank_does_not_count() -> None:
    before = process(*one_pass(10, 30, loader=TRAIN), pid=1)
    going = process(*one_pass(100, 30, loader=TRAIN, ends=False), pid=2)
    assert throughput(before, going, now=130).samples_per_second == pytest.approx(32, rel=0.05)


def test_training_and_evaluation_are_not_mixed() -> None:
    trained = list(one_pass(10, 20, loader=TRAIN))
    evaluated = list(one_pass(30, 4, loader=TEST, every=0.1, wait=0.09, samples=64, steps=False))
    in_evaluation = throughput(process(*trained, *evaluated), now=30.4)
    assert in_evaluation.samples_per_second == pytest.approx(32, rel=0.05)
    at_the_end = throughput(process(*trained, *evaluated), now=80)
    assert at_the_end.samples_per_second == pytest.approx(32, rel=0.05)
    only_evaluated = throughput(process(*evaluated), now=30.4)
    assert only_evaluated.samples_per_second == pytest.approx(640)
    assert only_evaluated.data_wait_share == pytest.approx(0.9)
    trains_again = one_pass(30.5, 3, loader=TRAIN, ends=False)
    training = throughput(process(*trained, *evaluated, *trains_again), now=33)
    assert training.samples_per_second == pytest.approx(32, rel=0.05)


def test_throughput_of_a_hanging_loop_decreases() -> None:
    hangs = process(*one_pass(10, 30, loader=TRAIN, ends=False))
    rates = [throughput(hangs, now=now).samples_per_second for now in (39.5, 45, 50, 100)]
    assert None not in rates
    assert rates == sorted(rates, reverse=True)  # type: ignore[type-var]
    assert rates[0] == pytest.approx(32)
    assert rates[-1] is not None and rates[-1] < 1


def test_steps_longer_than_the_averaging_time() -> None:
    slow = process(*one_pass(10, 4, loader=TRAIN, every=30, wait=15, ends=False))
    found = throughput(slow, now=125)
    assert found.samples_per_second == pytest.approx(32 / 30)
    assert found.data_wait_share == pytest.approx(0.5)
    assert found.steps_per_second == pytest.approx(1 / 30)


def test_loop_with_one_batch_per_pass() -> None:
    """`next(iter(loader))`: the time between two passes is the rest of the loop."""
    records = [
        each
        for second in range(10, 30)
        for each in one_pass(second, 1, loader=TRAIN, of=5, ends=False)
    ]
    found = throughput(process(*records), now=30)
    assert found.samples_per_second == pytest.approx(32, rel=0.1)
    assert found.data_wait_share == pytest.approx(0.25, rel=0.1)


def test_two_loaders_in_one_loop() -> None:
    """`zip(a, b)`: the samples of one loader, the waits of both."""
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
    found = throughput(process(*begins, *both), now=30)
    assert found.samples_per_second == pytest.approx(16, rel=0.1)
    assert found.data_wait_share == pytest.approx(0.5, rel=0.1)


def test_batches_of_unknown_size() -> None:
    found = throughput(process(*one_pass(10, 30, loader=TRAIN, samples=-1, ends=False)), now=40)
    assert found.samples_per_second is None
    assert found.data_wait_share == pytest.approx(0.25, rel=0.05)


def test_steps_from_marks() -> None:
    marks = [record(10 + n / 4, events.MARK, a=events.name_id("step")) for n in range(80)]
    assert throughput(process(*marks), now=30).steps_per_second == pytest.approx(4, rel=0.05)
