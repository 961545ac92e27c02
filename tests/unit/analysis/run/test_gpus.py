"""Which GPUs a run used, their activity and their energy."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given

from stepscope.analysis.run.data import RunData
from stepscope.analysis.run.gpus import RecordedGpu, figures, gpus_of_run, use_of
from stepscope.analysis.run.series import Series
from stepscope.analysis.run.summary import summarize
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


# Used GPUs


def test_gpus_with_memory_of_the_run_are_used() -> None:
    used = gpu(0, gpu_memory_run=flat(30e9), gpu_utilization=flat(0.9))
    other = gpu(1, gpu_memory_run=flat(0), gpu_utilization=flat(0.99), gpu_sm=flat(0.9))
    assert labels(gpus_of_run([used, other])) == ["GPU 0"]


def test_gpu_of_other_processes_is_not_used() -> None:
    other = gpu(0, gpu_memory_run=flat(0), gpu_utilization=flat(0.99), gpu_memory=flat(9e9))
    assert gpus_of_run([other]) == ()


def test_less_memory_than_a_cuda_context_is_noise() -> None:
    """If the memory of the run is estimated from its increase, it can be a few pages."""
    assert gpus_of_run([gpu(0, gpu_memory_run=flat(2e6))]) == ()


def test_gpu_with_allocator_memory_is_used() -> None:
    reserved = gpu(1, gpu_reserved=flat(5e9))
    active = gpu(0, gpu_utilization=flat(0.5))
    assert labels(gpus_of_run([active, reserved])) == ["GPU 1"]


@pytest.mark.parametrize(
    "series",
    [
        {"gpu_utilization": flat(0.2)},
        {"gpu_sm": flat(0.01)},
        {"gpu_memory": gauge([0, 1, 2], [1e9, 1e9, 3e9])},
    ],
)
def test_active_gpus_are_used_if_memory_cannot_be_attributed(
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
def test_energy_of_constant_power_is_power_times_time(
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
def test_readings_give_the_shape_and_the_counter_the_total(
    readings: list[tuple[float, float]], factor: float, cuts: list[float]
) -> None:
    times = np.cumsum([spacing for spacing, _ in readings]).tolist()
    power = gauge(times, [watts for _, watts in readings])
    alone = gpu(gpu_power=power)
    begin, end = int(power.t[0]), int(power.t[-1])
    edges = sorted({begin, end, *(begin + int(cut * (end - begin)) for cut in cuts)})
    pieces = list(zip(edges, edges[1:], strict=False))
    energies = [alone.joules(a, b) or 0.0 for a, b in pieces]
    assume(sum(energies) > 1)
    counter = rate(
        [edge / S for edge in edges],
        [factor * joules / ((b - a) / S) for joules, (a, b) in zip(energies, pieces, strict=True)],
    )
    both = gpu(gpu_power=power, gpu_energy=counter)
    assert both.joules(begin, end) == pytest.approx(factor * sum(energies), rel=1e-6)
    assert both.joules(*pieces[0]) == pytest.approx(factor * energies[0], rel=1e-6, abs=1e-6)


def test_energy_of_part_of_a_ramp() -> None:
    each = gpu(gpu_power=gauge([0, 10], [0, 100]))
    assert each.joules(0, 10 * S) == pytest.approx(500)
    assert each.joules(0, 5 * S) == pytest.approx(125)
    assert each.joules(5 * S, 10 * S) == pytest.approx(375)


def test_first_and_last_reading_are_extended_by_one_spacing() -> None:
    """An epoch ends between the last reading and the next one."""
    each = gpu(gpu_power=gauge([1, 2, 3], [100, 100, 100]))
    assert each.joules(S // 2, 4 * S - S // 2) == pytest.approx(300)
    assert each.joules(0, 100 * S) == pytest.approx(400), "but not further"
    assert each.joules(10 * S, 20 * S) is None


def test_gaps_are_interpolated_but_a_lost_gpu_uses_no_energy() -> None:
    gap = gpu(gpu_power=gauge([0, 1, 2, 60, 61, 62], [100] * 6))
    assert gap.joules(0, 62 * S) == pytest.approx(6200)
    lost = gpu(gpu_power=gauge([0, 1, 2], [100] * 3))
    assert lost.joules(0, 62 * S) == pytest.approx(300)


def test_counter_with_a_gap_is_compared_where_it_was_read() -> None:
    counter = Series(np.array([10, 40]) * S, np.array([10.0, 10.0]), np.array([110.0, 110.0]))
    each = gpu(gpu_power=flat(100, seconds=40), gpu_energy=counter)
    assert each.counter_over_readings == pytest.approx(1.1)
    assert each.joules(0, 40 * S) == pytest.approx(4400)


def test_energy_from_the_counter_alone() -> None:
    each = gpu(gpu_energy=rate([0, 10, 20], [50, 150]))
    assert each.joules(0, 20 * S) == pytest.approx(2000)
    assert each.joules(5 * S, 15 * S) == pytest.approx(1000)
    assert gpu().joules(0, S) is None


def test_stuck_counter_is_ignored() -> None:
    each = gpu(gpu_power=flat(100), gpu_energy=rate([0, 10], [0]))
    assert each.joules(0, 10 * S) == pytest.approx(1000)


# Means and sums


@given(st.lists(st.tuples(st.floats(0.05, 2), st.floats(0, 1)), min_size=1, max_size=30))
def test_mean_of_a_rate_is_weighted_by_time(pieces: list[tuple[float, float]]) -> None:
    edges = np.cumsum([0, *(seconds for seconds, _ in pieces)]).tolist()
    each = gpu(gpu_sm=rate(edges, [share for _, share in pieces]))
    expected = sum(seconds * share for seconds, share in pieces) / edges[-1]
    found = figures([each], 0, round(edges[-1] * S)).gpu_sm
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_means_and_sums_over_gpus() -> None:
    one = gpu(
        0,
        gpu_sm=flat(0.9),
        gpu_pcie_received=flat(1e9),
        gpu_power=flat(500),
        gpu_memory_run=flat(10e9),
        gpu_utilization=flat(1.0),
    )
    two = gpu(
        1,
        gpu_sm=flat(0.5),
        gpu_pcie_received=flat(3e9),
        gpu_power=flat(300),
        gpu_memory_run=flat(30e9),
        gpu_utilization=flat(0.5),
    )
    found = figures([one, two], 2 * S, 4 * S)
    assert found.gpu_sm == pytest.approx(0.7)
    assert found.gpu_utilization == pytest.approx(0.75)
    assert found.pcie_to_gpu_bytes == pytest.approx(8e9)
    assert found.joules == pytest.approx(1600)
    assert found.gpu_memory_peak_bytes == 30e9
    assert found.gpu_tensor is None
    assert found.pcie_from_gpu_bytes is None


def test_lost_gpu_counts_until_it_was_lost() -> None:
    present = gpu(0, gpu_sm=flat(1.0, seconds=10))
    lost = gpu(1, gpu_sm=flat(0.0, seconds=5))
    assert figures([present, lost], 0, 10 * S).gpu_sm == pytest.approx(10 / 15)
    assert figures([present, lost], 6 * S, 10 * S).gpu_sm == pytest.approx(1.0)


def test_memory_of_the_run_is_preferred() -> None:
    total, reserved, own = flat(40e9), flat(20e9), flat(21e9)
    each = gpu(gpu_memory=total, gpu_reserved=reserved, gpu_memory_run=own)
    assert each.memory is own
    assert gpu(gpu_memory=total, gpu_reserved=reserved).memory is reserved
    assert gpu(gpu_memory=total, gpu_reserved=reserved, gpu_memory_run=flat(0)).memory is (reserved)
    assert gpu(gpu_memory=total).memory is total


def test_memory_of_an_epoch_without_a_reading() -> None:
    each = gpu(gpu_memory_run=gauge([0, 1, 2], [1e9, 5e9, 3e9]))
    assert each.memory_peak(int(1.2 * S), int(1.4 * S)) == 5e9
    assert each.memory_peak(0, 2 * S) == 5e9
    assert each.memory_peak(-2 * S, -S) is None


# Summary of a run


def summary_of(*gpus: RecordedGpu):  # type: ignore[no-untyped-def]
    table = {(m, each.gpu.uuid): s for each in gpus for m, s in each.series.items()}
    return summarize(RunData(table, [], 0, 10 * S, gpus=tuple(each.gpu for each in gpus)))


def test_totals_exclude_idle_gpus() -> None:
    busy = gpu(0, gpu_memory_run=flat(9e9), gpu_power=flat(500), gpu_pcie_sent=flat(1e9))
    idle = gpu(1, gpu_memory_run=flat(0), gpu_power=flat(70), gpu_pcie_sent=flat(1e6))
    totals = summary_of(busy, idle).totals
    assert totals["gpu_energy"] == pytest.approx(5000)
    assert totals["gpu_pcie_sent"] == pytest.approx(10e9)
    assert set(totals) == {"gpu_energy", "gpu_pcie_sent"}
    assert summary_of(idle).totals == {}


def test_idle_gpus_have_statistics() -> None:
    idle = gpu(1, gpu_power=flat(70))
    (found,) = summary_of(idle).statistics
    assert (found.metric, found.entity, found.mean) == ("gpu_power", "GPU-1", 70)


def test_use_covers_all_gpus() -> None:
    busy, idle = gpu(0, gpu_sm=flat(0.8), gpu_throttled_power=flat(0.25)), gpu(1, gpu_sm=flat(0))
    use = use_of([busy, idle], [busy], 0, 10 * S)
    assert [row.used for row in use.each] == [True, False]
    assert use.overall == use.used[0].figures
    assert use.each[0].throttled_power == 0.25
    assert use.each[0].power_watts is None
    assert use_of([idle], [], 0, 10 * S).overall == replace(use.overall, gpu_sm=None)
