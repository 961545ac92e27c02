"""Step times of a CUDA device, with a fake `torch.cuda`."""

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
    """A device with a queue: events complete when it is `done`; the call named `breaks` raises."""

    initialized: bool = True
    capturing: bool = False
    done: bool = True
    elapsed_ms: float = 12.5
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
        assert not self.cuda.capturing, "an event breaks a graph capture"
        self.recorded = True
        self.cuda.events.append(self)

    def query(self) -> bool:
        self.cuda.fail("query")
        return self.cuda.done

    def elapsed_time(self, end: Event) -> float:
        self.cuda.fail("elapsed_time")
        assert self.recorded and end.recorded and self.cuda.done
        return self.cuda.elapsed_ms


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cuda]:
    """The fake device, in a monitored process."""
    fake = Cuda()
    finder.load_hook()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=fake))
    before = events.report_to(str(tmp_path))
    yield fake
    events.report_with(before)


@pytest.fixture
def timer(cuda: Cuda) -> Any:
    return sys.modules["_stepscope_cuda_timing"].DeviceTimer()


def step(timer: Any, seconds: float = 0.0) -> None:
    """Measure one step, regardless of the interval."""
    timer.due = 0
    timer.batch_received()
    if seconds:
        time.sleep(seconds)
    timer.step_queued()


def device_steps(folder: Path) -> list[Any]:
    return [record for process in read_folder(folder) for record in process.of(events.DEVICE_STEP)]


def test_device_time_and_queueing_time(timer: Any, tmp_path: Path) -> None:
    began = time.monotonic_ns()
    step(timer, 0.02)
    elapsed = time.monotonic_ns() - began
    (record,) = device_steps(tmp_path)
    assert record["a"] == 12_500_000
    assert 20e6 <= record["b"] <= elapsed
    assert not record["flags"] & events.HOST_AHEAD


def test_host_ahead_of_the_device(cuda: Cuda, timer: Any, tmp_path: Path) -> None:
    cuda.done = False
    step(timer)
    assert not device_steps(tmp_path), "the device is not synchronized"
    cuda.done = True
    step(timer)
    first, second = device_steps(tmp_path)
    assert first["flags"] & events.HOST_AHEAD
    assert not second["flags"] & events.HOST_AHEAD


def test_only_some_steps_are_measured(cuda: Cuda, timer: Any, tmp_path: Path) -> None:
    for _ in range(200):
        timer.batch_received()
        timer.step_queued()
    assert len(device_steps(tmp_path)) < 20
    assert len(cuda.events) == 2 * len(device_steps(tmp_path))


def test_no_measurement_without_cuda(timer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    for torch in (None, SimpleNamespace(), SimpleNamespace(cuda=Cuda(initialized=False))):
        monkeypatch.setitem(sys.modules, "torch", torch)
        step(timer)
        assert timer.due > time.monotonic_ns() + 100_000_000, "the next attempt is delayed"
    assert not device_steps(tmp_path)


def test_no_events_during_graph_capture(cuda: Cuda, timer: Any, tmp_path: Path) -> None:
    cuda.capturing = True
    step(timer)
    assert cuda.events == []
    cuda.capturing = False
    timer.due = 0
    timer.batch_received()
    cuda.capturing = True
    timer.step_queued()
    assert len(cuda.events) == 1
    cuda.capturing = False
    step(timer)
    assert len(device_steps(tmp_path)) == 1


def test_end_of_a_pass_discards_the_step(cuda: Cuda, timer: Any, tmp_path: Path) -> None:
    """An evaluation between the last batch and the next step does not belong to a step."""
    timer.due = 0
    timer.batch_received()
    timer.pass_ended()
    timer.step_queued()
    assert not device_steps(tmp_path)
    step(timer)
    assert len(device_steps(tmp_path)) == 1


def test_step_without_a_batch_is_not_measured(timer: Any, tmp_path: Path) -> None:
    timer.step_queued()
    assert not device_steps(tmp_path)


def test_first_of_several_batches_starts_the_step(cuda: Cuda, timer: Any, tmp_path: Path) -> None:
    """Gradient accumulation."""
    timer.due = 0
    timer.batch_received()
    timer.batch_received()
    timer.step_queued()
    assert len(cuda.events) == 2 and len(device_steps(tmp_path)) == 1


def test_blocked_device_is_not_waited_for(cuda: Cuda, timer: Any, tmp_path: Path) -> None:
    cuda.done = False
    for _ in range(50):
        step(timer)
    assert not device_steps(tmp_path)
    cuda.done = True
    step(timer)
    assert len(device_steps(tmp_path)) <= 18, "the number of pending events is bounded"


@pytest.mark.parametrize(
    "where",
    ["is_initialized", "is_current_stream_capturing", "Event", "record", "query", "elapsed_time"],
)
def test_errors_are_contained_and_delay_the_next_attempt(
    cuda: Cuda, timer: Any, tmp_path: Path, where: str
) -> None:
    cuda.breaks = where
    step(timer)
    assert not device_steps(tmp_path)
    assert timer.due > time.monotonic_ns() + 100_000_000
    cuda.breaks = ""
    step(timer)
    assert len(device_steps(tmp_path)) == 1


def test_nothing_is_reported_if_not_monitored(timer: Any, tmp_path: Path) -> None:
    events.report_to(None)
    step(timer)
    assert not device_steps(tmp_path)
