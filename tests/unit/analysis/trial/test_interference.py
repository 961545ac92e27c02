"""Interference with a trial, from planted readings."""

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
"""Time span of the steady steps; the recording covers 0 to 30 s."""
USED = {"gpu_memory_run": 4e9}


def recorded(
    *gpus: dict[str, Any],
    steal: Any = None,
    busy: Any = 1.0,
    own: Any = 1.0,
    cpus: int | None = 2,
) -> RunData:
    """Return a run on two CPUs without interference, unless given. Ten readings per second; a value
    may be a function of the second."""
    table: dict[tuple[str, str], Series] = {}
    for metric, entity, value in (
        ("host_steal", "host", steal),
        ("host_cpu", "host", busy),
        ("cpu", "tree", own),
    ):
        if value is not None:
            table[metric, entity] = series(value)
    for number, metrics in enumerate(gpus):
        for metric, value in metrics.items():
            table[metric, f"GPU-{number}"] = series(value)
    devices = tuple(Gpu(f"GPU-{number}", f"GPU {number}") for number in range(len(gpus)))
    facts = RunFacts(environment=Environment(cpu=CpuFacts(logical=cpus)))
    return RunData(table, [], 0, 30 * S, facts, devices)


def reasons(
    data: RunData, begin: int | None = BEGIN, end: int | None = END
) -> tuple[InterferenceReason, ...]:
    return interference(data, begin, end).reasons()


def series(value: Any) -> Series:
    seconds = np.arange(1, 301) / 10
    values = [value(second) if callable(value) else value for second in seconds]
    times = np.round(seconds * S).astype(np.int64)
    return Series(times, np.full(300, 0.1), np.array(values, float))


def during(value: float) -> Any:
    return lambda second: value if BEGIN <= second * S <= END else 0.0


def outside(value: float) -> Any:
    return lambda second: 0.0 if BEGIN <= second * S <= END else value


def test_no_interference_if_there_is_none_or_if_unknown() -> None:
    assert reasons(recorded()) == ()
    assert reasons(recorded(USED, steal=0.0)) == ()
    everything = recorded(
        {**USED, "gpu_other_processes": 1.0, "gpu_throttled_thermal": 1.0}, steal=2.0
    )
    for window in ((None, END), (BEGIN, None), (BEGIN, BEGIN)):
        assert reasons(everything, *window) == ()


def test_other_processes_on_the_cpus() -> None:
    (reason,) = reasons(recorded(busy=2.0, own=0.77))
    assert reason == InterferenceReason("cpu", pytest.approx(1.23), 2)


def test_hypervisor() -> None:
    (reason,) = reasons(recorded(steal=during(0.5)))
    assert reason == InterferenceReason("hypervisor", pytest.approx(0.5), 2)
    assert reasons(recorded(steal=during(0.08))) == ()
    assert reasons(recorded(steal=during(0.5), cpus=64)) == ()


def test_other_processes_on_the_gpu() -> None:
    (reason,) = reasons(recorded({**USED, "gpu_other_processes": during(0.4)}))
    assert reason == InterferenceReason("gpu", pytest.approx(0.4))
    assert reasons(recorded({**USED, "gpu_other_processes": during(0.05)})) == ()


def test_thermal_throttling() -> None:
    (reason,) = reasons(recorded({**USED, "gpu_throttled_thermal": during(0.5)}))
    assert reason == InterferenceReason("heat", pytest.approx(0.5))


def test_only_the_worst_used_gpu_counts() -> None:
    calm, busy = (
        {**USED, "gpu_other_processes": 0.0},
        {**USED, "gpu_other_processes": during(0.6)},
    )
    (reason,) = reasons(recorded(calm, busy))
    assert reason == InterferenceReason("gpu", pytest.approx(0.6))
    unused = {"gpu_memory_run": 0.0, "gpu_other_processes": 1.0}
    assert reasons(recorded(calm, unused)) == ()


def test_only_the_steady_steps_count() -> None:
    gpu = {
        **USED,
        "gpu_other_processes": outside(1.0),
        "gpu_throttled_thermal": outside(1.0),
    }
    assert reasons(recorded(gpu, steal=outside(2.0))) == ()


@given(st.floats(0, 2), st.floats(0, 1), st.floats(0, 1))
def test_reasons_are_independent(steal: float, other: float, thermal: float) -> None:
    gpu = {"gpu_other_processes": other, "gpu_throttled_thermal": thermal}
    combined = reasons(recorded({**USED, **gpu}, steal=steal))
    separate = [
        *reasons(recorded(USED, steal=steal)),
        *reasons(recorded({**USED, "gpu_other_processes": other})),
        *reasons(recorded({**USED, "gpu_throttled_thermal": thermal})),
    ]
    assert list(combined) == separate


def test_few_used_cores_or_an_idle_machine_are_no_interference() -> None:
    assert reasons(recorded(busy=2.0, own=1.8)) == ()
    assert reasons(recorded(busy=2.0, own=1.0, cpus=4)) == ()


@pytest.mark.parametrize("unknown", ["busy", "own", "cpus"])
def test_unknown_cpus(unknown: str) -> None:
    known: dict[str, Any] = {"busy": 2.0, "own": 0.0, unknown: None}
    assert reasons(recorded(**known)) == ()
