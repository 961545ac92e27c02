"""Which answers count, which are asked for again, and when it is given up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.study.records import THROUGHPUT
from stepscope.records import Outcome
from stepscope.records.trial import InterferenceReason
from stepscope.studies.results import RESULTS, RETRIES, Attempt, Result, Results

KEY = "0123456789ab"
NOISE = (InterferenceReason("cpu", 1.5, 2.0),)
NEVER_COUNT = (Outcome.LOST, Outcome.INTERRUPTED)


def result(attempt: int = 1, block: int = 1, **others: Any) -> Result:
    told = {"outcome": Outcome.OK, "values": {"samples_per_second": 100.0}, **others}
    role, repeat = told.pop("role", "trial"), told.pop("repeat", 1)
    return Result(KEY, {"model": "cnn"}, role, repeat, attempt, block, **told)


def failed(attempt: int) -> Result:
    return result(attempt, outcome=Outcome.CRASHED, infrastructure=True, values={})


def known(*results: Result, reruns: int = 1) -> Results:
    it = Results(reruns)
    for each in results:
        it.add(each)
    return it


def test_nothing_is_no_answer() -> None:
    assert known().answer(KEY, 1) is None
    assert known(result(repeat=2)).answer(KEY, 1) is None
    assert known(result(role="sentinel")).answer(KEY, 1) is None


@pytest.mark.parametrize("outcome", sorted(RESULTS))
def test_what_answers_in_a_calm_block_counts(outcome: Outcome) -> None:
    only = result(outcome=outcome)
    assert known(only).answer(KEY, 1) == only


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.TIMEOUT])
@pytest.mark.parametrize("reruns", [0, 1, 2])
def test_a_disturbed_one_is_asked_for_again_until_reruns_are_used_up(
    outcome: Outcome, reruns: int
) -> None:
    it = known(reruns=reruns)
    for attempt in range(1, reruns + 1):
        it.add(result(attempt, attempt, outcome=outcome, noise=NOISE))
        assert it.answer(KEY, 1) is None
        assert len(it.tries(KEY, 1)) == attempt
        shown = it.best_known(KEY, 1)
        assert shown is not None and shown.attempt == attempt
    last = result(reruns + 1, reruns + 1, outcome=outcome, noise=NOISE)
    it.add(last)
    assert it.answer(KEY, 1) == last


def test_a_calm_answer_counts_whatever_came_before_or_after() -> None:
    calm, disturbed = result(1, 1), result(2, 2, noise=NOISE)
    assert known(calm, disturbed).answer(KEY, 1) == calm
    assert known(disturbed, calm).answer(KEY, 1) == calm


@pytest.mark.parametrize("outcome", [Outcome.GPU_OOM, Outcome.HOST_OOM, Outcome.SHM_FULL])
def test_memory_that_ran_out_beside_a_neighbour_is_asked_for_again(outcome: Outcome) -> None:
    """It may have been the neighbour's."""
    out = result(outcome=outcome, noise=NOISE, values={})
    it = known(out)
    assert it.judged[1].flagged and it.answer(KEY, 1) is None
    alone = result(2, 2, outcome=outcome, values={})
    it.add(alone)
    assert it.answer(KEY, 1) == alone


def test_what_crashed_is_asked_for_again_once_the_code_was_mended() -> None:
    it = known(result(1, outcome=Outcome.CRASHED, values={}))
    it.retry_failed()
    assert it.answer(KEY, 1) is not None
    it.retry_failed(crashed=True)
    assert it.answer(KEY, 1) is None
    it.add(result(2))
    assert it.answer(KEY, 1) == it.results[-1]


def test_a_neighbour_of_one_trial_is_one_of_the_whole_block() -> None:
    mine, other = result(block=1), result(block=1, repeat=2, noise=NOISE)
    it = known(mine, other)
    assert it.is_disturbed(mine) and it.answer(KEY, 1) is None
    assert known(mine, result(block=2, repeat=2, noise=NOISE)).answer(KEY, 1) == mine


def test_a_sentinel_out_of_line_flags_its_block() -> None:
    rates = [100.0, 101.0, 99.0, 40.0, 100.5]
    it = known()
    for number, rate in enumerate(rates, 1):
        values = {"samples_per_second": rate}
        it.add(result(block=number, role="sentinel", repeat=number, values=values))
        it.add(result(block=number, repeat=number))
    assert [number for number in range(1, 6) if it.judged[number].flagged] == [4]
    assert [repeat for repeat in range(1, 6) if it.answer(KEY, repeat) is None] == [4]
    assert it.references == 5 and it.last_block == 5


def test_three_failures_around_a_trial_and_it_is_given_up() -> None:
    it = known()
    for attempt in range(1, RETRIES + 1):
        it.add(failed(attempt))
        assert it.answer(KEY, 1) is None and len(it.tries(KEY, 1)) == attempt
    it.add(failed(RETRIES + 1))
    assert it.answer(KEY, 1) == failed(RETRIES + 1)


