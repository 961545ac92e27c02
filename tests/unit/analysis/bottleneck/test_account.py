"""Where the time of steps went: waits by step, evaluation once, lines by what they do."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from stepscope.analysis.bottleneck.account import Account, account_of, kind_of
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


def account(run: RunData | Training) -> Account:
    run = observed(run) if isinstance(run, Training) else run
    found = account_of(run.trainers[0])
    assert found is not None
    return found


def records(*rows: tuple[float, int, float]) -> Records:
    """Seconds, number, and seconds in `a`."""
    found = [(ns(t), events.BATCH, 0, number, round(a * 1e9), 64) for t, number, a in rows]
    return np.array(found, NO_RECORDS.dtype)


@given(st.lists(st.sampled_from((0.0, 0.01, 0.05)), min_size=30, max_size=60))
def test_a_wait_belongs_to_the_step_that_it_delays(waits: list[float]) -> None:
    """Steps take 0.1 s and as long as their own wait: without it they are all alike."""
    lengths = [0.1 + wait for wait in waits]
    found = account(Training(steps=len(waits) - 1, lengths=lengths, waits=waits))
    judged = waits[1 + found.warmup :]
    assert found.lengths == pytest.approx([0.1 + wait for wait in judged])
    assert found.own == pytest.approx([0.1] * len(judged))
    assert found.waited == pytest.approx(sum(judged))
    assert found.wait_share == pytest.approx(sum(judged) / found.seconds)
    assert found.rest == pytest.approx(0.1)


def test_the_wait_for_the_end_of_a_pass_and_for_its_beginning_count_too() -> None:
    run = observed(Training(steps=99, epoch=25, workers=0))
    timeline = run.trainers[0].timeline
    ends, begins = timeline.loader_ends.copy(), timeline.loader_begins.copy()
    ends["a"], begins["a"] = 20_000_000, 30_000_000
    trainer = replace(
        run.trainers[0], timeline=replace(timeline, loader_ends=ends, loader_begins=begins)
    )
    found = account_of(trainer)
    assert found is not None
    assert found.waited == pytest.approx(4 * 0.02 + 3 * 0.03)
    assert found.starting == pytest.approx(3 * 0.03)


def test_starting_workers_is_what_first_batches_take_beyond_the_others() -> None:
    found = account(Training(steps=399, epoch=40, wait=0.02, startup=0.5))
    assert len(found.passes) == 9
    assert found.starting == pytest.approx(9 * 0.5)
    assert found.waited == pytest.approx(9 * 0.5 + 399 * 0.02)


def with_evaluations(*passes: tuple[float, float, int]) -> Trainer:
    """A training whose thread evaluates from when to when, with which loader; steps pause."""
    trainer = observed(Training(steps=100)).trainers[0]
    timeline = trainer.timeline
    for begin, end, number in sorted(passes):
        timeline = replace(
            timeline,
            loader_begins=_added(timeline.loader_begins, records((begin, number, 0.0))),
            loader_ends=_added(timeline.loader_ends, records((end, number, 0.0))),
            batches=_added(timeline.batches, records(((begin + end) / 2, number, 0.0))),
        )
    busy = [(ns(begin), ns(end)) for begin, end, _ in passes]
    trains = [not any(b < t <= e for b, e in busy) for t in timeline.steps["t"]]
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
def test_evaluation_passes_that_overlap_count_once(
    passes: list[tuple[float, float, int]], seconds: float
) -> None:
    found = account_of(with_evaluations(*passes))
    assert found is not None
    assert found.evaluated == pytest.approx(seconds)


def test_evaluation_outside_of_the_stretch_does_not_count() -> None:
    """It warms up with an evaluation: what is judged begins behind it."""
    late = account_of(with_evaluations((9.5, 12.0, EVALUATES)))
    assert late is not None
    assert late.evaluated == pytest.approx(max(0.0, late.stretch.seconds - (9.5 - 0.1)), abs=0.01)


def test_waits_of_evaluation_are_no_waits_of_training() -> None:
    found = account(Training(evaluates=(40, 1.0), wait=0.01))
    assert found.evaluated == pytest.approx(5.0)
    assert found.waited == pytest.approx(200 * 0.01)
    assert found.rest == pytest.approx(0.09)


def test_looks_are_added_up_by_kind_with_the_line_that_took_most() -> None:
    rarely = StackLocation("train.py:99", "torch.save(best, path)", part="save")
    found = account(Training(looks={FORWARD: 0.3, BACKWARD: 0.4, SAVE: 0.2, rarely: 0.1}))
    assert found.share("save") == pytest.approx(0.3)
    assert found.share("forward", "backward") == pytest.approx(0.7)
    assert found.share("sleep") == 0.0
    spent = found.spent["save"]
    assert spent.location == CodeLocation(SAVE.where, SAVE.code)
    assert found.sampled == pytest.approx(sum(each.seconds for each in found.spent.values()))


def test_only_looks_of_the_stretch_count() -> None:
    slow_start = [3.0, *[0.1] * 200]
    found = account(Training(lengths=slow_start, looks={LOGGING: 1.0}))
    assert found.sampled == pytest.approx(20.0, abs=0.5)


def test_the_batch_is_as_it_came_not_as_it_was_asked_for() -> None:
    assert account(Training(batch=7)).batch_size == 7


def test_without_two_steps_there_is_no_account() -> None:
    nothing = Timeline(1, None, NO_RECORDS, NO_RECORDS, NO_RECORDS, NO_RECORDS)
    assert account_of(Trainer(nothing)) is None
    assert account_of(observed(Training(steps=0)).trainers[0]) is None


def test_of_two_optimizers_the_busier_one_counts_steps() -> None:
    trainer = observed(Training(steps=100)).trainers[0]
    steps = trainer.timeline.steps.copy()
    steps["number"][::3] = 8
    found = account_of(replace(trainer, timeline=replace(trainer.timeline, steps=steps)))
    assert found is not None
    assert found.steps == (steps["number"] == 9).sum() - 1


FIT = "trainer.fit(model, loader)"


@pytest.mark.parametrize(
    ("place", "kind"),
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
def test_a_line_is_of_the_kind_that_a_reader_would_call_it(place: StackLocation, kind: str) -> None:
    assert kind_of(place) == kind


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
def test_a_logarithm_is_no_logging(code: str, part: str) -> None:
    assert kind_of(StackLocation("train.py:9", code, part=part)) != "logging"


def test_a_copy_that_a_framework_makes_is_a_copy() -> None:
    place = StackLocation(
        "train.py:9",
        FIT,
        "lightning/fabric/utilities/apply_func.py:batch_to",
        "data.to(device, **kwargs)",
    )
    assert kind_of(place) == "copy"
