"""Epochs and phases from the events of processes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stepscope.analysis.run.epochs import find_epochs, find_phases
from stepscope.analysis.run.passes import MarkEvent, Records, Timeline
from stepscope.records import Span
from stepscope.runs.events import RECORD

S = 1_000_000_000


def records(*rows: tuple[float, int, float, int]) -> Records:
    """(seconds, number, a, b) each; `a` in seconds where it is a wait."""
    found = np.zeros(len(rows), RECORD)
    for record, (t, number, a, b) in zip(found, rows, strict=True):
        record["t"], record["number"], record["a"], record["b"] = int(t * S), number, int(a * S), b
    return found


def timeline(
    begins: list[tuple[float, int]] | None = None,
    batches: list[tuple[float, int]] | None = None,
    ends: list[tuple[float, int]] | None = None,
    steps: list[float] | None = None,
    marks: list[MarkEvent] | None = None,
    frameworks: frozenset[str] = frozenset(),
) -> Timeline:
    return Timeline(
        1,
        None,
        records(*[(t, n, 0, -1) for t, n in begins or []]),
        records(*[(t, n, 0.01, 32) for t, n in batches or []]),
        records(*[(t, n, 0, 0) for t, n in ends or []]),
        records(*[(t, 1, 1e-9, 0) for t in steps or []]),
        marks or [],
        frameworks,
    )


def spans(epochs: list[Span]) -> list[tuple[float, float]]:
    return [(span.begin_ns / S, span.end_ns / S) for span in epochs]


def numbers(*timelines: Timeline) -> list[int | None]:
    return [span.index for span in find_epochs(timelines, 0, 10 * S)[1]]


def training_with_evaluation(*frameworks: str) -> Timeline:
    return timeline(
        begins=[(1, 1), (3, 2), (4, 1), (6, 2)],
        batches=[(1.2, 1), (1.6, 1), (3.2, 2), (4.2, 1), (4.6, 1), (6.2, 2)],
        ends=[(2, 1), (3.5, 2), (5, 1), (6.5, 2)],
        steps=[1.5, 1.9, 4.5, 4.9],
        frameworks=frozenset(frameworks),
    )


def test_pass_with_steps_is_an_epoch_and_pass_without_is_an_evaluation() -> None:
    timelines = [training_with_evaluation()]
    source, epochs = find_epochs(timelines, 0, 10 * S)
    assert source == "loader"
    assert spans(epochs) == [(1, 2), (4, 5)]
    assert spans(find_phases(timelines, 10 * S)) == [(3, 3.5), (6, 6.5)]


def test_loader_epochs_are_numbered_from_1_but_from_0_with_lightning() -> None:
    assert numbers(training_with_evaluation("torch")) == [1, 2]
    assert numbers(training_with_evaluation("torch", "lightning")) == [0, 1]
    assert numbers(training_with_evaluation("pytorch_lightning")) == [0, 1]
    launcher = timeline(frameworks=frozenset({"lightning"}))  # ranks that were forked from it
    assert numbers(training_with_evaluation(), launcher) == [0, 1]


def test_epochs_of_consecutive_processes_are_numbered_together() -> None:
    first = training_with_evaluation()
    later = timeline(begins=[(7, 1)], batches=[(7.2, 1)], ends=[(8, 1)], steps=[7.5])
    assert numbers(first, replace(later, pid=2)) == [1, 2, 3]
    phases = [
        MarkEvent(int(t * S), "epoch", value, edge, "marks")
        for t, value, edge in ((1, 0, "begin"), (2, 0, "end"), (2, 1, "begin"), (3, 1, "end"))
    ]
    again = [mark._replace(t=mark.t + 5 * S) for mark in phases]
    assert numbers(timeline(marks=phases), timeline(marks=again)) == [0, 1, 2, 3]


def test_keras_epochs_are_numbered_as_keras_prints_them() -> None:
    fit = [
        MarkEvent(t * S, "epoch", value, edge, "fit")
        for t, value, edge in ((1, 0, "begin"), (2, 0, "end"), (3, 1, "begin"), (4, 1, "end"))
    ]
    assert find_epochs([timeline(marks=fit)], 0, 10 * S)[0] == "fit"
    assert numbers(timeline(marks=fit)) == [1, 2]
    resumed = [mark._replace(value=mark.value + 5) for mark in fit]  # fit(initial_epoch=5)
    assert numbers(timeline(marks=resumed)) == [6, 7]


@pytest.mark.parametrize("source", ["marks", "pattern"])
def test_reported_numbers_are_kept(source: str) -> None:
    assert numbers(timeline(marks=marks([1, 2, 3], source))) == [0, 1, 2]


def test_abandoned_pass_ends_with_its_last_step() -> None:
    line = timeline(begins=[(1, 1)], batches=[(1.2, 1), (1.6, 1)], steps=[1.5, 1.9])
    (epoch,) = find_epochs([line], 0, 10 * S)[1]
    assert (epoch.begin_ns / S, epoch.end_ns / S, epoch.complete) == (1, 1.9, False)


def test_loaders_zipped_together_are_one_epoch() -> None:
    line = timeline(
        begins=[(1, 1), (1.01, 2)],
        batches=[(1.2, 1), (1.21, 2), (1.6, 1), (1.61, 2)],
        ends=[(2, 1)],
        steps=[1.5, 1.9],
    )
    assert len(find_epochs([line], 0, 10 * S)[1]) == 1


def test_every_pass_counts_without_steps() -> None:
    line = timeline(begins=[(1, 1), (3, 1)], batches=[(1.5, 1), (3.5, 1)], ends=[(2, 1), (4, 1)])
    assert spans(find_epochs([line], 0, 10 * S)[1]) == [(1, 2), (3, 4)]
    assert find_phases([line], 10 * S) == []


def marks(times: list[float], source: str = "marks") -> list[MarkEvent]:
    return [MarkEvent(int(t * S), "epoch", i, None, source) for i, t in enumerate(times)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([1, 3, 5], [(1, 3), (3, 5), (5, 7)]),  # at the start of each epoch; the run ends at 7
        ([3, 5, 6.9], [(0, 3), (3, 5), (5, 6.9)]),  # at the end of each epoch
        ([0.1], [(0.1, 7)]),
        ([6.8], [(0, 6.8)]),
    ],
)
def test_marks_at_the_start_or_end_of_epochs(
    times: list[float], expected: list[tuple[float, float]]
) -> None:
    line = timeline(marks=marks(times))
    assert spans(find_epochs([line], 0, 7 * S)[1]) == expected


def test_steps_show_that_marks_are_at_the_end_of_epochs() -> None:
    trainer = timeline(steps=[1.1, 1.5, 2.1, 2.5])
    printer = timeline(marks=marks([2, 3], "pattern"))
    source, epochs = find_epochs([trainer, printer], 0, 9 * S)
    assert source == "pattern"
    assert spans(epochs) == [(1.1, 2), (2, 3)], "the first steps are before the first mark"


def test_repeated_output_of_a_progress_bar_is_one_epoch() -> None:
    repeated = [
        MarkEvent(int(t * S), "epoch", value, None, "pattern")
        for t, value in ((1, 1), (1.5, 1), (2, 1), (3, 2), (3.5, 2))
    ]
    assert len(find_epochs([timeline(marks=repeated)], 0, 5 * S)[1]) == 2


def test_marks_take_precedence() -> None:
    line = training_with_evaluation()
    own = Timeline(2, None, *[records()] * 4, marks([1, 5]))
    assert find_epochs([line, own], 0, 7 * S)[0] == "marks"


def test_open_phase_lasts_to_the_end() -> None:
    line = timeline(marks=[MarkEvent(2 * S, "save", None, "begin", "marks")])
    (phase,) = find_phases([line], 9 * S)
    assert (phase.name, phase.seconds, phase.complete) == ("save", 7, False)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.5, "²", "last", "9" * 5000])
def test_marks_without_an_epoch_number_are_counted(value: float | str) -> None:
    invalid = [MarkEvent(t * S, "epoch", value, None, "marks") for t in (1, 2)]
    counted = numbers(timeline(marks=invalid))
    assert counted == [1, 2][: len(counted)] != []


def test_no_events_no_epochs() -> None:
    assert find_epochs([], 0, S) == (None, [])
    assert find_epochs([timeline()], 0, S) == (None, [])
