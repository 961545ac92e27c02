"""Leaks of any rate are found; memory use that only resembles a leak is not."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given

from stepscope.analysis.bottleneck.breakdown import Window
from stepscope.analysis.bottleneck.explain import explain
from stepscope.analysis.bottleneck.memory import growth, leak_confidence, seconds_left
from stepscope.analysis.run.series import EMPTY, Series
from stepscope.records import Finding
from synthetic_cases import Training, cores, ns, observed, on_gpu

Floats = npt.NDArray[np.float64]
SEEDS = st.integers(0, 2**32 - 1)
SECONDS = 100.0
BASES = st.floats(1e8, 100e9)


def gauge(value: Callable[[Floats], Floats], readings: int = 400) -> Series:
    part = np.linspace(0, 1, readings)
    times = np.array([ns(SECONDS * each) for each in part], np.int64)
    return Series(times, np.zeros(readings), value(part))


WINDOW = Window(ns(0), ns(SECONDS))


def enough(base: float) -> float:
    """Return the smallest total growth that counts, in bytes."""
    return max(96e6, 0.03 * base)


def noise(seed: int, size: int) -> Floats:
    return np.random.default_rng(seed).uniform(0, 1, size)


@given(SEEDS, BASES, st.floats(1.1, 1e4), st.floats(0, 0.3), st.integers(60, 500))
def test_leak_above_the_thresholds_is_found_with_its_rate(
    seed: int, base: float, times: float, noisy: float, readings: int
) -> None:
    total = times * enough(base)
    leak = gauge(lambda part: base + total * (part + noisy * noise(seed, len(part))), readings)
    found = growth(leak, WINDOW)
    if noisy * total > 0.05 * total and times < 1.5:
        return  # the noise is larger than the excess over the threshold
    assert found is not None
    assert found.bytes_per_second == pytest.approx(total / SECONDS, rel=0.1 + noisy)
    assert base <= found.initial_bytes <= base + total * (0.1 + noisy)


@given(BASES, st.floats(0.0, 0.95))
def test_growth_below_the_thresholds_is_not_a_leak(base: float, times: float) -> None:
    assert growth(gauge(lambda part: base + times * enough(base) * part), WINDOW) is None


@pytest.mark.parametrize("amplitude", [0.05, 0.3, 2.0])
def test_noise_is_not_a_leak(amplitude: float) -> None:
    found = [growth(gauge(_noisy(amplitude, seed)), WINDOW) for seed in range(200)]
    assert sum(each is not None for each in found) <= 1


def _noisy(amplitude: float, seed: int) -> Callable[[Floats], Floats]:
    return lambda part: 2e9 * (1 + amplitude * noise(seed, len(part)))


@given(BASES, st.floats(0.05, 5), st.floats(3, 400), st.floats(0, 1))
@example(620922953.0, 5.0, 237.9921875, 0.0)  # readings nearly in phase with every fifth epoch
def test_memory_freed_after_every_epoch_is_not_a_leak(
    base: float, amplitude: float, epochs: float, phase: float
) -> None:
    sawtooth = gauge(lambda part: base * (1 + amplitude * ((epochs * part + phase) % 1.0)), 2000)
    assert growth(sawtooth, WINDOW) is None


@given(SEEDS, BASES, st.floats(0.05, 5), st.floats(0.02, 0.6))
def test_growth_that_stops_is_not_a_leak(
    seed: int, base: float, height: float, until_part: float
) -> None:
    """Caches fill and workers copy pages of the dataset, then memory is constant."""
    rises = gauge(
        lambda part: (
            base
            * (
                1
                + height * np.minimum(1, part / until_part)
                + 0.02 * height * noise(seed, len(part))
            )
        )
    )
    assert growth(rises, WINDOW) is None


@given(BASES, st.floats(0.05, 0.9))
def test_shrinking_memory_is_not_a_leak(base: float, share: float) -> None:
    assert growth(gauge(lambda part: base * (1 - share * part)), WINDOW) is None


@pytest.mark.parametrize("value", [0.0, 5e9])
def test_constant_memory_is_not_a_leak(value: float) -> None:
    assert growth(gauge(lambda part: np.full(len(part), value)), WINDOW) is None


def test_memory_that_drops_to_zero_repeatedly_is_not_a_leak() -> None:
    """All tensors of a device are freed after every round."""
    assert growth(gauge(lambda part: np.floor(part * 1e9 * 64) % 1e9 // 5e8), WINDOW) is None


def test_too_few_readings_are_not_a_leak() -> None:
    assert growth(EMPTY, WINDOW) is None
    assert growth(gauge(lambda part: 1e9 + 1e9 * part, readings=7), WINDOW) is None


@pytest.mark.parametrize(("free", "seconds"), [(None, None), (90e6, 90.0), (-5.0, 0.0)])
def test_seconds_until_memory_is_exhausted(free: float | None, seconds: float | None) -> None:
    assert seconds_left(free, 1e6) == seconds


def test_leak_that_takes_more_than_a_week_has_low_confidence() -> None:
    assert (leak_confidence(604_000), leak_confidence(605_000)) == ("high", "low")


def leak_of(**memory: float) -> Finding:
    """Return the finding on host memory that grows by these bytes per second and role."""
    table = {("memory", role): _line(rate) for role, rate in memory.items()}
    table["memory", "tree"] = _line(sum(memory.values()))
    limits = {
        ("cgroup_memory_limit", "cgroup"): 4e9,
        ("cgroup_memory", "cgroup"): 3e9,
        ("host_available", "host"): _line(-sum(memory.values()), 50e9),
    }
    found = explain(observed(Training(), series={**cores(1.0), **table, **limits})).first
    assert found.cause == "leak.host"
    return found


def _line(rate: float, begin: float = 1e9) -> Callable[[Floats], Floats]:
    return lambda seconds: begin + rate * seconds


def test_pages_of_a_mapped_file_are_not_a_leak() -> None:
    """They count as memory of the run, but the kernel can reclaim them."""
    table = {("memory", "tree"): _line(60e6), ("host_available", "host"): 20e9}
    diagnosis = explain(observed(Training(), series={**cores(1.0), **table}))
    assert "leak.host" not in {found.cause for found in diagnosis.findings}


def test_leak_has_the_process_and_the_time_left() -> None:
    workers = leak_of(main=0.0, worker=10e6)
    assert workers.values["process"] == "worker"
    assert workers.evidence[0].value == pytest.approx(10e6)
    remaining = workers.values["seconds_left"]
    assert remaining == pytest.approx(100, rel=0.01), "limit of the cgroup, not of the host"
    location = workers.recommendations[0].location
    assert location is not None and location.where == "train.py:41"
    assert leak_of(main=10e6, worker=0.0).values["process"] == "main"


def test_increasing_data_wait_is_not_an_increasing_step_time() -> None:
    waits = np.linspace(0.0, 0.2, 201).tolist()
    run = observed(Training(lengths=[0.1 + wait for wait in waits], waits=waits))
    assert "loop.slowdown" not in [found.cause for found in explain(run).findings]


def test_constant_wait_does_not_change_a_slowdown() -> None:
    lengths = np.linspace(0.1, 2.0, 201)
    without = explain(observed(Training(lengths=lengths.tolist()))).first
    waits = explain(observed(Training(lengths=(lengths + 0.1).tolist(), waits=[0.1] * 201)))
    (with_wait,) = [found for found in waits.findings if found.cause == "loop.slowdown"]
    assert without.cause == "loop.slowdown"
    assert with_wait.evidence[1].metric == "first_step"
    assert with_wait.evidence[1].value == pytest.approx(without.evidence[1].value)


def test_nearly_full_device_memory() -> None:
    run = observed(Training(), series=cores(1.0), gpu=on_gpu(gpu_memory=145e9))
    first, full = explain(run).findings
    assert (first.cause, full.cause, full.speedup_bound) == ("gpu.compute", "memory.gpu", 1.0)
    assert (full.values["free"], full.values["size"]) == (5e9, 150e9)


def test_wait_as_long_as_the_step() -> None:
    """With two loaders or a prefetching thread, the waits can even exceed the steps."""
    run = observed(Training(step=0.1, wait=0.1), series=cores(1.0))
    assert explain(run).first.cause.startswith("input.")
