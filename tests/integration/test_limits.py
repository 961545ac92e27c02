"""Limits of real processes: every enforcement method, and how it is recorded."""

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
from stepscope.errors import TrialError
from stepscope.records.codec import to_json
from stepscope.trials.limits import enforcement
from stepscope.trials.limits.cgroups import Refused
from stepscope.trials.limits.enforcement import EnforcedLimits
from stepscope.trials.limits.spec import Limits
from stepscope.trials.outcome import Stopped
from stepscope.trials.processes import trial_processes

MIB = 1 << 20
CPUS = len(os.sched_getaffinity(0))
Build = Callable[..., EnforcedLimits]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def build() -> Iterator[Build]:
    built: list[EnforcedLimits] = []

    def make(limits: Limits, ranks: int = 1, workers: int = 0) -> EnforcedLimits:
        built.append(EnforcedLimits(limits, trial_processes.new_token(), ranks, workers))
        return built[-1]

    yield make
    for enforced_limits in built:
        assert enforced_limits.close() == []


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program with limits, which apply before its code runs."""
    started: list[subprocess.Popen[str]] = []

    def begin(enforced_limits: EnforcedLimits, code: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*PYTHON, f"import sys\nsys.stdin.readline()\n{code}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=enforced_limits.environment(os.environ),
        )
        started.append(process)
        enforced_limits.place(process.pid)
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
    """Simulate a user without permission to create cgroups."""
    refused = Refused("no permission to create a cgroup")
    monkeypatch.setattr(enforcement, "make_group", lambda *_: refused)


def facts_of(enforced_limits: EnforcedLimits) -> dict[str, Any]:
    """Return the facts as in run.json."""
    plain: dict[str, Any] = to_json(replace(enforced_limits.facts(), time=None), omit_defaults=True)
    return plain


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


WORKER_ALLOCATES = """
import os
if os.fork() == 0:
    data = []
    while True: data.append(bytearray(b"x" * (4 << 20)))
_, status = os.wait()
print("worker ended with", os.waitstatus_to_exitcode(status), flush=True)
sys.stdin.readline()
"""


def test_only_the_greedy_worker_is_killed_and_counted(build: Build, start: Start) -> None:
    enforced_limits = build(Limits(memory=128 * MIB))
    if facts_of(enforced_limits)["memory"]["enforced_by"] == "soft":
        pytest.skip(f"no memory cgroup: {facts_of(enforced_limits)['memory']['why']}")
    process = start(enforced_limits, WORKER_ALLOCATES)
    assert line(process) == "worker ended with -9"
    assert process.poll() is None
    assert enforced_limits.inspect([process.pid]) is None
    assert enforced_limits.counts().kills == 1
    peak = enforced_limits.counts().peak
    assert peak is None or 64 * MIB < peak <= 129 * MIB
    assert facts_of(enforced_limits)["memory"]["enforced_by"] in ("cgroup v1", "cgroup v2")
    counters = enforced_limits.counts().counters
    assert json.loads(json.dumps(counters)) == counters
    folders = enforced_limits.group_paths()
    assert enforced_limits.close() == [] and not any(folder.exists() for folder in folders)
    assert process.wait(20) == -9  # a removed group has no processes
    assert enforced_limits.counts().kills == 1 and enforced_limits.counts().counters == counters


GRANDCHILDREN = f"""
import os, subprocess, threading
code = "import os; print(*os.sched_getaffinity(0)); import time; time.sleep(60)"
child = subprocess.Popen([{sys.executable!r}, "-S", "-c", "import subprocess, sys; "
    f"subprocess.run([{{sys.executable!r}}, '-S', '-u', '-c', {{code!r}}])"], stdout=1)
