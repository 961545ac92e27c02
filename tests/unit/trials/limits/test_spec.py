"""Sizes as people write them, and limits that are refused with what there is."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import CannotTry
from stepscope.trials.limits.spec import (
    Limits,
    MachineResources,
    check_limits,
    parse_size,
    size_text,
)

GIB = 1 << 30
ROOM = MachineResources(cpus=4, memory=16 * GIB)


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
def test_the_forms_of_a_size(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "8 GiBs", "-1g", "1e9", "1,5g", "8iB", "٣g", "inf", "1.2.3", -5]
)
def test_what_is_no_size_is_told_the_forms(text: str | int) -> None:
    with pytest.raises(CannotTry, match="is no size") as caught:
        parse_size(text)
    assert "GiB" in caught.value.hint and caught.value.exit_code == 5


@given(
    st.integers(0, 10**6), st.sampled_from(["k", "m", "g", "t"]), st.sampled_from(["", "i", "iB"])
)
def test_letters_are_powers_of_1024_unless_decimal_is_said(n: int, letter: str, end: str) -> None:
    power = "kmgt".index(letter) + 1
    assert parse_size(f"{n}{letter}{end}") == n * 1024**power
    assert parse_size(f"{n}{letter.upper()}B") == n * 1000**power


@given(st.integers(0, 1 << 50))
def test_a_size_is_shown_in_a_form_that_can_be_given(size: int) -> None:
    assert parse_size(size_text(size)) == pytest.approx(size, rel=1e-3)


def test_limits_within_the_room_pass() -> None:
    check_limits(Limits(), ROOM)
    check_limits(Limits(4, 16 * GIB, GIB, ("0", "GPU-8f6d", "MIG-1/2"), 1.5, 0.1), ROOM)


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        (Limits(cpus=0), "at least 0.01"),
        (Limits(cpus=-1), "at least 0.01"),
        (Limits(cpus=float("nan")), "at least 0.01"),
        (Limits(cpus=5), "may use 4"),
        (Limits(cpus=float("inf")), "may use 4"),
        (Limits(memory=1 << 20), "--memory 1 MiB is too small"),
        (Limits(memory=1 << 20), "at least 64 MiB"),
        (Limits(memory=17 * GIB), "may use 16 GiB"),
        (Limits(gpu_memory=0), "at least 1 B"),
        (Limits(gpus=("zero",)), "nvidia-smi -L"),
        (Limits(timeout_s=0), "above 0"),
        (Limits(stall_timeout_s=-1), "above 0"),
    ],
)
def test_others_are_refused_with_what_is_possible(limits: Limits, told: str) -> None:
    with pytest.raises(CannotTry) as caught:
        check_limits(limits, ROOM)
    assert told in str(caught.value)


def test_the_room_is_what_this_process_may_use() -> None:
    here = MachineResources.here()
    assert 0 < here.cpus <= len(os.sched_getaffinity(0))
    assert 0 < here.memory <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
