"""Waiting for data: the more is waited, the more there is to gain, but no more than cores allow."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from stepscope.analysis.bottleneck.explain import explain
from stepscope.records import CodeLocation, Finding
from synthetic_cases import Training, cores, observed, on_gpu

few = settings(max_examples=40)

KINDS: dict[str, dict[str, Any]] = {
    "input.workers": {"workers": 1, "samples": (0.1, 0.095, 0.0)},
    "input.fetch": {"samples": (0.4, 0.05, 0.0)},
    "input.collation": {"samples": (0.2, 0.2, 0.0), "collation": (0.3, 0.3, 0.0)},
    "input.handover": {"samples": (0.1, 0.1, 0.0)},
    "input.preparation": {"samples": None},
}


def told(wait: float, used: float = 1.0, gpu: Any = None, **training: Any) -> Finding:
    """What is said of a run that waits for so long in each step of 0.1 s."""
    run = observed(Training(wait=wait, **training), series=cores(used, main=0.5), gpu=gpu)
    (found,) = [each for each in explain(run).findings if each.cause.startswith("input.")]
    return found


@pytest.mark.parametrize("kind", KINDS)
@few
@given(st.floats(0.051, 0.99), st.floats(0.051, 0.99))
def test_the_ceiling_grows_with_the_wait(kind: str, one: float, other: float) -> None:
    less, more = sorted((one, other))
    first, second = told(0.1 * less, **KINDS[kind]), told(0.1 * more, **KINDS[kind])
    assert first.cause == second.cause == kind
    assert first.speedup_bound is not None and second.speedup_bound is not None
    assert 1 <= first.speedup_bound <= second.speedup_bound * (1 + 1e-9)
    assert second.speedup_bound <= 1 / (1 - more) * (1 + 1e-6), "no more than the wait"


@few
@given(st.floats(0.051, 0.19), st.floats(0.201, 0.95))
def test_a_small_wait_is_less_sure(little: float, much: float) -> None:
    assert told(0.1 * little, **KINDS["input.workers"]).confidence == "medium"
    assert told(0.1 * much, **KINDS["input.workers"]).confidence == "high"


def test_no_more_can_be_gained_than_there_are_cores() -> None:
    """3.2 of 4 cores are in use: at the same work per step, 1.25 times as fast is the end."""
    found = told(0.06, used=3.2, workers=1, samples=(0.1, 0.095, 0.0))
    assert found.cause == "input.workers"
    assert found.speedup_bound == pytest.approx(4 / 3.2)


def test_samples_still_have_to_be_read_when_collation_is_free() -> None:
    """4 workers take 0.28 s for the samples of a batch: one every 0.07 s at best."""
    found = told(0.05, samples=(0.28, 0.28, 0.0), collation=(0.3, 0.3, 0.0))
    assert found.cause == "input.collation"
    assert found.speedup_bound == pytest.approx(0.1 / 0.07)


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_ranks_that_wait_alike_the_same_is_said(kind: str) -> None:
    """Each rank has workers of its own: two of them are as fast as one alone."""
    one, two = (
        [Training(wait=0.05, rank=rank, **KINDS[kind]) for rank in range(count)] for count in (1, 2)
    )
    alone, both = (explain(observed(*each, series=cores(1.0))).first for each in (one, two))
    assert (alone.cause, both.cause) == (kind, kind)
    assert both.speedup_bound == pytest.approx(alone.speedup_bound)
    assert both.recommendations == alone.recommendations


def test_on_a_gpu_what_the_device_takes_stays() -> None:
    """It works 0.07 s for each step, waits or not."""
    gpu = on_gpu(gpu_active=0.68, gpu_sm=0.6)
    found = told(0.06, gpu=gpu, device=(0.07, 0.02, 0.0), **KINDS["input.workers"])
    assert found.speedup_bound == pytest.approx(0.1 / 0.07)


@pytest.mark.parametrize(
    ("wait", "samples", "workers", "advised"),
    [
        (0.04, 0.115, 1, 2),  # 0.116 s every 0.06 s
        (0.07, 0.115, 1, 4),  # 0.116 s every 0.03 s
        (0.05, 0.049, 0, 1),  # 0.050 s every 0.05 s
    ],
)
def test_as_many_workers_are_advised_as_it_takes(
    wait: float, samples: float, workers: int, advised: int
) -> None:
    found = told(wait, workers=workers, samples=(samples, samples, 0.0))
    assert found.cause == "input.workers"
    (change,) = found.recommendations
    assert (change.setting, change.value) == ("workers", advised)
    assert change.location == CodeLocation("train.py:41", "loader = DataLoader(data, 64)")


def test_no_more_workers_are_advised_than_cores_are_idle() -> None:
    found = told(0.09, used=2.6, workers=1, samples=(0.2, 0.2, 0.0))
    assert found.recommendations[0].value == 3, "1.4 cores are idle"


@pytest.mark.parametrize(
    ("disk", "network", "source"),
    [
        (50e6, 1e3, "storage"),
        (0.0, 50e6, "network"),
        (40e6, 50e6, "either"),
        (0.0, 0.0, "unknown"),
    ],
)
def test_what_is_read_from_is_told(disk: float, network: float, source: str) -> None:
    table = {**cores(1.0), ("read", "tree"): disk, ("net_received", "net:1"): network}
    first = explain(observed(Training(wait=0.04, samples=(0.4, 0.05, 0.0)), series=table)).first
    assert (first.cause, first.variant) == ("input.fetch", source)


def test_an_iterator_of_the_users_own_is_a_weaker_finding() -> None:
    found = told(0.04, samples=None)
    assert (found.cause, found.confidence) == ("input.preparation", "low")
    assert found.speedup_bound == pytest.approx(1 / 0.6)


def test_waiting_for_a_core_is_not_standing_still_for_storage() -> None:
    """Workers that are ready to run and have no core do not read."""
    found = told(0.04, used=3.9, samples=(0.4, 0.1, 0.28))
    assert found.cause == "input.preparation"
