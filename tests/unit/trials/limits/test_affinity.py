"""Choice of CPUs, and enforcement of the affinity."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.trials.limits.affinity import Affinity, Core, choose_cpus, read_cores

TWO_PACKAGES = {cpu: Core(cpu % 2, cpu // 2 % 4) for cpu in range(16)}
"""2 packages of 4 cores with 2 threads; even CPUs belong to the first package."""


def test_distinct_cores_of_one_package_are_chosen_first() -> None:
    assert choose_cpus(3, range(16), TWO_PACKAGES) == (0, 2, 4)
    assert choose_cpus(4, range(16), TWO_PACKAGES) == (0, 2, 4, 6)


def test_other_package_before_sibling_threads() -> None:
    assert choose_cpus(6, range(16), TWO_PACKAGES) == (0, 1, 2, 3, 4, 6)
    assert choose_cpus(9, range(16), TWO_PACKAGES) == (0, 1, 2, 3, 4, 5, 6, 7, 8)


def test_package_with_more_allowed_cores_is_chosen() -> None:
    assert choose_cpus(2, {0, 8, 1, 3, 5}, TWO_PACKAGES) == (1, 3)


def test_unknown_topology_gives_the_first_cpus() -> None:
    assert choose_cpus(2, {4, 7, 9}, {}) == (4, 7)


@given(
    st.sets(st.integers(0, 63), min_size=1),
    st.dictionaries(st.integers(0, 63), st.builds(Core, st.integers(0, 3), st.integers(0, 7))),
    st.data(),
)
def test_chosen_cpus_are_allowed_and_on_the_most_cores(
    allowed: set[int], cores: dict[int, Core], data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(allowed)))
    chosen = choose_cpus(count, allowed, cores)
    assert len(set(chosen)) == count and set(chosen) <= allowed
    assert chosen == tuple(sorted(chosen))

    def distinct(cpus: set[int]) -> int:
        return len({cores.get(cpu, cpu) for cpu in cpus})

    assert distinct(set(chosen)) == min(count, distinct(allowed))


def test_reads_the_topology(tmp_path: Path) -> None:
    assert set(read_cores()) <= set(range(os.cpu_count() or 1))
    topology = tmp_path / "cpu12" / "topology"
    topology.mkdir(parents=True)
    (topology / "physical_package_id").write_text("1\n")
    (topology / "core_id").write_text("5\n")
    (tmp_path / "cpu13" / "topology").mkdir(parents=True)  # offline
    assert read_cores(tmp_path) == {12: Core(1, 5)}


ESCAPES = """
import os, sys, threading
def escape():
    os.sched_setaffinity(0, set(map(int, sys.argv[1].split(","))))
    print("escaped", flush=True)
    threading.Event().wait()
sys.stdin.readline()
threading.Thread(target=escape, daemon=True).start()
sys.stdin.readline()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []

    def begin(code: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", code, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_escaped_thread_is_recorded_and_moved_back(
    start: Callable[..., subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = os.sched_getaffinity(0)
    if len(everywhere) < 2:
        pytest.skip("requires two CPUs")
    child = start(ESCAPES, ",".join(map(str, everywhere)))
    assert child.stdin is not None and child.stdout is not None
    monkeypatch.setattr("stepscope.trials.limits.affinity._CHECK_ALL_S", 0.0)
    affinity = Affinity([min(everywhere)])
    affinity.place(child.pid)
    affinity.inspect([child.pid])
    assert affinity.masks_checked == 1 and affinity.escaped == []

    child.stdin.write("\n")
    child.stdin.flush()
    assert child.stdout.readline() == "escaped\n"
    affinity.inspect([child.pid])
    assert affinity.masks_checked == 3
    [escaped] = affinity.escaped
    assert escaped["pid"] == child.pid and escaped["cpus"] == sorted(everywhere)
    for thread in os.listdir(f"/proc/{child.pid}/task"):
        assert os.sched_getaffinity(int(thread)) == {min(everywhere)}
    affinity.inspect([child.pid])
    assert len(affinity.escaped) == 1


def test_masks_are_not_checked_every_time(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    child = start("import sys; sys.stdin.read()")
    affinity = Affinity(sorted(os.sched_getaffinity(0)))
    for _ in range(5):
        affinity.inspect([child.pid])
    assert affinity.masks_checked == 1
    child.kill()
    child.wait()
    affinity.inspect([child.pid, 2**22 + 1])
    assert affinity.masks_checked == 1
