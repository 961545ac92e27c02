"""The breakdown of step time: data wait per step, evaluation, and stack samples by kind."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from stepscope.analysis.bottleneck.breakdown import StepBreakdown, breakdown_of, kind_of
from stepscope.analysis.run.data import NO_RECORDS, RunData, StackLocation, Trainer
from stepscope.analysis.run.passes import Records, Timeline
from stepscope.inject import events
from stepscope.records import CodeLocation
from synthetic_cases import (
    BACKWARD,
    EVALUATES,
    FORWARD,
    LOGGING,
    SAVE,
    Training,
    ns,
    observed,
)


def breakdown(run: RunData | Training) -> StepBreakdown:
    run = observed(run) if isinstance(run, Training) else run
    found = breakdown_of(run.trainers[0])
    assert found is not None
    return found


def records(*rows: tuple[float, int, float]) -> Records:
    """Return batch records from rows of seconds, loader number, and wait in seconds."""
    rows_ns = [(ns(t), events.BATCH, 0, number, round(a * 1e9), 64) for t, number, a in rows]
    return np.array(rows_ns, NO_RECORDS.dtype)


@given(st.lists(st.sampled_from((0.0, 0.01, 0.05)), min_size=30, max_size=60))
def test_wait_belongs_to_the_step_that_it_delays(waits: list[float]) -> None:
    """Steps take 0.1 s plus their own wait, so that they are equal without it."""
    lengths = [0.1 + wait for wait in waits]
    found = breakdown(Training(steps=len(waits) - 1, lengths=lengths, waits=waits))
    analyzed = waits[1 + found.warmup :]
    assert found.lengths == pytest.approx([0.1 + wait for wait in analyzed])
    assert found.lengths_without_wait == pytest.approx([0.1] * len(analyzed))
    assert found.wait_seconds == pytest.approx(sum(analyzed))
    assert found.wait_share == pytest.approx(sum(analyzed) / found.seconds)
    assert found.step_without_wait == pytest.approx(0.1)


def test_waits_at_the_start_and_end_of_a_pass_count() -> None:
    run = observed(Training(steps=99, epoch=25, workers=0))
    timeline = run.trainers[0].timeline
    ends, begins = timeline.loader_ends.copy(), timeline.loader_begins.copy()
    ends["a"], begins["a"] = 20_000_000, 30_000_000
    trainer = replace(
        run.trainers[0], timeline=replace(timeline, loader_ends=ends, loader_begins=begins)
    )
    found = breakdown_of(trainer)
    assert found is not None
    assert found.wait_seconds == pytest.approx(4 * 0.02 + 3 * 0.03)
    assert found.startup_seconds == pytest.approx(3 * 0.03)


def test_worker_startup_is_the_excess_wait_for_first_batches() -> None:
    found = breakdown(Training(steps=399, epoch=40, wait=0.02, startup=0.5))
    assert len(found.passes) == 9
    assert found.startup_seconds == pytest.approx(9 * 0.5)
    assert found.wait_seconds == pytest.approx(9 * 0.5 + 399 * 0.02)


def with_evaluations(*passes: tuple[float, float, int]) -> Trainer:
    """Return a training with evaluation passes (begin, end, loader number)."""
    trainer = observed(Training(steps=100)).trainers[0]
    timeline = trainer.timeline
    for begin, end, number in sorted(passes):
        timeline = replace(
            timeline,
            loader_begins=_added(timeline.loader_begins, records((begin, number, 0.0))),
            loader_ends=_added(timeline.loader_ends, records((end, number, 0.0))),
            batches=_added(timeline.batches, records(((begin + end) / 2, number, 0.0))),
        )
    evaluating = [(ns(begin), ns(end)) for begin, end, _ in passes]
    trains = [not any(b < t <= e for b, e in evaluating) for t in timeline.steps["t"]]
    return replace(trainer, timeline=replace(timeline, steps=timeline.steps[trains]))


def _added(records: Records, more: Records) -> Records:
    both = np.concatenate([records, more])
    return both[np.argsort(both["t"], kind="stable")]


@pytest.mark.parametrize(
    ("passes", "seconds"),
    [
        ([(2.0, 3.0, EVALUATES)], 1.0),
        ([(2.0, 3.0, EVALUATES), (4.0, 4.5, EVALUATES)], 1.5),
        ([(2.0, 4.0, EVALUATES), (2.5, 3.0, 3)], 2.0),
        ([(2.0, 3.0, EVALUATES), (2.5, 3.5, 3)], 1.5),
        ([(2.0, 4.0, EVALUATES), (2.5, 3.0, 3), (3.5, 4.5, 4)], 2.5),
    ],
)
def test_overlapping_evaluation_passes_count_once(
    passes: list[tuple[float, float, int]], seconds: float
) -> None:
    found = breakdown_of(with_evaluations(*passes))
    assert found is not None
    assert found.evaluation_seconds == pytest.approx(seconds)


def test_evaluation_outside_the_window_does_not_count() -> None:
    late = breakdown_of(with_evaluations((9.5, 12.0, EVALUATES)))
    assert late is not None
    assert late.evaluation_seconds == pytest.approx(
        max(0.0, late.window.seconds - (9.5 - 0.1)), abs=0.01
    )


def test_waits_of_evaluation_do_not_count_as_data_wait() -> None:
    found = breakdown(Training(evaluates=(40, 1.0), wait=0.01))
    assert found.evaluation_seconds == pytest.approx(5.0)
    assert found.wait_seconds == pytest.approx(200 * 0.01)
    assert found.step_without_wait == pytest.approx(0.09)


def test_stack_samples_are_summed_by_kind_with_the_most_frequent_line() -> None:
    rarely = StackLocation("train.py:99", "torch.save(best, path)", part="save")
    found = breakdown(Training(stacks={FORWARD: 0.3, BACKWARD: 0.4, SAVE: 0.2, rarely: 0.1}))
    assert found.share("save") == pytest.approx(0.3)
    assert found.share("forward", "backward") == pytest.approx(0.7)
    assert found.share("sleep") == 0.0
    assert found.location("save") == CodeLocation(SAVE.where, SAVE.code)
    assert found.sampled_seconds == pytest.approx(
        sum(each.seconds for each in found.time_by_kind.values())
    )


def test_only_stack_samples_within_the_window_count() -> None:
    slow_start = [3.0, *[0.1] * 200]
    found = breakdown(Training(lengths=slow_start, stacks={LOGGING: 1.0}))
    assert found.sampled_seconds == pytest.approx(20.0, abs=0.5)


def test_batch_size_is_the_observed_one() -> None:
    assert breakdown(Training(batch=7)).batch_size == 7


def test_fewer_than_two_steps_have_no_breakdown() -> None:
    nothing = Timeline(1, None, NO_RECORDS, NO_RECORDS, NO_RECORDS, NO_RECORDS)
    assert breakdown_of(Trainer(nothing)) is None
    assert breakdown_of(observed(Training(steps=0)).trainers[0]) is None


def test_the_busiest_of_concurrent_optimizers_counts_steps() -> None:
    trainer = observed(Training(steps=100)).trainers[0]
    steps = trainer.timeline.steps.copy()
    steps["number"][::3] = 8
    found = breakdown_of(replace(trainer, timeline=replace(trainer.timeline, steps=steps)))
    assert found is not None
    assert found.steps == (steps["number"] == 9).sum() - 1


FIT = "trainer.fit(model, loader)"


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        (StackLocation("train.py:9", "loss.item()"), "sync"),
        (StackLocation("train.py:9", "total += loss.item()"), "sync"),
        (StackLocation("train.py:9", "y.cpu()"), "sync"),
        (StackLocation("train.py:9", "torch.cuda.synchronize()"), "sync"),
        (StackLocation("train.py:9", "x.to(device)"), "copy"),
        (StackLocation("train.py:9", "x = x.to(device, non_blocking=True)"), "copy"),
        (StackLocation("train.py:9", "y.cuda()"), "copy"),
        (StackLocation("train.py:9", "torch.save(model.state_dict(), path)"), "save"),
        (
            StackLocation(
                "train.py:9", "write(model)", "torch/serialization.py:_save", part="save"
            ),
            "save",
        ),
        (StackLocation("train.py:9", "json.dump(row, log)", "json/__init__.py:dump"), "logging"),
        (StackLocation("train.py:9", "emit(row)", "json/encoder.py:iterencode"), "logging"),
        (StackLocation("train.py:9", 'writer.add_scalar("loss", loss, step)'), "logging"),
        (StackLocation("train.py:9", 'wandb.log({"loss": loss})'), "logging"),
        (StackLocation("train.py:9", 'print(f"{step} {loss:.3f}")'), "logging"),
        (
            StackLocation("train.py:9", "for batch in loader", "queue.py:get", part="loader"),
            "loader",
        ),
        (StackLocation("train.py:9", "next(batches)", "queue.py:get", part="loader"), "loader"),
        (StackLocation("train.py:9", "dist.all_reduce(gradient)"), "ranks"),
        (StackLocation("train.py:9", "dist.barrier()", part="ranks"), "ranks"),
        (StackLocation("train.py:9", "loss.backward()", part="backward"), "backward"),
        (StackLocation("train.py:9", "optimizer.step()", part="optimizer"), "optimizer"),
        (StackLocation("train.py:9", "model(x)", part="forward"), "forward"),
        (StackLocation("train.py:9", "time.sleep(1)"), "sleep"),
        (StackLocation("train.py:9", "x = x * 2 + 1"), "other"),
        (
            StackLocation(
                "train.py:9", FIT, "torch/nn/functional.py:linear", "F.linear(x)", "forward"
            ),
            "forward",
        ),
        (
            StackLocation("train.py:9", FIT, "torch/autograd/graph.py:run", "run(t)", "backward"),
            "backward",
        ),
        (
            StackLocation("train.py:9", FIT, "queue.py:get", "self.not_empty.wait()", "loader"),
            "loader",
        ),
        (StackLocation("train.py:9", FIT, "lightning/result.py:log", "value.item()"), "sync"),
    ],
)
def test_kinds_of_code(location: StackLocation, kind: str) -> None:
    assert kind_of(location) == kind


@pytest.mark.parametrize(
    "code",
    [
        "F.log_softmax(x, dim=1)",
        "policy.log_prob(action)",
        "torch.log(p)",
        "x.log()",
        "nn.LogSoftmax(dim=1)(x)",
        "torch.logsumexp(x, 1)",
    ],
)
@pytest.mark.parametrize("part", ["", "forward"])
def test_logarithms_are_not_logging(code: str, part: str) -> None:
    assert kind_of(StackLocation("train.py:9", code, part=part)) != "logging"


def test_copies_inside_a_framework_are_copies() -> None:
    location = StackLocation(
        "train.py:9",
        FIT,
        "lightning/fabric/utilities/apply_func.py:batch_to",
        "data.to(device, **kwargs)",
    )
    assert kind_of(location) == "copy"
