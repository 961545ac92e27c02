"""Who disturbed a trial, from readings that were planted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.analysis.interference import disturbances
from stepscope.analysis.series import Series
from stepscope.analysis.steady import Steady
from stepscope.analysis.summary import Recorded
from stepscope.analysis.trial import DeviceMemory, Measurement, Overhead
from stepscope.records import Gpu

S = 1_000_000_000
BEGIN, END = 10 * S, 20 * S
"""The steady steps; the recording goes from 0 to 30 s."""
OURS = {"gpu_memory_tree": 4e9}


def measured(**others: Any) -> Measurement:
    """A trial alone on two CPUs, but for what a test says."""
    nothing = dict.fromkeys(
        ("rate", "interval", "spread", "samples", "step", "wait", "copy", "compute", "joules",
         "data_wait_share", "epoch_seconds", "imbalance", "host_memory_peak", "samples_per_joule")
    )  # fmt: skip
    told = {
        **nothing,
        "why_no_rate": "",
        "steady": Steady(0, True),
        "steps": 0,
        "steady_steps": 0,
        "epoch_measured": False,
        "overhead": Overhead(),
        "device_memory": DeviceMemory(),
        "host_cpus": 2.0,
        "host_cores": 1.0,
        "others_cores": 0.0,
        "begin_ns": BEGIN,
        "end_ns": END,
        **others,
    }
    return Measurement(**told)


def recorded(*gpus: dict[str, Any], steal: Any = None) -> Recorded:
    """Ten readings a second; a value may be a function of the second."""
    table: dict[tuple[str, str], Series] = {}
    if steal is not None:
        table["host_steal", "host"] = series(steal)
    for number, told in enumerate(gpus):
        for metric, value in told.items():
            table[metric, f"GPU-{number}"] = series(value)
    every = tuple(Gpu(f"GPU-{number}", f"GPU {number}") for number in range(len(gpus)))
    return Recorded(table, [], 0, 30 * S, 2.0, every)


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
    assert disturbances(measured(), recorded()) == ()
    assert disturbances(measured(), recorded(OURS, steal=0.0)) == ()
    everything = recorded({**OURS, "gpu_others": 1.0, "gpu_slowed_heat": 1.0}, steal=2.0)
    for none in ({"begin_ns": None}, {"end_ns": None}, {"end_ns": BEGIN}):
        assert disturbances(measured(**none), everything) == ()


def test_others_on_the_cpus() -> None:
    said = disturbances(measured(host_cores=2.0, others_cores=1.23), recorded())
    assert said == ("others used 1.2 of 2 cores",)


def test_the_hypervisor() -> None:
    said = disturbances(measured(), recorded(steal=meanwhile(0.5)))
    assert said == ("the hypervisor gave 0.5 cores to others",)
    assert disturbances(measured(), recorded(steal=meanwhile(0.08))) == ()
    assert disturbances(measured(host_cpus=64.0), recorded(steal=meanwhile(0.5))) == ()


def test_others_on_the_gpu() -> None:
    said = disturbances(measured(), recorded({**OURS, "gpu_others": meanwhile(0.4)}))
    assert said == ("other processes used its GPU 40% of the time",)
    assert disturbances(measured(), recorded({**OURS, "gpu_others": meanwhile(0.05)})) == ()


def test_heat() -> None:
    said = disturbances(measured(), recorded({**OURS, "gpu_slowed_heat": meanwhile(0.5)}))
    assert said == ("heat held its GPU's clocks down 50% of the time",)


def test_of_several_gpus_the_worst_counts_and_those_it_does_not_use_do_not() -> None:
    calm, busy = {**OURS, "gpu_others": 0.0}, {**OURS, "gpu_others": meanwhile(0.6)}
    said = disturbances(measured(), recorded(calm, busy))
    assert said == ("other processes used its GPU 60% of the time",)
    not_ours = {"gpu_memory_tree": 0.0, "gpu_others": 1.0}
    assert disturbances(measured(), recorded(calm, not_ours)) == ()


def test_what_was_before_or_after_the_steady_steps_does_not_count() -> None:
    gpu = {**OURS, "gpu_others": before_and_after(1.0), "gpu_slowed_heat": before_and_after(1.0)}
    assert disturbances(measured(), recorded(gpu, steal=before_and_after(2.0))) == ()


@given(st.floats(0, 2), st.floats(0, 1), st.floats(0, 1))
def test_each_reason_comes_by_itself(steal: float, others: float, heat: float) -> None:
    gpu = {"gpu_others": others, "gpu_slowed_heat": heat}
    said = disturbances(measured(), recorded({**OURS, **gpu}, steal=steal))
    alone = [
        *disturbances(measured(), recorded(OURS, steal=steal)),
        *disturbances(measured(), recorded({**OURS, "gpu_others": others})),
        *disturbances(measured(), recorded({**OURS, "gpu_slowed_heat": heat})),
    ]
    assert list(said) == alone


@pytest.mark.parametrize("field", ["others_cores", "host_cores", "host_cpus"])
def test_a_machine_that_does_not_tell_its_cpus(field: str) -> None:
    it = measured(**{"others_cores": 2.0, "host_cores": 2.0, field: None})
    assert disturbances(it, recorded()) == ()
