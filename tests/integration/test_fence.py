"""Limits hold for real processes, by whatever means there is, and it is said by which."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fake_nvml
from runners import PYTHON
from stepscope.errors import CannotTry
from stepscope.records.codec import to_json
from stepscope.trials.limits import fence as fence_module
from stepscope.trials.limits.cgroups import Refused
from stepscope.trials.limits.fence import Fence
from stepscope.trials.limits.spec import Limits
from stepscope.trials.outcome import Stopped
from stepscope.trials.processes import trial_processes

MIB = 1 << 20
CPUS = len(os.sched_getaffinity(0))
Build = Callable[..., Fence]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def build() -> Iterator[Build]:
    fences: list[Fence] = []

    def make(limits: Limits, ranks: int = 1, workers: int = 0) -> Fence:
        fences.append(Fence(limits, trial_processes.new_token(), ranks, workers))
        return fences[-1]

    yield make
    for fence in fences:
        assert fence.close() == []


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program inside of a fence; it begins when it is let go."""
    started: list[subprocess.Popen[str]] = []

    def begin(fence: Fence, code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*PYTHON, f"import sys\nsys.stdin.readline()\n{code}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=fence.environment(os.environ),
        )
        started.append(process)
        fence.place(process.pid)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user who may not make any."""
    refused = Refused("no permission to make a control group")
    monkeypatch.setattr(fence_module, "make_group", lambda *_: refused)


def facts_of(fence: Fence) -> dict[str, Any]:
    """As run.json has them."""
    plain: dict[str, Any] = to_json(replace(fence.facts(), time=None), omit_defaults=True)
    return plain


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


WORKER_EATS = """
import os
if os.fork() == 0:
    data = []
    while True: data.append(bytearray(b"x" * (4 << 20)))
_, status = os.wait()
print("worker ended with", os.waitstatus_to_exitcode(status), flush=True)
sys.stdin.readline()
"""


def test_only_the_worker_that_eats_is_killed_and_counted(build: Build, start: Start) -> None:
    fence = build(Limits(memory=128 * MIB))
    if facts_of(fence)["memory"]["by"] == "soft":
        pytest.skip(f"no memory cgroup here: {facts_of(fence)['memory']['why']}")
    process = start(fence, WORKER_EATS)
    assert line(process) == "worker ended with -9"
    assert process.poll() is None
    assert fence.inspect([process.pid]) is None
    assert fence.counts().kills == 1
    peak = fence.counts().peak
    assert peak is None or 64 * MIB < peak <= 129 * MIB
    assert facts_of(fence)["memory"]["by"] in ("cgroup v1", "cgroup v2")
    counters = fence.counts().counters
    assert json.loads(json.dumps(counters)) == counters
    folders = fence.group_paths()
    assert fence.close() == [] and not any(folder.exists() for folder in folders)
    assert process.wait(20) == -9  # nobody stays in a group that is removed
    assert fence.counts().kills == 1 and fence.counts().counters == counters


GRANDCHILDREN = f"""
import os, subprocess, threading
code = "import os; print(*os.sched_getaffinity(0)); import time; time.sleep(60)"
child = subprocess.Popen([{sys.executable!r}, "-S", "-c", "import subprocess, sys; "
    f"subprocess.run([{{sys.executable!r}}, '-S', '-u', '-c', {{code!r}}])"], stdout=1)
