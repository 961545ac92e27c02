"""Times of a device that is not here: a stand-in for `torch.cuda` says what it would say."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from stepscope.inject import events, finder
from stepscope.runs.events import read_folder


@dataclass
class Cuda:
    """A device with a queue: events happen once it is `done`, and calls of `breaks` raise."""

    initialized: bool = True
    capturing: bool = False
    done: bool = True
    took_ms: float = 12.5
    breaks: str = ""
    events: list[Event] = field(default_factory=list)

    def is_initialized(self) -> bool:
        self.fail("is_initialized")
        return self.initialized

    def is_current_stream_capturing(self) -> bool:
        self.fail("is_current_stream_capturing")
        return self.capturing

    def Event(self, enable_timing: bool) -> Event:
        assert enable_timing
        self.fail("Event")
        return Event(self)

    def fail(self, where: str) -> None:
        if where == self.breaks:
            raise RuntimeError("CUDA error: device-side assert triggered")


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.recorded = False

    def record(self) -> None:
        self.cuda.fail("record")
        assert not self.cuda.capturing, "an event in a graph that is captured breaks it"
        self.recorded = True
        self.cuda.events.append(self)

    def query(self) -> bool:
        self.cuda.fail("query")
        return self.cuda.done

    def elapsed_time(self, end: Event) -> float:
        self.cuda.fail("elapsed_time")
        assert self.recorded and end.recorded and self.cuda.done
        return self.cuda.took_ms


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cuda]:
    """The stand-in, in a process that is watched."""
    found = Cuda()
    finder.load_hook()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=found))
    before = events.report_to(str(tmp_path))
    yield found
    events.report_with(before)


@pytest.fixture
def timer(cuda: Cuda) -> Any:
    return sys.modules["_stepscope_cuda_timing"].DeviceTimer()


def step(timer: Any, seconds: float = 0.0) -> None:
    """One step that is measured, whenever the last one was."""
    timer.due = 0
    timer.batch_is_here()
    if seconds:
        time.sleep(seconds)
    timer.step_is_queued()


def told(folder: Path) -> list[Any]:
    return [record for process in read_folder(folder) for record in process.of(events.DEVICE_STEP)]


def test_the_device_s_time_and_the_time_to_queue_it_are_told(timer: Any, tmp_path: Path) -> None:
    begun = time.monotonic_ns()
    step(timer, 0.02)
    took = time.monotonic_ns() - begun
    (record,) = told(tmp_path)
    assert record["a"] == 12_500_000
    assert 20e6 <= record["b"] <= took
    assert not record["flags"] & events.HOST_AHEAD


def test_a_host_that_queued_all_before_the_device_began_is_ahead(
    cuda: Cuda, timer: Any, tmp_path: Path
) -> None:
    cuda.done = False
    step(timer)
    assert not told(tmp_path), "nobody waits for the device"
    cuda.done = True
    step(timer)
    first, second = told(tmp_path)
    assert first["flags"] & events.HOST_AHEAD
    assert not second["flags"] & events.HOST_AHEAD


def test_one_step_in_many_is_measured(cuda: Cuda, timer: Any, tmp_path: Path) -> None:
    for _ in range(200):
        timer.batch_is_here()
        timer.step_is_queued()
    assert len(told(tmp_path)) < 20
    assert len(cuda.events) == 2 * len(told(tmp_path))


def test_without_cuda_nothing_happens(timer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    for torch in (None, SimpleNamespace(), SimpleNamespace(cuda=Cuda(initialized=False))):
        monkeypatch.setitem(sys.modules, "torch", torch)
        step(timer)
        assert timer.due > time.monotonic_ns() + 100_000_000, "and is not asked again at once"
    assert not told(tmp_path)


def test_a_stream_that_is_captured_is_left_alone(cuda: Cuda, timer: Any, tmp_path: Path) -> None:
    cuda.capturing = True
    step(timer)
    assert cuda.events == []
    cuda.capturing = False
    timer.due = 0
    timer.batch_is_here()
    cuda.capturing = True
    timer.step_is_queued()
    assert len(cuda.events) == 1
    cuda.capturing = False
    step(timer)
    assert len(told(tmp_path)) == 1


def test_what_began_before_the_end_of_a_pass_is_forgotten(
    cuda: Cuda, timer: Any, tmp_path: Path
) -> None:
    """An evaluation between the last batch and the next step belongs to neither."""
    timer.due = 0
    timer.batch_is_here()
    timer.pass_is_over()
    timer.step_is_queued()
    assert not told(tmp_path)
    step(timer)
    assert len(told(tmp_path)) == 1


def test_a_step_without_a_batch_is_not_measured(timer: Any, tmp_path: Path) -> None:
    timer.step_is_queued()
    assert not told(tmp_path)


def test_with_several_batches_in_a_step_the_first_one_begins_it(
    cuda: Cuda, timer: Any, tmp_path: Path
) -> None:
    """Gradient accumulation."""
    timer.due = 0
    timer.batch_is_here()
    timer.batch_is_here()
    timer.step_is_queued()
    assert len(cuda.events) == 2 and len(told(tmp_path)) == 1


def test_a_device_that_never_comes_back_is_not_waited_for(
    cuda: Cuda, timer: Any, tmp_path: Path
) -> None:
    cuda.done = False
    for _ in range(50):
        step(timer)
    assert not told(tmp_path)
    cuda.done = True
    step(timer)
    assert len(told(tmp_path)) <= 18, "and what is kept for it is bounded"


@pytest.mark.parametrize(
    "where",
    ["is_initialized", "is_current_stream_capturing", "Event", "record", "query", "elapsed_time"],
)
def test_whatever_breaks_stays_there_and_is_left_alone(
    cuda: Cuda, timer: Any, tmp_path: Path, where: str
) -> None:
    cuda.breaks = where
    step(timer)
    assert not told(tmp_path)
    assert timer.due > time.monotonic_ns() + 100_000_000
    cuda.breaks = ""
    step(timer)
    assert len(told(tmp_path)) == 1


def test_nothing_is_told_when_nobody_watches(timer: Any, tmp_path: Path) -> None:
    events.report_to(None)
    step(timer)
    assert not told(tmp_path)
