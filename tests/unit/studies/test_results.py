"""Which results count, and which trials are retried."""

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
INTERFERENCE = (InterferenceReason("cpu", 1.5, 2.0),)
NEVER_COUNT = (Outcome.LOST, Outcome.INTERRUPTED)


def result(attempt: int = 1, block: int = 1, **others: Any) -> Result:
    fields = {"outcome": Outcome.OK, "values": {"samples_per_second": 100.0}, **others}
    role, repeat = fields.pop("role", "trial"), fields.pop("repeat", 1)
    return Result(KEY, {"model": "cnn"}, role, repeat, attempt, block, **fields)


def failed(attempt: int) -> Result:
    return result(attempt, outcome=Outcome.CRASHED, infrastructure=True, values={})


def results_of(*added: Result, reruns: int = 1) -> Results:
    results = Results(reruns)
    for each in added:
        results.add(each)
    return results


def test_without_results_there_is_no_answer() -> None:
    assert results_of().answer(KEY, 1) is None
    assert results_of(result(repeat=2)).answer(KEY, 1) is None
    assert results_of(result(role="reference")).answer(KEY, 1) is None


@pytest.mark.parametrize("outcome", sorted(RESULTS))
def test_results_of_a_clean_block_count(outcome: Outcome) -> None:
    only = result(outcome=outcome)
    assert results_of(only).answer(KEY, 1) == only


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.TIMEOUT])
@pytest.mark.parametrize("reruns", [0, 1, 2])
def test_a_trial_with_interference_is_rerun_until_the_reruns_are_used_up(
    outcome: Outcome, reruns: int
) -> None:
    results = results_of(reruns=reruns)
    for attempt in range(1, reruns + 1):
        results.add(result(attempt, attempt, outcome=outcome, interference=INTERFERENCE))
        assert results.answer(KEY, 1) is None
        assert len(results.attempts(KEY, 1)) == attempt
        shown = results.best_known(KEY, 1)
        assert shown is not None and shown.attempt == attempt
    last = result(reruns + 1, reruns + 1, outcome=outcome, interference=INTERFERENCE)
    results.add(last)
    assert results.answer(KEY, 1) == last


def test_a_clean_result_counts_in_any_order() -> None:
    clean, with_interference = result(1, 1), result(2, 2, interference=INTERFERENCE)
    assert results_of(clean, with_interference).answer(KEY, 1) == clean
    assert results_of(with_interference, clean).answer(KEY, 1) == clean


@pytest.mark.parametrize("outcome", [Outcome.GPU_OOM, Outcome.HOST_OOM, Outcome.SHM_FULL])
def test_an_oom_with_interference_is_rerun(outcome: Outcome) -> None:
    """Other processes may have used the memory."""
    oom = result(outcome=outcome, interference=INTERFERENCE, values={})
    results = results_of(oom)
    assert results.judged[1].flagged and results.answer(KEY, 1) is None
    alone = result(2, 2, outcome=outcome, values={})
    results.add(alone)
    assert results.answer(KEY, 1) == alone


def test_crashed_trials_are_retried_on_request() -> None:
    results = results_of(result(1, outcome=Outcome.CRASHED, values={}))
    results.retry_failed()
    assert results.answer(KEY, 1) is not None
    results.retry_failed(crashed=True)
    assert results.answer(KEY, 1) is None
    results.add(result(2))
    assert results.answer(KEY, 1) == results.results[-1]


def test_interference_with_one_trial_flags_its_block() -> None:
    clean, other = result(block=1), result(block=1, repeat=2, interference=INTERFERENCE)
    results = results_of(clean, other)
    assert results.has_interference(clean) and results.answer(KEY, 1) is None
    elsewhere = result(block=2, repeat=2, interference=INTERFERENCE)
    assert results_of(clean, elsewhere).answer(KEY, 1) == clean


def test_an_outlying_reference_trial_flags_its_block() -> None:
    rates = [100.0, 101.0, 99.0, 40.0, 100.5]
    results = results_of()
    for number, rate in enumerate(rates, 1):
        values = {"samples_per_second": rate}
        results.add(result(block=number, role="reference", repeat=number, values=values))
        results.add(result(block=number, repeat=number))
    assert [number for number in range(1, 6) if results.judged[number].flagged] == [4]
    assert [repeat for repeat in range(1, 6) if results.answer(KEY, repeat) is None] == [4]
    assert results.references == 5 and results.last_block == 5


def test_three_failures_of_the_infrastructure_are_final() -> None:
    results = results_of()
    for attempt in range(1, RETRIES + 1):
        results.add(failed(attempt))
        assert results.answer(KEY, 1) is None and len(results.attempts(KEY, 1)) == attempt
    results.add(failed(RETRIES + 1))
    assert results.answer(KEY, 1) == failed(RETRIES + 1)