sys.stdin.readline()
"""


@pytest.mark.skipif(CPUS < 2, reason="there is only one CPU")
def test_grandchildren_stay_on_the_cpus_and_their_masks_are_read(
    build: Build, start: Start
) -> None:
    fence = build(Limits(cpus=1), ranks=2, workers=3)
    facts = facts_of(fence)["cpus"]
    assert facts["by"] == "affinity" and len(facts["cpus"]) == 1 and facts["threads"] == 1
    assert "8 ranks and loader workers" in facts["crowded"]
    process = start(fence, GRANDCHILDREN)
    assert line(process) == str(facts["cpus"][0])
    family = [
        each.pid
        for each in trial_processes.processes_of(fence.environment({})[trial_processes.VARIABLE])
    ]
    assert len(family) == 3
    assert fence.inspect(family) is None
    after = facts_of(fence)["cpus"]
    assert after["masks_checked"] >= 3 and after["escaped"] == []
    for pid in family[1:]:
        os.kill(pid, 9)


def test_threads_match_the_cpus_and_what_was_said_before_is_kept(build: Build) -> None:
    fence = build(Limits(cpus=CPUS), ranks=CPUS)
    environment = fence.environment({"OMP_NUM_THREADS": "64", "MKL_NUM_THREADS": "1", "HOME": "/"})
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert environment["HOME"] == "/"
    assert facts_of(fence)["cpus"]["replaced"] == {"OMP_NUM_THREADS": "64"}
    unlimited = build(Limits())
    assert unlimited.threads is None and facts_of(unlimited) == {}
    assert unlimited.environment({"A": "b"}).keys() == {"A", trial_processes.VARIABLE}
    assert unlimited.inspect([os.getpid()]) is None


SPINS = """
import time
begun, used = time.monotonic(), time.process_time()
while time.monotonic() - begun < 1.2: pass
print((time.process_time() - used) / (time.monotonic() - begun), flush=True)
"""


def test_half_a_cpu_is_half_the_time(build: Build, start: Start) -> None:
    fence = build(Limits(cpus=0.5))
    if facts_of(fence)["cpus"]["by"] != "quota":
        pytest.skip(f"no quota here: {facts_of(fence)['cpus']['note']}")
    assert 0 < float(line(start(fence, SPINS))) < 0.65
    assert "cpu.stat" in fence.counts().counters


@pytest.mark.usefixtures("no_groups")
def test_without_a_quota_a_part_is_rounded_up_and_said(build: Build) -> None:
    facts = facts_of(build(Limits(cpus=0.5)))["cpus"]
    assert facts["by"] == "affinity" and len(facts["cpus"]) == 1
    assert "rounded up to 1" in facts["note"] and "no permission" in facts["note"]


EATS = (
    "import time; data = bytearray(b'x' * (160 << 20)); print('full', flush=True); time.sleep(60)"
)


def breach_of(fence: Fence, pid: int) -> Stopped | None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if breach := fence.inspect([pid]):
            return breach
        time.sleep(0.05)
    return None


@pytest.mark.usefixtures("no_groups")
def test_without_a_group_a_watchdog_looks(build: Build, start: Start) -> None:
    fence = build(Limits(memory=100 * MIB))
    assert facts_of(fence)["memory"] == {
        "asked": 100 * MIB,
        "by": "soft",
        "why": "no permission to make a control group",
        "note": "does not bound the page cache",
    }
    small = start(fence, "import time; time.sleep(60)")
    assert fence.inspect([small.pid]) is None
    large = start(fence, EATS)
    assert line(large) == "full"
    breach = breach_of(fence, large.pid)
    assert breach is not None and breach.evidence["limit"] == 100 * MIB
    assert (fence.counts().kills, fence.counts().peak, fence.counts().counters) == (None, None, {})


def test_a_group_that_cannot_be_entered_becomes_a_watchdog(build: Build, start: Start) -> None:
    fence = build(Limits(memory=100 * MIB, cpus=0.5))
    if not fence.group_paths():
        pytest.skip("no cgroup can be made here")
    for folder in fence.group_paths():
        folder.rmdir()
    process = start(fence, EATS)
    assert line(process) == "full"
    facts = facts_of(fence)
    assert facts["memory"]["by"] == "soft" and "cannot enter" in facts["memory"]["why"]
    assert facts["cpus"]["by"] == "affinity"
    assert os.sched_getaffinity(process.pid) == set(facts["cpus"]["cpus"])
    assert breach_of(fence, process.pid) is not None


def test_a_process_that_has_ended_can_be_placed(build: Build) -> None:
    fence = build(Limits(memory=100 * MIB, cpus=1))
    process = subprocess.Popen(["true"])
    process.wait()
    fence.place(process.pid)
    assert fence.inspect([process.pid]) is None and facts_of(fence)["cpus"]["escaped"] == []


def test_more_than_there_is_cannot_be_had() -> None:
    with pytest.raises(CannotTry, match="may use"):
        Fence(Limits(cpus=10_000), trial_processes.new_token())


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    uuids = ["GPU-0a", "GPU-1b"]
    library = fake_nvml.FakeNvml({"gpus": [{"uuid": uuid} for uuid in uuids]})
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return uuids


def test_gpus_are_chosen_by_what_cannot_be_mistaken(build: Build, two_gpus: list[str]) -> None:
    fence = build(Limits(gpus=("1", "GPU-0"), gpu_memory=2 * MIB))
    assert fence.environment({"CUDA_VISIBLE_DEVICES": "0,1"})["CUDA_VISIBLE_DEVICES"] == (
        "GPU-1b,GPU-0a"
    )
    assert facts_of(fence) == {
        "gpu_memory": {"asked": 2 * MIB, "by": "framework"},
        "gpus": {
            "asked": ["1", "GPU-0"],
            "by": "CUDA_VISIBLE_DEVICES",
            "uuids": ["GPU-1b", "GPU-0a"],
        },
    }
    assert build(Limits(gpus=())).environment({})["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_that_is_not_there_or_not_ours_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CannotTry, match="no GPU 2") as caught:
        Fence(Limits(gpus=("2",)), trial_processes.new_token())
    assert caught.value.hint == "There is: GPU 0, GPU 1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(CannotTry, match="no GPU 0") as caught:
        Fence(Limits(gpus=("0",)), trial_processes.new_token())
    assert caught.value.hint == "There is: GPU 1"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_without_a_driver_gpus_cannot_be_chosen() -> None:
    with pytest.raises(CannotTry, match="--gpus 0 cannot be had"):
        Fence(Limits(gpus=("0",)), trial_processes.new_token())
