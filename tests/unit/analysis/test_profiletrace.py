"""Traces of the PyTorch profiler: what is in one from a GPU, and what becomes of a damaged one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from stepscope.analysis.profiletrace import (
    Copied,
    Event,
    Kernel,
    Peak,
    direction_of,
    events_of,
    trace_figures,
)
from stepscope.analysis.profiletree import Operator

GPU = (Path(__file__).parents[2] / "data" / "profile" / "gpu.json").read_text()
"""Two steps on a GPU, cut by hand to one event of each kind or two, in the form of PyTorch 2.11."""

GEMM = "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32"


def test_a_trace_of_a_gpu() -> None:
    seen = trace_figures(events_of([GPU]))
    assert seen.events == 26
    assert seen.step_us == (400.5, 399.5)
    assert seen.kernels == (
        Kernel(GEMM, 2, 120.0),
        Kernel("void at::native::vectorized_elementwise_kernel<4, float>()", 1, 3.5),
    )
    assert seen.launches == 3
    assert seen.copies == {
        "to_device": Copied(2, 1_609_728 + 256, 35.0, 256),
        "within_device": Copied(1, 8_388_608, 2.0, 0),
        "from_device": Copied(1, 4, 1.5, 4),
    }
    assert seen.memset_us == 1.25
    assert seen.has_device
    assert {each.name: each.kind for each in seen.operators} == {
        "aten::copy_": "operator",
        "aten::mm": "operator",
        "cudaMemcpyAsync": "runtime",
        "cudaLaunchKernel": "runtime",
        "cuLaunchKernelEx": "runtime",
        "cudaDeviceSynchronize": "runtime",
    }, "what the profiler itself did is none"


def test_work_of_the_device_is_given_to_the_operator_that_asked_for_it() -> None:
    of = {each.name: each for each in trace_figures(events_of([GPU])).operators}
    assert of["aten::copy_"] == Operator(
        "aten::copy_", "operator", 1, 30.0 - 12.25, 30.0, 31.0, 31.0
    )
    assert of["aten::mm"] == Operator("aten::mm", "operator", 1, 10.0 - 5.0, 10.0, 60.25, 60.25)
    assert of["cudaLaunchKernel"] == Operator("cudaLaunchKernel", "runtime", 2, 10.0, 10.0)


def test_the_peak_may_have_been_before_the_first_event() -> None:
    """The first event of the device frees 10 MiB of 30 MiB; the host tells of no reserve."""
    seen = trace_figures(events_of([GPU]))
    assert seen.memory == {"cuda:0": Peak(30 << 20, 65_011_712), "cpu": Peak(4096, None)}


def test_memory_of_the_host_is_told_beyond_what_was_there() -> None:
    """PyTorch counts it from the first profiler of a process on."""
    totals = [(5000, 1000), (7000, 2000), (3000, -4000)]
    told = [{"Device Type": 0, "Total Allocated": now, "Bytes": change} for now, change in totals]
    events: list[Event] = [
        {"cat": "cpu_instant_event", "name": "[memory]", "args": args} for args in told
    ]
    assert trace_figures(events).memory == {"cpu": Peak(3000, None)}


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("Memcpy HtoD (Pinned -> Device)", "to_device"),
        ("Memcpy HtoD (PAGEABLE -> DEVICE)", "to_device"),
        ("Memcpy HtoA (Pinned -> Array)", "to_device"),
        ("Memcpy DtoH (Device -> Pinned)", "from_device"),
        ("Memcpy AtoD (Array -> Device)", "within_device"),
        ("Memcpy PtoP (Device -> Device)", "between_devices"),
        ("Memcpy HtoH (Pinned -> Pageable)", "host"),
        ("Memcpy <unknown> (Unknown -> Unknown)", "other"),
        ("CopyHostToDevice", "other"),
    ],
)
def test_where_a_copy_goes(name: str, direction: str) -> None:
    assert direction_of(name) == direction


def test_events_without_what_is_expected_count_for_nothing() -> None:
    odd: list[Event] = [
        {},
        {"cat": "kernel"},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "args": None},
        {"cat": "cpu_instant_event", "name": "[memory]", "args": {"Device Type": 13}},
        {"cat": "cpu_instant_event", "name": "something else"},
        {"cat": "user_annotation", "name": "Optimizer.step#SGD.step", "dur": 3},
        {"cat": "kernel", "name": "k", "dur": float("nan")},
    ]
    seen = trace_figures(odd)
    assert seen.events == 7
    assert sum(kernel.us for kernel in seen.kernels) == 0
    assert seen.copies == {"to_device": Copied(1, 0, 0.0, 0)}
    assert not seen.has_device and seen.operators == ()
    assert seen.memory == {"device type 13:0": Peak(0, 0)}
    assert seen.step_us == ()


copies = st.builds(
    lambda name, size, us: {
        "cat": "gpu_memcpy",
        "name": f"Memcpy {name}",
        "dur": us,
        "args": {"bytes": size},
    },
    st.sampled_from(["HtoD (Pageable -> Device)", "DtoH (Device -> Pinned)", "DtoD", "XtoY"]),
    st.integers(0, 2**40),
    st.integers(0, 10**9),
)


@given(st.lists(copies).flatmap(lambda each: st.tuples(st.just(each), st.permutations(each))))
def test_no_byte_is_lost_and_the_order_does_not_matter(
    both: tuple[list[dict[str, Any]], list[dict[str, Any]]],
) -> None:
    events, shuffled = both
    seen = trace_figures(events)
    assert sum(c.bytes for c in seen.copies.values()) == sum(e["args"]["bytes"] for e in events)
    assert sum(c.us for c in seen.copies.values()) == sum(e["dur"] for e in events)
    assert trace_figures(shuffled).copies == seen.copies


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
events = st.lists(st.dictionaries(st.text(max_size=8), json_values, max_size=4), max_size=6)


def trace(events: list[dict[str, Any]], indent: int | None) -> str:
    facts = {"schemaVersion": 1, "traceEvents": events, "traceName": "x"}
    return json.dumps(facts, indent=indent)


def in_chunks(text: str, size: int) -> Iterator[str]:
    return (text[begin : begin + size] for begin in range(0, len(text), size))


@given(events, st.sampled_from([None, 2]), st.integers(1, 40))
def test_events_are_the_same_however_they_come(
    events: list[dict[str, Any]], indent: int | None, size: int
) -> None:
    assert list(events_of(in_chunks(trace(events, indent), size))) == events


@given(st.data(), events)
def test_a_trace_that_is_cut_off_is_noticed(
    data: st.DataObject, events: list[dict[str, Any]]
) -> None:
    text = trace(events, 2)
    cut = data.draw(st.integers(0, text.rindex("]")))
    with pytest.raises(ValueError, match="trace"):
        list(events_of([text[:cut]]))


def test_what_is_no_trace_is_noticed() -> None:
    for text in ("", "[]", "{}", "\0\0\0", '{"traceEvents": {}}'):
        with pytest.raises(ValueError, match="no events"):
            list(events_of([text]))
    with pytest.raises(ValueError, match="something else"):
        list(events_of(['{"traceEvents": [1, 2]}']))


def test_damage_is_noticed_without_reading_on_to_the_end() -> None:
    """Else a large trace would be read again and again from the damaged place on."""
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        yield '{"traceEvents": [{"name": "a"}, {"na'
        for _ in range(100):
            read += 1
            yield "x" * (1 << 20)

    with pytest.raises(ValueError, match="damaged"):
        list(events_of(endless()))
    assert read < 20