def test_a_result_replaces_any_number_of_failures() -> None:
    answered = result(5)
    assert results_of(*map(failed, range(1, 5)), answered).answer(KEY, 1) == answered


def test_the_result_with_interference_counts_if_its_rerun_keeps_failing() -> None:
    with_interference = result(1, interference=INTERFERENCE)
    results = results_of(with_interference, *(failed(attempt) for attempt in range(2, RETRIES + 2)))
    assert results.answer(KEY, 1) is None
    results.add(failed(RETRIES + 2))
    assert results.answer(KEY, 1) == with_interference


@pytest.mark.parametrize("outcome", NEVER_COUNT)
def test_lost_and_interrupted_trials_never_count(outcome: Outcome) -> None:
    results = results_of(*(result(attempt, outcome=outcome, values={}) for attempt in range(1, 20)))
    assert results.answer(KEY, 1) is None and results.best_known(KEY, 1) is None
    assert [each.outcome for each in results.attempts(KEY, 1)] == [outcome] * 19


def test_attempt_numbers_are_never_reused() -> None:
    results = results_of()
    assert results.next_attempt(KEY, "trial", 1) == 1
    results.add_attempt(Attempt(KEY, "trial", 1, 3))
    results.add(result(1))
    assert results.next_attempt(KEY, "trial", 1) == 4
    assert results.next_attempt(KEY, "trial", 2) == results.next_attempt(KEY, "reference", 1) == 1


_RESULTS = st.lists(
    st.builds(
        result,
        attempt=st.integers(1, 9),
        block=st.integers(0, 4),
        outcome=st.sampled_from([o for o in Outcome if o is not Outcome.RUNNING]),
        infrastructure=st.booleans(),
        interference=st.sampled_from([(), INTERFERENCE]),
    )
)


@given(_RESULTS, st.integers(0, 3))
def test_properties_of_answers(added: list[Result], reruns: int) -> None:
    results = results_of(*added, reruns=reruns)
    answer = results.answer(KEY, 1)
    answers = [each for each in added if each.is_result]
    if answer is None:
        assert len(answers) <= reruns and sum(e.infrastructure for e in added) <= RETRIES
    else:
        assert answer in added
        assert answer.outcome not in NEVER_COUNT or answer.infrastructure
        assert results.best_known(KEY, 1) == answer
    if any(not results.has_interference(each) for each in answers):
        assert answer is not None and not results.has_interference(answer) and answer.is_result


def test_of_two_flagged_results_the_one_without_interference_counts() -> None:
    """Its block has interference, but the trial itself has none."""
    clean, with_interference = result(1, 1), result(2, 2, interference=INTERFERENCE)
    other = result(1, 1, repeat=2, interference=INTERFERENCE)
    results = results_of(clean, other, with_interference)
    assert results.judged[1].flagged and results.judged[2].flagged
    assert results.answer(KEY, 1) == clean


def test_blocks_with_different_reference_trials_are_not_compared() -> None:
    """An edited design may have another reference trial with another throughput."""
    slow = [
        replace(result(block=b, role="reference", repeat=b), key="aa", values={THROUGHPUT: 100.0})
        for b in range(1, 5)
    ]
    fast = [
        replace(result(block=b, role="reference", repeat=b), key="bb", values={THROUGHPUT: 900.0})
        for b in range(5, 9)
    ]
    assert not any(judged.flagged for judged in results_of(*slow, *fast).judged.values())
    off = replace(fast[0], repeat=9, block=9, values={THROUGHPUT: 100.0})
    judged = results_of(*slow, *fast, off).judged
    assert [number for number, each in judged.items() if each.flagged] == [9]


def test_a_new_run_retries_failures_of_the_infrastructure() -> None:
    results = results_of(*map(failed, range(1, RETRIES + 2)))
    assert results.answer(KEY, 1) is not None
    results.retry_failed()
    assert results.answer(KEY, 1) is None
    for attempt in range(RETRIES + 2, 2 * RETRIES + 3):
        assert results.answer(KEY, 1) is None
        results.add(failed(attempt))
    assert results.answer(KEY, 1) is not None


def test_drift_is_judged_on_each_machine() -> None:
    """Machine b is three times slower than a; one block of a is slow."""
    results = results_of()
    for number in range(1, 13):
        machine = "ab"[number % 2]
        rate = {"a": 900.0, "b": 300.0}[machine] * (0.5 if number == 6 else 1.0)
        reference = result(block=number, role="reference", repeat=number, values={THROUGHPUT: rate})
        results.add(replace(reference, machine=machine))
    assert [number for number, judged in results.judged.items() if judged.flagged] == [6]
    assert results.judged[6].relative == pytest.approx(0.5)
