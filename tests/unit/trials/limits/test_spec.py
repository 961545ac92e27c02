"""Parsing of sizes, and validation of limits."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import TrialError
from stepscope.trials.limits.spec import (
    Limits,
    MachineResources,
    check_limits,
    parse_size,
    size_text,
)

GIB = 1 << 30
AVAILABLE = MachineResources(cpus=4, memory=16 * GIB)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * GIB),
        ("16GB", 16 * 10**9),
        ("500MiB", 500 << 20),
        ("1.5g", GIB * 3 // 2),
        ("1.5 Gi", GIB * 3 // 2),
        (" 2m ", 2 << 20),
        ("3kB", 3000),
        ("3K", 3072),
        ("1TiB", 1 << 40),
        (".5k", 512),
        ("123b", 123),
        (4096, 4096),
        ("0", 0),
    ],
)
def test_valid_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 GiBs", "-1g", "1e9", "1,5g", "8iB", "٣g", "inf", "1.2.3", -5]
)
def test_invalid_sizes(text: str | int) -> None:
    with pytest.raises(TrialError, match="Invalid size") as caught:
        parse_size(text)
    assert "GiB" in caught.value.hint and caught.value.exit_code == 5


@given(
    st.integers(0, 10**6), st.sampled_from(["k", "m", "g", "t"]), st.sampled_from(["", "i", "iB"])
)
def test_letters_are_binary_unless_followed_by_b(n: int, letter: str, end: str) -> None:
    power = "kmgt".index(letter) + 1
    assert parse_size(f"{n}{letter}{end}") == n * 1024**power
    assert parse_size(f"{n}{letter.upper()}B") == n * 1000**power


@given(st.integers(0, 1 << 50))
def test_formatted_size_can_be_parsed(size: int) -> None:
    assert parse_size(size_text(size)) == pytest.approx(size, rel=1e-3)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (GIB - 1, "1 GiB"),
        (GIB - (1 << 19), "1 GiB"),
        (GIB - (1 << 19) - 1, "1023 MiB"),
        ((1 << 20) - 1, "1 MiB"),
        (1023, "1023 B"),
    ],
)
def test_size_below_the_next_unit_is_not_rounded_to_1024(size: int, text: str) -> None:
    assert size_text(size) == text


def test_valid_limits() -> None:
    check_limits(Limits(), AVAILABLE)
    check_limits(Limits(4, 16 * GIB, GIB, ("0", "GPU-8f6d", "MIG-1/2"), 1.5, 0.1), AVAILABLE)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (Limits(cpus=0), "`--cpus 0` must be at least 0.01"),
        (Limits(cpus=-1), "`--cpus -1` must be at least 0.01"),
        (Limits(cpus=float("nan")), "`--cpus nan` must be at least 0.01"),
        (Limits(cpus=5), "`--cpus 5` is more than stepscope may use on this machine (4 CPUs)"),
        (
            Limits(cpus=float("inf")),
            "`--cpus inf` is more than stepscope may use on this machine (4 CPUs)",
        ),
        (Limits(memory=1 << 20), "`--memory 1MiB` must be at least 64 MiB"),
        (
            Limits(memory=17 * GIB),
            "`--memory 17GiB` is more than stepscope may use on this machine (16 GiB)",
        ),
        (Limits(gpu_memory=0), "`--gpu-memory 0B` must be at least 1 B"),
        (Limits(gpus=("zero",)), "Invalid GPU 'zero' in `--gpus`"),
        (Limits(gpus=("zero",)), "nvidia-smi -L"),
        (Limits(timeout_s=0), "`--timeout 0` must be greater than 0 (seconds)"),
        (Limits(stall_timeout_s=-1), "`--stall-timeout -1` must be greater than 0 (seconds)"),
    ],
)
def test_invalid_limits(limits: Limits, message: str) -> None:
    with pytest.raises(TrialError) as caught:
        check_limits(limits, AVAILABLE)
    assert message in str(caught.value)


def test_available_resources_of_this_process() -> None:
    here = MachineResources.here()
    assert 0 < here.cpus <= len(os.sched_getaffinity(0))
    assert 0 < here.memory <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
