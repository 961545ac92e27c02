"""A leak is found whatever its pace; what only looks like one is not."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given

from stepscope.analysis.bottleneck.account import Window
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


STRETCH = Window(ns(0), ns(SECONDS))


def enough(base: float) -> float:
    """The least that is called growth, in bytes over the run."""
    return max(96e6, 0.03 * base)


def noise(seed: int, size: int) -> Floats:
    return np.random.default_rng(seed).uniform(0, 1, size)


@given(SEEDS, BASES, st.floats(1.1, 1e4), st.floats(0, 0.3), st.integers(60, 500))
def test_a_leak_above_the_thresholds_is_found_with_its_pace(
    seed: int, base: float, times: float, noisy: float, readings: int
) -> None:
    total = times * enough(base)
    leak = gauge(lambda part: base + total * (part + noisy * noise(seed, len(part))), readings)
    found = growth(leak, STRETCH)
    if noisy * total > 0.05 * total and times < 1.5:
        return  # noise as large as what must be seen beyond the threshold
    assert found is not None
    assert found.bytes_per_second == pytest.approx(total / SECONDS, rel=0.1 + noisy)
    assert base <= found.at_beginning <= base + total * (0.1 + noisy)


@given(BASES, st.floats(0.0, 0.95))
def test_growth_below_the_thresholds_is_no_leak(base: float, times: float) -> None:
    assert growth(gauge(lambda part: base + times * enough(base) * part), STRETCH) is None


@pytest.mark.parametrize("amplitude", [0.05, 0.3, 2.0])
def test_noise_is_no_leak(amplitude: float) -> None:
    found = [growth(gauge(_noisy(amplitude, seed)), STRETCH) for seed in range(200)]
    assert sum(each is not None for each in found) <= 1


def _noisy(amplitude: float, seed: int) -> Callable[[Floats], Floats]:
    return lambda part: 2e9 * (1 + amplitude * noise(seed, len(part)))


@given(BASES, st.floats(0.05, 5), st.floats(3, 400), st.floats(0, 1))
@example(620922953.0, 5.0, 237.9921875, 0.0)  # read a little later in every fifth epoch
def test_what_is_freed_after_every_epoch_is_no_leak(
    base: float, amplitude: float, teeth: float, phase: float
) -> None:
    saw = gauge(lambda part: base * (1 + amplitude * ((teeth * part + phase) % 1.0)), 2000)
    assert growth(saw, STRETCH) is None


@given(SEEDS, BASES, st.floats(0.05, 5), st.floats(0.02, 0.6))
def test_a_rise_that_comes_to_an_end_is_no_leak(
    seed: int, base: float, height: float, until_part: float
) -> None:
    """Caches fill, workers touch their copies of the data: then it stays."""
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
    assert growth(rises, STRETCH) is None


@given(BASES, st.floats(0.05, 0.9))
def test_what_shrinks_is_no_leak(base: float, by: float) -> None:
    assert growth(gauge(lambda part: base * (1 - by * part)), STRETCH) is None


@pytest.mark.parametrize("value", [0.0, 5e9])
def test_what_never_changes_is_no_leak(value: float) -> None:
    assert growth(gauge(lambda part: np.full(len(part), value)), STRETCH) is None


def test_memory_that_is_all_given_back_now_and_then_is_no_leak() -> None:
    """Of a device whose tensors are freed after every round, the least is nothing."""
    assert growth(gauge(lambda part: np.floor(part * 1e9 * 64) % 1e9 // 5e8), STRETCH) is None


def test_too_few_readings_are_no_leak() -> None:
    assert growth(EMPTY, STRETCH) is None
    assert growth(gauge(lambda part: 1e9 + 1e9 * part, readings=7), STRETCH) is None


@pytest.mark.parametrize(("left", "seconds"), [(None, None), (90e6, 90.0), (-5.0, 0.0)])
def test_when_it_will_be_gone(left: float | None, seconds: float | None) -> None:
    assert seconds_left(left, 1e6) == seconds


def test_a_leak_that_takes_more_than_a_week_is_not_sure_to_matter() -> None:
    assert (leak_confidence(604_000), leak_confidence(605_000)) == ("high", "low")


def leak_of(**memory: float) -> Finding:
    """Host memory by role, growing by so many bytes a second."""
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


def test_pages_of_a_mapped_file_are_no_leak() -> None:
    """They count as the run's, but the machine has them to give to others."""
    table = {("memory", "tree"): _line(60e6), ("host_available", "host"): 20e9}
    diagnosis = explain(observed(Training(), series={**cores(1.0), **table}))
    assert "leak.host" not in {found.cause for found in diagnosis.findings}


def test_who_leaks_and_when_it_ends_are_told() -> None:
    workers = leak_of(main=0.0, worker=10e6)
    assert workers.values["process"] == "worker"
    assert workers.evidence[0].value == pytest.approx(10e6)
    left = workers.values["seconds_left"]
    assert left == pytest.approx(100, rel=0.01), "by the control group's limit, not the host's"
    location = workers.recommendations[0].location
    assert location is not None and location.where == "train.py:41"
    assert leak_of(main=10e6, worker=0.0).values["process"] == "main"


def test_slower_steps_are_told_by_their_own_time_not_by_their_waits() -> None:
    """A loader that gets slower is not the training that does."""
    waits = np.linspace(0.0, 0.2, 201).tolist()
    slows = observed(Training(lengths=[0.1 + wait for wait in waits], waits=waits))
    assert "drift.steps" not in [found.cause for found in explain(slows).findings]


def test_a_constant_wait_does_not_change_how_steps_got_slower() -> None:
    own = np.linspace(0.1, 2.0, 201)
    alone = explain(observed(Training(lengths=own.tolist()))).first
    waits = explain(observed(Training(lengths=(own + 0.1).tolist(), waits=[0.1] * 201)))
    (also,) = [found for found in waits.findings if found.cause == "drift.steps"]
    assert alone.cause == "drift.steps"
    assert also.evidence[1].metric == "first_step"
    assert also.evidence[1].value == pytest.approx(alone.evidence[1].value)


def test_a_full_device_is_told() -> None:
    run = observed(Training(), series=cores(1.0), gpu=on_gpu(gpu_memory=145e9))
    first, full = explain(run).findings
    assert (first.cause, full.cause, full.speedup_bound) == ("gpu.compute", "memory.gpu", 1.0)
    assert (full.values["left"], full.values["size"]) == (5e9, 150e9)


def test_a_loader_that_takes_all_of_the_time_is_explained_as_well() -> None:
    """Two loaders, or a thread that loads ahead: waits add up to more than the steps."""
    run = observed(Training(step=0.1, wait=0.1), series=cores(1.0))
    assert explain(run).first.cause.startswith("input.")
