"""Data-loading causes: the speed-up bound grows with the wait, up to what the cores allow."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from stepscope.analysis.bottleneck.explain import explain
from stepscope.records import CodeLocation, Finding
from stepscope.report.bottleneck.view import diagnosis_view
from synthetic_cases import Training, cores, observed, on_gpu

few = settings(max_examples=40)

KINDS: dict[str, dict[str, Any]] = {
    "input.workers": {"workers": 1, "samples": (0.1, 0.095, 0.0)},
    "input.fetch": {"samples": (0.4, 0.05, 0.0)},
    "input.collation": {"samples": (0.2, 0.2, 0.0), "collation": (0.3, 0.3, 0.0)},
    "input.ipc": {"samples": (0.1, 0.1, 0.0)},
    "input.preparation": {"samples": None},
}


def input_finding(wait: float, used: float = 1.0, gpu: Any = None, **training: Any) -> Finding:
    """Return the finding on a run with this wait in each step of 0.1 s."""
    run = observed(Training(wait=wait, **training), series=cores(used, main=0.5), gpu=gpu)
    (found,) = [each for each in explain(run).findings if each.cause.startswith("input.")]
    return found


@pytest.mark.parametrize("kind", KINDS)
@few
@given(st.floats(0.051, 0.99), st.floats(0.051, 0.99))
def test_bound_grows_with_the_wait(kind: str, one: float, other: float) -> None:
    less, more = sorted((one, other))
    first, second = (input_finding(0.1 * share, **KINDS[kind]) for share in (less, more))
    assert first.cause == second.cause == kind
    assert first.speedup_bound is not None and second.speedup_bound is not None
    assert 1 <= first.speedup_bound <= second.speedup_bound * (1 + 1e-9)
    assert second.speedup_bound <= 1 / (1 - more) * (1 + 1e-6), "no more than the wait"


@few
@given(st.floats(0.051, 0.19), st.floats(0.201, 0.95))
def test_small_wait_has_medium_confidence(small: float, large: float) -> None:
    assert input_finding(0.1 * small, **KINDS["input.workers"]).confidence == "medium"
    assert input_finding(0.1 * large, **KINDS["input.workers"]).confidence == "high"


def test_bound_is_limited_by_the_cores() -> None:
    """3.2 of 4 cores are in use: with the same work per step, the bound is 1.25."""
    found = input_finding(0.06, used=3.2, workers=1, samples=(0.1, 0.095, 0.0))
    assert found.cause == "input.workers"
    assert found.speedup_bound == pytest.approx(4 / 3.2)


def test_collation_bound_includes_the_loading_of_samples() -> None:
    """4 workers take 0.28 s to load the samples of a batch: at best one batch every 0.07 s."""
    found = input_finding(0.05, samples=(0.28, 0.28, 0.0), collation=(0.3, 0.3, 0.0))
    assert found.cause == "input.collation"
    assert found.speedup_bound == pytest.approx(0.1 / 0.07)


@pytest.mark.parametrize("kind", KINDS)
def test_two_equal_ranks_have_the_finding_of_one(kind: str) -> None:
    """Each rank has its own workers, so two ranks are as fast as one."""
    one, two = (
        [Training(wait=0.05, rank=rank, **KINDS[kind]) for rank in range(count)] for count in (1, 2)
    )
    single, both = (explain(observed(*each, series=cores(1.0))).first for each in (one, two))
    assert (single.cause, both.cause) == (kind, kind)
    assert both.speedup_bound == pytest.approx(single.speedup_bound)
    assert both.recommendations == single.recommendations


def test_time_on_the_gpu_remains() -> None:
    """A step takes 0.07 s on the device with or without a wait."""
    gpu = on_gpu(gpu_active=0.68, gpu_sm=0.6)
    found = input_finding(0.06, gpu=gpu, device=(0.07, 0.02, 0.0), **KINDS["input.workers"])
    assert found.speedup_bound == pytest.approx(0.1 / 0.07)


@pytest.mark.parametrize(
    ("wait", "samples", "workers", "recommended"),
    [
        (0.04, 0.115, 1, 2),  # 0.116 s every 0.06 s
        (0.07, 0.115, 1, 4),  # 0.116 s every 0.03 s
        (0.05, 0.049, 0, 1),  # 0.050 s every 0.05 s
    ],
)
def test_recommended_workers_keep_up_with_training(
    wait: float, samples: float, workers: int, recommended: int
) -> None:
    found = input_finding(wait, workers=workers, samples=(samples, samples, 0.0))
    assert found.cause == "input.workers"
    (change,) = found.recommendations
    assert (change.setting, change.value) == ("workers", recommended)
    assert change.location == CodeLocation("train.py:41", "loader = DataLoader(data, 64)")


def test_recommended_workers_fit_the_idle_cores() -> None:
    found = input_finding(0.09, used=2.6, workers=1, samples=(0.2, 0.2, 0.0))
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
def test_source_of_slow_reads(disk: float, network: float, source: str) -> None:
    table = {**cores(1.0), ("read", "tree"): disk, ("net_received", "net:1"): network}
    first = explain(observed(Training(wait=0.04, samples=(0.4, 0.05, 0.0)), series=table)).first
    assert (first.cause, first.variant) == ("input.fetch", source)


def test_custom_iterator_has_low_confidence() -> None:
    found = input_finding(0.04, samples=None)
    assert (found.cause, found.confidence) == ("input.preparation", "low")
    assert found.speedup_bound == pytest.approx(1 / 0.6)


@pytest.mark.parametrize(
    ("workers", "processes"),
    [
        (0, "the training process prepares each batch itself"),
        (1, "1 loader worker cannot keep up"),
        (4, "4 loader workers cannot keep up"),
    ],
)
def test_preparation_names_the_processes_that_prepare_batches(workers: int, processes: str) -> None:
    run = observed(
        Training(wait=0.04, workers=workers, samples=(0.2, 0.19, 0.0)), series=cores(3.9, main=0.5)
    )
    first = diagnosis_view(explain(run)).first
    assert first.cause == "input.preparation"
    assert first.summary.endswith(f" of CPU time, and {processes}.")


def test_waiting_for_a_core_is_not_waiting_for_storage() -> None:
    """Workers that are ready to run but have no core are not blocked by reads."""
    found = input_finding(0.04, used=3.9, samples=(0.4, 0.1, 0.28))
    assert found.cause == "input.preparation"
