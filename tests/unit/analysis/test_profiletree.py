"""Calls within calls: whose time is whose."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given

from stepscope.analysis.profiletree import Call, Operator, operators_of


def of(*threads: list[Call], device_us: dict[int, float] | None = None) -> dict[str, Operator]:
    return {each.name: each for each in operators_of(threads, device_us or {})}


def test_time_is_that_of_the_innermost() -> None:
    found = of(
        [
            Call(0, 100, "step", "annotation"),
            Call(10, 50, "linear", "operator"),
            Call(20, 30, "addmm", "operator"),
            Call(25, 10, "launch", "runtime", 7),
            Call(70, 5, "linear", "operator"),
        ],
        device_us={7: 1000.0, 8: 5.0},
    )
    assert found == {
        "linear": Operator("linear", "operator", 2, 25.0, 55.0, 0.0, 1000.0),
        "addmm": Operator("addmm", "operator", 1, 20.0, 30.0, 1000.0, 1000.0),
        "launch": Operator("launch", "runtime", 1, 10.0, 10.0),
    }


def test_threads_do_not_nest() -> None:
    """The backward pass on a GPU runs in a thread of its own, within no step."""
    found = of([Call(0, 100, "forward", "operator")], [Call(10, 20, "backward", "operator")])
    assert found["forward"].self_cpu_us == 100
    assert found["backward"].self_cpu_us == 20


def test_an_operator_that_calls_only_itself_is_one_call() -> None:
    calls = [Call(0, 30, "div_", "operator"), Call(5, 20, "div_", "operator")]
    assert of([*calls, Call(8, 10, "div_", "operator")])["div_"].calls == 1
    (found,) = of(calls, device_us={}).values()
    assert (found.calls, found.self_cpu_us, found.cpu_us) == (1, 30, 30)
    twice = of([*calls, Call(26, 1, "div_", "operator")])["div_"]
    assert twice.calls == 3, "two calls inside are calls"


def test_a_call_that_seems_to_end_after_its_caller_is_cut() -> None:
    """Times of CUDA come from another clock."""
    found = of(
        [
            Call(0, 10, "mm", "operator"),
            Call(6, 5, "launch", "runtime", 1),
            Call(10.5, 3, "add", "operator"),
            Call(11, 1, "launch", "runtime", 2),
        ],
        device_us={1: 100.0, 2: 7.0},
    )
    assert (found["mm"].self_cpu_us, found["mm"].cuda_us) == (6, 100)
    assert (found["add"].self_cpu_us, found["add"].cuda_us) == (2, 7)


@dataclass(frozen=True)
class Node:
    name: str
    own_us: int
    device_us: int
    inner: tuple[Node, ...]

    @property
    def us(self) -> int:
        return self.own_us + sum(each.us for each in self.inner)

    @property
    def all_device_us(self) -> int:
        return self.device_us + sum(each.all_device_us for each in self.inner)


def nodes(inner: st.SearchStrategy[tuple[Node, ...]]) -> st.SearchStrategy[Node]:
    return st.builds(Node, st.sampled_from("abcd"), st.integers(1, 50), st.integers(0, 99), inner)


trees = st.recursive(
    nodes(st.just(())), lambda each: nodes(st.lists(each, max_size=3).map(tuple)), max_leaves=12
)


@given(st.lists(trees, max_size=3), st.randoms())
def test_times_of_any_tree_add_up(roots: list[Node], random: Random) -> None:
    calls: list[Call] = []
    device_us: dict[int, float] = {}

    def place(each: Node, begin: int, depth: int) -> None:
        """Names tell the depth, so that no call has the name of one inside."""
        calls.append(Call(begin, each.us, f"{each.name}{depth}", "operator", len(calls)))
        device_us[len(calls) - 1] = each.device_us
        begin += 1
        for child in each.inner:
            place(child, begin, depth + 1)
            begin += child.us

    begin = 0
    for root in roots:
        place(root, begin, 0)
        begin += root.us
    random.shuffle(calls)
    found = operators_of([calls], device_us)

    assert sum(each.calls for each in found) == len(calls)
    assert sum(each.self_cpu_us for each in found) == pytest.approx(sum(r.us for r in roots))
    assert sum(each.self_cuda_us for each in found) == sum(device_us.values())
    at_top = [each for each in found if each.name.endswith("0")]
    assert sum(each.cpu_us for each in at_top) == sum(root.us for root in roots)
    assert sum(each.cuda_us for each in at_top) == sum(root.all_device_us for root in roots)
    assert all(0 <= each.self_cpu_us <= each.cpu_us for each in found)
