"""Stack samples of a training thread, in separate processes: correct lines at a low cost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.analysis.run.data import StackLocation
from stepscope.inject import events, finder
from stepscope.runs.events import read_folder

BEGIN = """
import json, os, sys, threading, time
from stepscope.inject import events, finder
finder.load_hook()
stack_samples = sys.modules["_stepscope_stack_samples"]
stack_samples.REPORT_S, max_cost, stack_samples.MAX_COST = 0.2, stack_samples.MAX_COST, 1.0

def timed(work, seconds):
    began = time.monotonic()
    work(seconds)
    return time.monotonic() - began

def tasks():
    return len(os.listdir("/proc/self/task"))

def wait_for_tasks(count):
    end = time.monotonic() + 20
    while tasks() != count and time.monotonic() < end:
        time.sleep(0.01)

def busy(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(2000))

def deep(levels, seconds):
    return deep(levels - 1, seconds) if levels else time.sleep(seconds)
"""
MONITORED = BEGIN + "events.report_to('events')\n"
SAMPLED = "stack_samples.begin(threading.get_ident())\n"

Run = Callable[[str], Any]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script as train.py, and return its output, parsed as JSON."""

    def start(script: str) -> Any:
        (tmp_path / "events").mkdir()
        (tmp_path / "train.py").write_text(script)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "train.py"],  # Python 3.12 warns of forks and threads
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        return json.loads(done.stdout) if done.stdout else None

    return start


def sampled_seconds(folder: Path) -> dict[StackLocation, float]:
    """Return the seconds at each location, over all processes."""
    seconds: dict[StackLocation, float] = {}
    for process in read_folder(folder / "events"):
        for record in process.of(events.WHERE):
            location = StackLocation(*process.name(record["a"]).split("\t"))
            seconds[location] = seconds.get(location, 0.0) + record["b"] / 1e6
    return seconds


def line(script: str, text: str) -> str:
    """Return the location of the last line with this text."""
    numbers = [n for n, each in enumerate(script.splitlines(), 1) if text in each]
    return f"train.py:{numbers[-1]}"


def test_busy_loop_and_sleep_are_found_with_their_lines(run: Run, tmp_path: Path) -> None:
    script = (
        MONITORED
        + SAMPLED
        + (
            "took = timed(busy, 0.8), timed(lambda seconds: time.sleep(seconds), 0.8)\n"
            "print(json.dumps(took))\ntime.sleep(0.6)\n"
        )
    )
    busy, slept = run(script)
    seconds = sampled_seconds(tmp_path)
    at_busy = {p: s for p, s in seconds.items() if p.where == line(script, "sum(range")}
    at_sleep = {p: s for p, s in seconds.items() if "time.sleep(seconds)" in p.code}
    assert sum(at_busy.values()) == pytest.approx(busy, abs=0.3)
    assert sum(at_sleep.values()) == pytest.approx(slept, abs=0.3)
    assert {place.code for place in at_sleep} == {"time.sleep(seconds)"}
    assert {place.where for place in at_sleep} == {line(script, "timed(busy")}
    assert any("sum(range(2000))" in place.code for place in at_busy)
    assert sum(seconds.values()) > busy + slept - 0.3, "the whole time is covered"


def test_code_that_holds_the_gil_is_found(run: Run, tmp_path: Path) -> None:
    script = (
        MONITORED
        + SAMPLED
        + "big = list(range(3_000_000))[::-1]\n"
        + (
            "end = time.monotonic() + 0.8\nwhile time.monotonic() < end:\n    big.sort()\n"
            "    big.reverse()\ntime.sleep(0.5)\n"
        )
    )
    run(script)
    held = sum(s for place, s in sampled_seconds(tmp_path).items() if "big" in place.code)
    assert held > 0.4


def test_library_code_is_reported_with_the_users_line(run: Run, tmp_path: Path) -> None:
    script = (
        MONITORED
        + SAMPLED
        + "import queue\nbatches = queue.Queue()\ntry:\n"
        + ("    batches.get(timeout=0.9)\nexcept queue.Empty:\n    pass\n")
    )
    run(script)
    (place,) = {p for p in sampled_seconds(tmp_path) if "batches.get" in p.code}
    assert place.where == line(script, "batches.get")
    assert place.inner.startswith("threading.py:wait")


def test_nothing_is_reported_if_not_monitored(run: Run, tmp_path: Path) -> None:
    run(BEGIN + SAMPLED + "time.sleep(0.7)\n")
    assert list((tmp_path / "events").iterdir()) == []


def test_thread_is_invisible_to_the_script(run: Run) -> None:
    script = (
        MONITORED
        + SAMPLED
        + SAMPLED
        + (
            "wait_for_tasks(2)\n"
            "print(json.dumps([threading.active_count(), len(threading.enumerate()), tasks()]))\n"
        )
    )
    assert run(script) == [1, 1, 2], "one thread for the script, two for the kernel"