sys.stdin.readline()
"""


@pytest.mark.skipif(CPUS < 2, reason="requires two CPUs")
def test_grandchildren_inherit_the_affinity(build: Build, start: Start) -> None:
    enforced_limits = build(Limits(cpus=1), ranks=2, workers=3)
    facts = facts_of(enforced_limits)["cpus"]
    assert facts["enforced_by"] == "affinity" and len(facts["cpus"]) == 1 and facts["threads"] == 1
    assert "8 ranks and loader workers" in facts["oversubscribed"]
    process = start(enforced_limits, GRANDCHILDREN)
    assert line(process) == str(facts["cpus"][0])
    family = [
        each.pid
        for each in trial_processes.processes_of(
            enforced_limits.environment({})[trial_processes.VARIABLE]
        )
    ]
    assert len(family) == 3
    assert enforced_limits.inspect(family) is None
    after = facts_of(enforced_limits)["cpus"]
    assert after["masks_checked"] >= 3 and after["escaped"] == []
    for pid in family[1:]:
        os.kill(pid, 9)


def test_thread_variables_are_replaced_and_recorded(build: Build) -> None:
    enforced_limits = build(Limits(cpus=CPUS), ranks=CPUS)
    environment = enforced_limits.environment(
        {"OMP_NUM_THREADS": "64", "MKL_NUM_THREADS": "1", "HOME": "/"}
    )
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "1"
    assert environment["HOME"] == "/"
    assert facts_of(enforced_limits)["cpus"]["replaced"] == {"OMP_NUM_THREADS": "64"}
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


def test_quota_of_half_a_cpu(build: Build, start: Start) -> None:
    enforced_limits = build(Limits(cpus=0.5))
    if facts_of(enforced_limits)["cpus"]["enforced_by"] != "quota":
        pytest.skip(f"no quota: {facts_of(enforced_limits)['cpus']['note']}")
    assert 0 < float(line(start(enforced_limits, SPINS))) < 0.65
    assert "cpu.stat" in enforced_limits.counts().counters


@pytest.mark.usefixtures("no_groups")
def test_without_a_quota_cpus_are_rounded_up(build: Build) -> None:
    facts = facts_of(build(Limits(cpus=0.5)))["cpus"]
    assert facts["enforced_by"] == "affinity" and len(facts["cpus"]) == 1
    assert "rounded up to 1" in facts["note"] and "no permission" in facts["note"]


ALLOCATES = (
    "import time; data = bytearray(b'x' * (160 << 20)); print('full', flush=True); time.sleep(60)"
)


def breach_of(enforced_limits: EnforcedLimits, pid: int) -> Stopped | None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if breach := enforced_limits.inspect([pid]):
            return breach
        time.sleep(0.05)
    return None


@pytest.mark.usefixtures("no_groups")
def test_without_a_group_a_watchdog_enforces_the_limit(build: Build, start: Start) -> None:
    enforced_limits = build(Limits(memory=100 * MIB))
    assert facts_of(enforced_limits)["memory"] == {
        "requested": 100 * MIB,
        "enforced_by": "soft",
        "reason": "no permission to create a cgroup",
        "note": "does not limit the page cache",
    }
    small = start(enforced_limits, "import time; time.sleep(60)")
    assert enforced_limits.inspect([small.pid]) is None
    large = start(enforced_limits, ALLOCATES)
    assert line(large) == "full"
    breach = breach_of(enforced_limits, large.pid)
    assert breach is not None and breach.evidence["limit"] == 100 * MIB
    assert (
        enforced_limits.counts().kills,
        enforced_limits.counts().peak,
        enforced_limits.counts().counters,
    ) == (None, None, {})


def test_watchdog_replaces_a_group_that_cannot_be_entered(build: Build, start: Start) -> None:
    enforced_limits = build(Limits(memory=100 * MIB, cpus=0.5))
    if not enforced_limits.group_paths():
        pytest.skip("cannot create a cgroup")
    for folder in enforced_limits.group_paths():
        folder.rmdir()
    process = start(enforced_limits, ALLOCATES)
    assert line(process) == "full"
    facts = facts_of(enforced_limits)
    assert facts["memory"]["enforced_by"] == "soft" and "cannot move" in facts["memory"]["reason"]
    assert facts["cpus"]["enforced_by"] == "affinity"
    assert os.sched_getaffinity(process.pid) == set(facts["cpus"]["cpus"])
    assert breach_of(enforced_limits, process.pid) is not None


def test_exited_process_can_be_placed(build: Build) -> None:
    enforced_limits = build(Limits(memory=100 * MIB, cpus=1))
    process = subprocess.Popen(["true"])
    process.wait()
    enforced_limits.place(process.pid)
    assert (
        enforced_limits.inspect([process.pid]) is None
        and facts_of(enforced_limits)["cpus"]["escaped"] == []
    )


def test_limit_above_the_available_resources_is_an_error() -> None:
    with pytest.raises(TrialError, match="`--cpus 10000` is more than stepscope may use"):
        EnforcedLimits(Limits(cpus=10_000), trial_processes.new_token())


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    uuids = ["GPU-0a", "GPU-1b"]
    library = fake_nvml.FakeNvml({"gpus": [{"uuid": uuid} for uuid in uuids]})
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return uuids


def test_gpus_are_selected_by_uuid(build: Build, two_gpus: list[str]) -> None:
    enforced_limits = build(Limits(gpus=("1", "GPU-0"), gpu_memory=2 * MIB))
    assert enforced_limits.environment({"CUDA_VISIBLE_DEVICES": "0,1"})["CUDA_VISIBLE_DEVICES"] == (
        "GPU-1b,GPU-0a"
    )
    assert facts_of(enforced_limits) == {
        "gpu_memory": {"requested": 2 * MIB, "enforced_by": "framework"},
        "gpus": {
            "requested": ["1", "GPU-0"],
            "enforced_by": "CUDA_VISIBLE_DEVICES",
            "uuids": ["GPU-1b", "GPU-0a"],
        },
    }
    assert build(Limits(gpus=())).environment({})["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.usefixtures("two_gpus")
def test_unknown_or_hidden_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TrialError, match="Unknown GPU '2'") as caught:
        EnforcedLimits(Limits(gpus=("2",)), trial_processes.new_token())
    assert caught.value.hint == "Available to this process: GPU 0, GPU 1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(TrialError, match="Unknown GPU '0'") as caught:
        EnforcedLimits(Limits(gpus=("0",)), trial_processes.new_token())
    assert caught.value.hint == "Available to this process: GPU 1"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="an NVIDIA driver is installed")
def test_gpus_without_a_driver_are_an_error() -> None:
    with pytest.raises(TrialError, match="`--gpus 0` is not available"):
        EnforcedLimits(Limits(gpus=("0",)), trial_processes.new_token())
