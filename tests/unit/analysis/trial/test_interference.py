"""Who disturbed a trial, from readings that were planted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.series import Series
from stepscope.analysis.trial.interference import interference
from stepscope.records import Gpu
from stepscope.records.facts import CpuFacts, Environment, RunFacts
from stepscope.records.trial import InterferenceReason

S = 1_000_000_000
BEGIN, END = 10 * S, 20 * S
"""The steady steps; the recording goes from 0 to 30 s."""
OURS = {"gpu_memory_tree": 4e9}


def recorded(
    *gpus: dict[str, Any],
    steal: Any = None,
    busy: Any = 1.0,
    own: Any = 1.0,
    cpus: int | None = 2,
) -> RunData:
    """A run alone on two CPUs, but for what a test says. Ten readings a second; a value may be a
    function of the second."""
    table: dict[tuple[str, str], Series] = {}
    for metric, entity, value in (
        ("host_steal", "host", steal),
        ("host_cpu", "host", busy),
        ("cpu", "tree", own),
    ):
        if value is not None:
            table[metric, entity] = series(value)
    for number, told in enumerate(gpus):
        for metric, value in told.items():
            table[metric, f"GPU-{number}"] = series(value)
    every = tuple(Gpu(f"GPU-{number}", f"GPU {number}") for number in range(len(gpus)))
    facts = RunFacts(environment=Environment(cpu=CpuFacts(logical=cpus)))
    return RunData(table, [], 0, 30 * S, facts, every)


def reasons(
    data: RunData, begin: int | None = BEGIN, end: int | None = END
) -> tuple[InterferenceReason, ...]:
    return interference(data, begin, end).reasons()


def series(value: Any) -> Series:
    seconds = np.arange(1, 301) / 10
    values = [value(second) if callable(value) else value for second in seconds]
    times = np.round(seconds * S).astype(np.int64)
    return Series(times, np.full(300, 0.1), np.array(values, float))


def meanwhile(value: float) -> Any:
    return lambda second: value if BEGIN <= second * S <= END else 0.0


def before_and_after(value: float) -> Any:
    return lambda second: 0.0 if BEGIN <= second * S <= END else value


def test_nothing_where_it_was_alone_or_nobody_can_tell() -> None:
    assert reasons(recorded()) == ()
    assert reasons(recorded(OURS, steal=0.0)) == ()
    everything = recorded({**OURS, "gpu_others": 1.0, "gpu_slowed_heat": 1.0}, steal=2.0)
    for window in ((None, END), (BEGIN, None), (BEGIN, BEGIN)):
        assert reasons(everything, *window) == ()


def test_others_on_the_cpus() -> None:
    (seen,) = reasons(recorded(busy=2.0, own=0.77))
    assert seen == InterferenceReason("cpu", pytest.approx(1.23), 2)


def test_the_hypervisor() -> None:
    (seen,) = reasons(recorded(steal=meanwhile(0.5)))
    assert seen == InterferenceReason("hypervisor", pytest.approx(0.5), 2)
    assert reasons(recorded(steal=meanwhile(0.08))) == ()
    assert reasons(recorded(steal=meanwhile(0.5), cpus=64)) == ()


def test_others_on_the_gpu() -> None:
    (seen,) = reasons(recorded({**OURS, "gpu_others": meanwhile(0.4)}))
    assert seen == InterferenceReason("gpu", pytest.approx(0.4))
    assert reasons(recorded({**OURS, "gpu_others": meanwhile(0.05)})) == ()


def test_heat() -> None:
    (seen,) = reasons(recorded({**OURS, "gpu_slowed_heat": meanwhile(0.5)}))
    assert seen == InterferenceReason("heat", pytest.approx(0.5))


def test_of_several_gpus_the_worst_counts_and_those_it_does_not_use_do_not() -> None:
    calm, busy = {**OURS, "gpu_others": 0.0}, {**OURS, "gpu_others": meanwhile(0.6)}
    (seen,) = reasons(recorded(calm, busy))
    assert seen == InterferenceReason("gpu", pytest.approx(0.6))
    not_ours = {"gpu_memory_tree": 0.0, "gpu_others": 1.0}
    assert reasons(recorded(calm, not_ours)) == ()


def test_what_was_before_or_after_the_steady_steps_does_not_count() -> None:
    gpu = {**OURS, "gpu_others": before_and_after(1.0), "gpu_slowed_heat": before_and_after(1.0)}
    assert reasons(recorded(gpu, steal=before_and_after(2.0))) == ()


@given(st.floats(0, 2), st.floats(0, 1), st.floats(0, 1))
def test_each_reason_comes_by_itself(steal: float, others: float, heat: float) -> None:
    gpu = {"gpu_others": others, "gpu_slowed_heat": heat}
    said = reasons(recorded({**OURS, **gpu}, steal=steal))
    alone = [
        *reasons(recorded(OURS, steal=steal)),
        *reasons(recorded({**OURS, "gpu_others": others})),
        *reasons(recorded({**OURS, "gpu_slowed_heat": heat})),
    ]
    assert list(said) == alone


def test_few_cores_of_others_or_an_idle_machine_take_nothing_away() -> None:
    assert reasons(recorded(busy=2.0, own=1.8)) == ()
    assert reasons(recorded(busy=2.0, own=1.0, cpus=4)) == ()


@pytest.mark.parametrize("unknown", ["busy", "own", "cpus"])
def test_a_machine_that_does_not_tell_its_cpus(unknown: str) -> None:
    known: dict[str, Any] = {"busy": 2.0, "own": 0.0, unknown: None}
    assert reasons(recorded(**known)) == ()
