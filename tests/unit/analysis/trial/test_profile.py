"""What a profile says per step, per epoch and of all ranks."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from stepscope.analysis.trial.profile import Peak, ProfiledAmount, ProfiledSpan, profile_of

SUMS: dict[str, float | None] = {
    "operator_cpu_us": 500.0,
    "runtime_cpu_us": 80.0,
    "synchronize_cpu_us": 20.0,
    "kernels": 8,
    "kernel_us": 900.0,
    "launches": 8,
    "memcpy_us": 40.0,
    "memset_us": 2.0,
}


def operator(name: str, calls: int, cpu: float, cuda: float | None) -> dict[str, Any]:
    return {
        "name": name,
        "kind": "operator",
        "calls": calls,
        "self_cpu_us": cpu,
        "cpu_us": 2 * cpu,
        "self_cuda_us": cuda,
        "cuda_us": None if cuda is None else 2 * cuda,
    }


def stored(*operators: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """What a rank on a GPU stores of 4 steps."""
    return {
        "device": "cuda:0",
        "steps": 4,
        "steps_per_epoch": 100,
        "step_us": [300.0, 310.0, 290.0, 300.0],
        "operators": list(operators) or [operator("aten::mm", 8, 100.0, 600.0)],
        "kernels": [{"name": "gemm", "calls": 8, "us": 600.0}],
        "sums": SUMS,
        "copies": {"to_device": {"calls": 4, "us": 40.0, "pageable_us": 8.0}},
        "memory": {"cuda:0": {"allocated": 1000, "reserved": 2000}},
        "missing": "",
        "trace": {"file": "trace0.json.gz", "bytes": 10, "unzipped_bytes": 100},
        **changed,
    }


ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "kernels": [],
    "sums": {name: 500.0 if name == "operator_cpu_us" else None for name in SUMS},
    "copies": None,
    "memory": {"cpu": {"allocated": 1000, "reserved": None}},
}


@given(st.integers(1, 50), st.integers(1, 10**6), st.integers(0, 10**9))
def test_an_epoch_is_measured_only_where_whole_ones_were_profiled(
    steps: int, steps_per_epoch: int, total: int
) -> None:
    stretch = ProfiledSpan(steps, steps_per_epoch)
    figure = stretch.figure(total)
    assert figure.total == total
    assert figure.per_step * steps == pytest.approx(total)
    assert figure.per_epoch == pytest.approx(total * steps_per_epoch / steps)
    if stretch.per_epoch_is == "measured":
        epochs = steps // steps_per_epoch
        assert epochs * steps_per_epoch == steps
        assert figure.per_epoch == pytest.approx(total / epochs)
    else:
        assert stretch.per_epoch_is == "scaled"


def test_nothing_is_said_of_epochs_where_they_have_no_length() -> None:
    stretch = ProfiledSpan(5, None)
    assert stretch.per_epoch_is is None
    assert stretch.figure(10) == ProfiledAmount(10, 2, None)


def test_one_rank() -> None:
    profile = profile_of({0: stored(operator("a", 8, 90.0, 60.0), operator("b", 4, 10.0, 600.0))})
    assert [row.name for row in profile.operators] == ["b", "a"], "by time on the device"
    (rank,) = profile.ranks
    assert rank.operators == profile.operators
    row = profile.operators[1]
    assert row.calls == ProfiledAmount(8, 2, 200)
    assert row.cpu_us == ProfiledAmount(180, 45, 4500)
    assert row.self_cuda_us == ProfiledAmount(60, 15, 1500)
    assert profile.per_epoch_is == "scaled"
    assert profile.has_device
    assert profile.sums["launches"] == ProfiledAmount(8, 2, 200)
    (copied,) = profile.copies
    assert (copied.direction, copied.pageable_us) == ("to_device", ProfiledAmount(8, 2, 200))
    assert profile.memory == {"cuda:0": Peak(1000, 2000)}


def test_without_a_device_times_of_the_host_decide_and_the_others_are_unknown() -> None:
    rows = (operator("short", 4, 10.0, None), operator("long", 4, 20.0, None))
    profile = profile_of({0: stored(*rows, **ON_CPU)})
    assert [row.name for row in profile.operators] == ["long", "short"]
    assert {row.self_cuda_us for row in profile.operators} == {None}
    assert not profile.has_device
    assert profile.copies == ()
    assert profile.sums["kernels"] is None
    assert profile.sums["operator_cpu_us"] == ProfiledAmount(500, 125, 12_500)


def test_ranks_are_told_alone_and_as_a_mean() -> None:
    first = stored(operator("both", 4, 10.0, 100.0), operator("first only", 4, 10.0, 50.0))
    second = stored(
        operator("both", 8, 30.0, 300.0),
        sums={**SUMS, "kernel_us": 1100.0},
        copies={},
        memory={
            "cuda:0": {"allocated": 900, "reserved": 4000},
            "cuda:1": {"allocated": 1, "reserved": 2},
        },
    )
    profile = profile_of({1: second, 0: first})
    assert [rank.rank for rank in profile.ranks] == [0, 1]
    both, only = profile.operators
    assert (both.name, both.calls, both.self_cuda_us) == (
        "both",
        ProfiledAmount(6, 1.5, 150),
        ProfiledAmount(200, 50, 5000),
    )
    assert (only.name, only.self_cuda_us) == ("first only", ProfiledAmount(25, 6.25, 625))
    assert profile.sums["kernel_us"] == ProfiledAmount(1000, 250, 25_000)
    assert profile.copies[0].us.total == 20
    assert profile.kernels[0].us.total == 600
    assert profile.memory == {"cuda:0": Peak(1000, 4000), "cuda:1": Peak(1, 2)}, "the fullest"


def test_what_one_rank_does_not_know_has_no_mean() -> None:
    blind = stored(sums=ON_CPU["sums"], copies=None, missing="no CUPTI")
    profile = profile_of({0: stored(), 1: blind})
    assert not profile.has_device
    assert profile.sums["kernels"] is None
    assert profile.copies == ()
    assert profile.sums["operator_cpu_us"] is not None


def test_a_rank_that_was_not_profiled_or_cannot_be_read_is_told() -> None:
    broken = stored()
    del broken["trace"]
    profile = profile_of({0: stored(), 1: {"error": "no"}, 2: broken, 3: stored(steps=0), 4: {}})
    assert [rank.rank for rank in profile.ranks] == [0]
    assert profile.failed[1] == "no"
    assert "cannot be read" in profile.failed[2] and "trace" in profile.failed[2]
    assert set(profile.failed) == {1, 2, 3, 4}


def test_what_an_older_version_stored_is_read() -> None:
    """It had bytes of copies and the number of events, from the trace."""
    old = {"calls": 4, "bytes": 4096, "us": 40.0, "pageable_bytes": 0}
    trace = {"file": "trace0.json.gz", "bytes": 10, "unzipped_bytes": 100, "events": 5}
    profile = profile_of({0: stored(copies={"to_device": old}, trace=trace)})
    assert not profile.failed and profile.copies[0].pageable_us is None


def test_no_rank_at_all() -> None:
    profile = profile_of({})
    assert profile.operators == () and profile.per_epoch_is is None and not profile.has_device