def test_an_answer_beats_any_number_of_failures() -> None:
    answered = result(5)
    assert known(*map(failed, range(1, 5)), answered).answer(KEY, 1) == answered


def test_a_rerun_that_fails_for_ever_leaves_the_disturbed_answer() -> None:
    disturbed = result(1, noise=NOISE)
    it = known(disturbed, *(failed(attempt) for attempt in range(2, RETRIES + 2)))
    assert it.answer(KEY, 1) is None
    it.add(failed(RETRIES + 2))
    assert it.answer(KEY, 1) == disturbed


@pytest.mark.parametrize("outcome", NEVER_COUNT)
def test_who_died_or_was_interrupted_never_counts(outcome: Outcome) -> None:
    it = known(*(result(attempt, outcome=outcome, values={}) for attempt in range(1, 20)))
    assert it.answer(KEY, 1) is None and it.best_known(KEY, 1) is None
    assert [each.outcome for each in it.tries(KEY, 1)] == [outcome] * 19


def test_the_number_of_an_attempt_is_never_used_twice() -> None:
    it = known()
    assert it.next_attempt(KEY, "trial", 1) == 1
    it.begun(Attempt(KEY, "trial", 1, 3))
    it.add(result(1))
    assert it.next_attempt(KEY, "trial", 1) == 4
    assert it.next_attempt(KEY, "trial", 2) == it.next_attempt(KEY, "sentinel", 1) == 1


_RESULTS = st.lists(
    st.builds(
        result,
        attempt=st.integers(1, 9),
        block=st.integers(0, 4),
        outcome=st.sampled_from([o for o in Outcome if o is not Outcome.RUNNING]),
        infrastructure=st.booleans(),
        noise=st.sampled_from([(), NOISE]),
    )
)


@given(_RESULTS, st.integers(0, 3))
def test_what_an_answer_is(results: list[Result], reruns: int) -> None:
    it = known(*results, reruns=reruns)
    answer = it.answer(KEY, 1)
    answers = [each for each in results if each.is_result]
    if answer is None:
        assert len(answers) <= reruns and sum(e.infrastructure for e in results) <= RETRIES
    else:
        assert answer in results
        assert answer.outcome not in NEVER_COUNT or answer.infrastructure
        assert it.best_known(KEY, 1) == answer
    if any(not it.is_disturbed(each) for each in answers):
        assert answer is not None and not it.is_disturbed(answer) and answer.is_result


def test_of_two_disturbed_answers_the_one_that_was_calm_itself_counts() -> None:
    """Its block was disturbed, but not it."""
    calmer, noisier = result(1, 1), result(2, 2, noise=NOISE)
    neighbour = result(1, 1, repeat=2, noise=NOISE)
    it = known(calmer, neighbour, noisier)
    assert it.judged[1].flagged and it.judged[2].flagged
    assert it.answer(KEY, 1) == calmer


def test_blocks_with_another_sentinel_are_not_compared() -> None:
    """A design that was edited may have another one, with a rate of its own."""
    slow = [
        replace(result(block=b, role="sentinel", repeat=b), key="aa", values={THROUGHPUT: 100.0})
        for b in range(1, 5)
    ]
    fast = [
        replace(result(block=b, role="sentinel", repeat=b), key="bb", values={THROUGHPUT: 900.0})
        for b in range(5, 9)
    ]
    assert not any(judged.flagged for judged in known(*slow, *fast).judged.values())
    off = replace(fast[0], repeat=9, block=9, values={THROUGHPUT: 100.0})
    judged = known(*slow, *fast, off).judged
    assert [number for number, each in judged.items() if each.flagged] == [9]


def test_run_again_what_failed_before_has_a_new_chance() -> None:
    it = known(*map(failed, range(1, RETRIES + 2)))
    assert it.answer(KEY, 1) is not None
    it.retry_failed()
    assert it.answer(KEY, 1) is None
    for attempt in range(RETRIES + 2, 2 * RETRIES + 3):
        assert it.answer(KEY, 1) is None
        it.add(failed(attempt))
    assert it.answer(KEY, 1) is not None


def test_drift_is_judged_on_each_machine() -> None:
    """Machine b trains at a third of the speed of a; one block of a was slow."""
    it = known()
    for number in range(1, 13):
        machine = "ab"[number % 2]
        rate = {"a": 900.0, "b": 300.0}[machine] * (0.5 if number == 6 else 1.0)
        reference = result(block=number, role="sentinel", repeat=number, values={THROUGHPUT: rate})
        it.add(replace(reference, machine=machine))
    assert [number for number, judged in it.judged.items() if judged.flagged] == [6]
    assert it.judged[6].relative == pytest.approx(0.5)