def test_forked_child_is_sampled_only_when_it_trains(run: Run, tmp_path: Path) -> None:
    script = (
        MONITORED
        + SAMPLED
        + """
wait_for_tasks(2)
read, write = os.pipe()
child = os.fork()
if child == 0:
    before = tasks()
    stack_samples.begin(threading.get_ident())
    time.sleep(0.6)
    os.write(write, json.dumps([before, tasks()]).encode())
    os._exit(0)
os.waitpid(child, 0)
print(json.dumps({"parent": tasks(), "child": json.loads(os.read(read, 99)), "pid": child}))
"""
    )
    seen = run(script)
    assert seen["parent"] == 2
    assert seen["child"] == [1, 2]
    (child,) = [p for p in read_folder(tmp_path / "events") if p.pid == seen["pid"]]
    assert "time.sleep(0.6)" in child.name(child.of(events.WHERE)["a"][0])


def test_sampling_takes_less_than_one_percent_of_a_cpu(run: Run) -> None:
    """Measured as CPU time of the thread, the best of several attempts: load only adds to it."""
    script = (
        MONITORED
        + SAMPLED
        + """
stack_samples.REPORT_S, stack_samples.MAX_COST = 0.5, max_cost
wait_for_tasks(2)
(sampling,) = set(os.listdir("/proc/self/task")) - {str(os.getpid())}

def used():
    with open("/proc/self/task/" + sampling + "/schedstat") as file:
        return int(file.read().split()[0]) / 1e9

def cost():
    before, seconds = used(), timed(lambda seconds: deep(60, seconds), 0.5)
    return (used() - before) / seconds

print(json.dumps([cost() for _ in range(4)]))
"""
    )
    assert 0 < min(run(script)) < 0.01


def test_expensive_samples_become_rare(run: Run) -> None:
    """Otherwise there are fifty in this time, or fewer on a busy machine."""
    script = (
        MONITORED
        + """
locate, calls = stack_samples._location, []

def costly_locate(frame):
    calls.append(time.thread_time())
    while time.thread_time() < calls[-1] + 0.004:
        pass
    return locate(frame)

stack_samples._location, stack_samples.MAX_COST = costly_locate, max_cost
stack_samples.begin(threading.get_ident())
time.sleep(2.5)
print(json.dumps(len(calls)))
"""
    )
    assert 2 <= run(script) < 20


def test_sampling_ends_with_the_sampled_thread(run: Run) -> None:
    script = (
        MONITORED
        + """
def train():
    stack_samples.begin(threading.get_ident())
    time.sleep(0.2)

thread = threading.Thread(target=train)
thread.start()
thread.join()
wait_for_tasks(1)
print(json.dumps(tasks()))
"""
    )
    assert run(script) == 1


def test_second_training_thread_is_sampled_too(run: Run, tmp_path: Path) -> None:
    script = (
        MONITORED
        + """
def train(seconds):
    stack_samples.begin(threading.get_ident())
    time.sleep(seconds)

for seconds in (0.4, 0.9):
    thread = threading.Thread(target=train, args=(seconds,))
    thread.start()
    thread.join()
    wait_for_tasks(1)
"""
    )
    run(script)
    assert sum(sampled_seconds(tmp_path).values()) > 0.8


@pytest.fixture
def stack_samples() -> Any:
    finder.load_hook()
    return sys.modules["_stepscope_stack_samples"]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (
            "/opt/env/lib/python3.11/site-packages/torch/nn/modules/linear.py",
            "torch/nn/modules/linear.py",
        ),
        ("/usr/lib/python3/dist-packages/yaml/__init__.py", "yaml/__init__.py"),
        (json.__file__, "json/__init__.py"),
        ("/somewhere/else/train.py", "train.py"),
    ],
)
def test_short_path(stack_samples: Any, path: str, shown: str) -> None:
    assert stack_samples.short_path(path) == shown


@pytest.mark.parametrize(
    ("path", "library"),
    [
        ("/opt/env/lib/python3.11/site-packages/lightning/loop.py", True),
        (json.__file__, True),
        ("<frozen importlib._bootstrap>", True),
        (events.__file__, True),
        (__file__, False),
        ("/home/user/train.py", False),
    ],
)
def test_is_library(stack_samples: Any, path: str, library: bool) -> None:
    assert stack_samples.is_library(path) is library


def test_line_of_caller_is_outside_of_libraries(stack_samples: Any) -> None:
    where, _, code = stack_samples.line_of_caller(1).partition("\t")
    assert where.endswith(f"test_stack_samples.py:{sys._getframe().f_lineno - 1}")
    assert code.startswith("where, _, code = stack_samples.line_of_caller(1)")


def test_missing_source_has_no_code(stack_samples: Any) -> None:
    code = compile("x = 1", "/nowhere/gone.py", "exec")
    assert stack_samples.code_at((code, 0, 1)) == ""
