"""Which GPUs are of a run, what they did, and how much energy they took."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.gpus import RecordedGpu, figures, gpus_of_run, use_of
from stepscope.analysis.run.series import Series
from stepscope.analysis.run.summary import summarise
from stepscope.records import Gpu

S = 1_000_000_000


def gauge(times: list[float], values: list[float]) -> Series:
    t = np.array([round(time * S) for time in times], np.int64)
    return Series(t, np.diff(t, prepend=t[:1]) / S, np.array(values, float))


def rate(edges: list[float], values: list[float]) -> Series:
    """Rates between consecutive edges."""
    t = np.array([round(edge * S) for edge in edges], np.int64)
    return Series(t[1:], np.diff(t) / S, np.array(values, float))


def flat(value: float, seconds: float = 10, hertz: float = 5) -> Series:
    times = np.arange(0, seconds + 0.5 / hertz, 1 / hertz).tolist()
    return gauge(times, [value] * len(times))


def gpu(number: int = 0, **series: Series) -> RecordedGpu:
    return RecordedGpu(Gpu(f"GPU-{number}", f"GPU {number}"), series)


def labels(gpus: tuple[RecordedGpu, ...]) -> list[str]:
    return [each.gpu.label for each in gpus]


# Which of them


def test_gpus_on_which_the_run_held_memory_are_its_own() -> None:
    used = gpu(0, gpu_memory_tree=flat(30e9), gpu_utilization=flat(0.9))
    of_others = gpu(1, gpu_memory_tree=flat(0), gpu_utilization=flat(0.99), gpu_sm=flat(0.9))
    assert labels(gpus_of_run([used, of_others])) == ["GPU 0"]


def test_a_gpu_that_others_use_is_not_of_a_run_that_uses_none() -> None:
    of_others = gpu(0, gpu_memory_tree=flat(0), gpu_utilization=flat(0.99), gpu_memory=flat(9e9))
    assert gpus_of_run([of_others]) == ()


def test_what_the_driver_counts_before_any_context_is_noise() -> None:
    """Where memory of the run is estimated by what rose, a few pages may."""
    assert gpus_of_run([gpu(0, gpu_memory_tree=flat(2e6))]) == ()


def test_the_allocator_tells_as_well() -> None:
    told = gpu(1, gpu_reserved=flat(5e9))
    silent = gpu(0, gpu_utilization=flat(0.5))
    assert labels(gpus_of_run([silent, told])) == ["GPU 1"]


@pytest.mark.parametrize(
    "series",
    [
        {"gpu_utilization": flat(0.2)},
        {"gpu_sm": flat(0.01)},
        {"gpu_memory": gauge([0, 1, 2], [1e9, 1e9, 3e9])},
    ],
)
def test_where_nobody_tells_whose_memory_it_is_what_did_anything_counts(
    series: dict[str, Series],
) -> None:
    idle = gpu(1, gpu_utilization=flat(0), gpu_sm=flat(0), gpu_memory=flat(1e9))
    assert labels(gpus_of_run([gpu(0, **series), idle])) == ["GPU 0"]
    assert gpus_of_run([idle]) == ()


# Energy


@given(
    st.floats(1, 700),
    st.lists(st.floats(0.05, 3), min_size=2, max_size=60),
    st.lists(st.floats(0, 1), max_size=5),
)
def test_constant_power_is_power_times_time_however_it_is_read_and_cut(
    watts: float, spacings: list[float], cuts: list[float]
) -> None:
    times = np.cumsum([0, *spacings]).tolist()
    each = gpu(gpu_power=gauge(times, [watts] * len(times)))
    end = round(times[-1] * S)
    edges = sorted({0, end, *(int(cut * end) for cut in cuts)})
    assume(len(edges) > 1)
    parts = [each.joules(a, b) for a, b in zip(edges, edges[1:], strict=False)]
    assert None not in parts
    assert sum(parts) == pytest.approx(watts * times[-1], rel=1e-6)  # type: ignore[arg-type]


@given(
    st.lists(st.tuples(st.floats(0.05, 2), st.floats(0, 700)), min_size=3, max_size=60),
    st.floats(0.5, 2),
    st.lists(st.floats(0.05, 0.95), max_size=4),
)
def test_readings_give_the_shape_and_the_counter_the_height(
    readings: list[tuple[float, float]], factor: float, cuts: list[float]
) -> None:
    times = np.cumsum([spacing for spacing, _ in readings]).tolist()
    power = gauge(times, [watts for _, watts in readings])
    alone = gpu(gpu_power=power)
    begin, end = int(power.t[0]), int(power.t[-1])
    edges = sorted({begin, end, *(begin + int(cut * (end - begin)) for cut in cuts)})
    pieces = list(zip(edges, edges[1:], strict=False))
    drawn = [alone.joules(a, b) or 0.0 for a, b in pieces]
    assume(sum(drawn) > 1)
    counter = rate(
        [edge / S for edge in edges],
        [factor * joules / ((b - a) / S) for joules, (a, b) in zip(drawn, pieces, strict=True)],
    )
    both = gpu(gpu_power=power, gpu_energy=counter)
    assert both.joules(begin, end) == pytest.approx(factor * sum(drawn), rel=1e-6)
    assert both.joules(*pieces[0]) == pytest.approx(factor * drawn[0], rel=1e-6, abs=1e-6)


def test_a_ramp_between_two_readings_is_cut_where_it_is_cut() -> None:
    each = gpu(gpu_power=gauge([0, 10], [0, 100]))
    assert each.joules(0, 10 * S) == pytest.approx(500)
    assert each.joules(0, 5 * S) == pytest.approx(125)
    assert each.joules(5 * S, 10 * S) == pytest.approx(375)


def test_readings_stand_a_little_longer_than_their_instants() -> None:
    """An epoch ends between the last reading and the next that would have come."""
    each = gpu(gpu_power=gauge([1, 2, 3], [100, 100, 100]))
    assert each.joules(S // 2, 4 * S - S // 2) == pytest.approx(300)
    assert each.joules(0, 100 * S) == pytest.approx(400), "but not for ever"
    assert each.joules(10 * S, 20 * S) is None


def test_a_gap_is_bridged_and_a_gpu_that_vanished_takes_no_energy() -> None:
    stopped = gpu(gpu_power=gauge([0, 1, 2, 60, 61, 62], [100] * 6))
    assert stopped.joules(0, 62 * S) == pytest.approx(6200)
    vanished = gpu(gpu_power=gauge([0, 1, 2], [100] * 3))
    assert vanished.joules(0, 62 * S) == pytest.approx(300)


def test_a_counter_with_a_hole_is_compared_where_it_counted() -> None:
    counter = Series(np.array([10, 40]) * S, np.array([10.0, 10.0]), np.array([110.0, 110.0]))
    each = gpu(gpu_power=flat(100, seconds=40), gpu_energy=counter)
    assert each.counter_over_readings == pytest.approx(1.1)
    assert each.joules(0, 40 * S) == pytest.approx(4400)


def test_the_counter_alone_is_enough_and_nothing_is_unknown() -> None:
    each = gpu(gpu_energy=rate([0, 10, 20], [50, 150]))
    assert each.joules(0, 20 * S) == pytest.approx(2000)
    assert each.joules(5 * S, 15 * S) == pytest.approx(1000)
    assert gpu().joules(0, S) is None


def test_a_counter_that_stands_still_is_not_believed() -> None:
    each = gpu(gpu_power=flat(100), gpu_energy=rate([0, 10], [0]))
    assert each.joules(0, 10 * S) == pytest.approx(1000)


# Means and sums


@given(st.lists(st.tuples(st.floats(0.05, 2), st.floats(0, 1)), min_size=1, max_size=30))
def test_the_mean_of_a_rate_weighs_by_time(pieces: list[tuple[float, float]]) -> None:
    edges = np.cumsum([0, *(seconds for seconds, _ in pieces)]).tolist()
    each = gpu(gpu_sm=rate(edges, [share for _, share in pieces]))
    expected = sum(seconds * share for seconds, share in pieces) / edges[-1]
    found = figures([each], 0, round(edges[-1] * S)).gpu_sm
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_means_are_over_gpus_and_sums_too() -> None:
    one = gpu(
        0,
        gpu_sm=flat(0.9),
        gpu_pcie_received=flat(1e9),
        gpu_power=flat(500),
        gpu_memory_tree=flat(10e9),
        gpu_utilization=flat(1.0),
    )
    two = gpu(
        1,
        gpu_sm=flat(0.5),
        gpu_pcie_received=flat(3e9),
        gpu_power=flat(300),
        gpu_memory_tree=flat(30e9),
        gpu_utilization=flat(0.5),
    )
    found = figures([one, two], 2 * S, 4 * S)
    assert found.gpu_sm == pytest.approx(0.7)
    assert found.gpu_utilization == pytest.approx(0.75)
    assert found.pcie_to_gpu_gb == pytest.approx(8)
    assert found.joules == pytest.approx(1600)
    assert found.gpu_memory_peak_bytes == 30e9
    assert found.gpu_tensor is None
    assert found.pcie_from_gpu_gb is None


def test_a_gpu_that_was_lost_counts_while_it_was_there() -> None:
    there = gpu(0, gpu_sm=flat(1.0, seconds=10))
    lost = gpu(1, gpu_sm=flat(0.0, seconds=5))
    assert figures([there, lost], 0, 10 * S).gpu_sm == pytest.approx(10 / 15)
    assert figures([there, lost], 6 * S, 10 * S).gpu_sm == pytest.approx(1.0)


def test_memory_is_the_runs_own_where_that_is_known() -> None:
    everybodys, reserved, own = flat(40e9), flat(20e9), flat(21e9)
    each = gpu(gpu_memory=everybodys, gpu_reserved=reserved, gpu_memory_tree=own)
    assert each.memory is own
    assert gpu(gpu_memory=everybodys, gpu_reserved=reserved).memory is reserved
    assert gpu(gpu_memory=everybodys, gpu_reserved=reserved, gpu_memory_tree=flat(0)).memory is (
        reserved
    )
    assert gpu(gpu_memory=everybodys).memory is everybodys


def test_memory_of_an_epoch_that_is_shorter_than_a_reading_takes() -> None:
    each = gpu(gpu_memory_tree=gauge([0, 1, 2], [1e9, 5e9, 3e9]))
    assert each.memory_peak(int(1.2 * S), int(1.4 * S)) == 5e9
    assert each.memory_peak(0, 2 * S) == 5e9
    assert each.memory_peak(-2 * S, -S) is None


# In the summary of a run


def summary_of(*gpus: RecordedGpu):  # type: ignore[no-untyped-def]
    table = {(m, each.gpu.uuid): s for each in gpus for m, s in each.series.items()}
    return summarise(RunData(table, [], 0, 10 * S, gpus=tuple(each.gpu for each in gpus)))


def test_an_idle_gpu_is_in_no_total() -> None:
    busy = gpu(0, gpu_memory_tree=flat(9e9), gpu_power=flat(500), gpu_pcie_sent=flat(1e9))
    idle = gpu(1, gpu_memory_tree=flat(0), gpu_power=flat(70), gpu_pcie_sent=flat(1e6))
    totals = summary_of(busy, idle).totals
    assert totals["gpu_energy"] == pytest.approx(5000)
    assert totals["gpu_pcie_sent"] == pytest.approx(10e9)
    assert set(totals) == {"gpu_energy", "gpu_pcie_sent"}
    assert summary_of(idle).totals == {}


def test_every_gpu_has_its_statistics_used_or_not() -> None:
    idle = gpu(1, gpu_power=flat(70))
    (found,) = summary_of(idle).statistics
    assert (found.metric, found.entity, found.mean) == ("gpu_power", "GPU-1", 70)


def test_use_tells_of_all_gpus_which_were_used() -> None:
    busy, idle = gpu(0, gpu_sm=flat(0.8), gpu_slowed_power=flat(0.25)), gpu(1, gpu_sm=flat(0))
    use = use_of([busy, idle], [busy], 0, 10 * S)
    assert [row.used for row in use.each] == [True, False]
    assert use.together == use.used[0].figures
    assert use.each[0].slowed_power == 0.25
    assert use.each[0].power_watts is None
    assert use_of([idle], [], 0, 10 * S).together == replace(use.together, gpu_sm=None)
