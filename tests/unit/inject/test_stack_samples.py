"""Looks at a training thread, in processes of their own: the right lines, for next to nothing."""

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
stack_samples.TELL_S, most_cost, stack_samples.MOST_COST = 0.2, stack_samples.MOST_COST, 1.0

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
WATCHED = BEGIN + "events.report_to('events')\n"
LOOKS = "stack_samples.begin(threading.get_ident())\n"

Run = Callable[[str], Any]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script as train.py; what it printed, as JSON."""

    def start(script: str) -> Any:
        (tmp_path / "events").mkdir()
        (tmp_path / "train.py").write_text(script)
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and not done.stderr, done.stderr
        return json.loads(done.stdout) if done.stdout else None

    return start


def told(folder: Path) -> dict[StackLocation, float]:
    """Seconds by place, of all processes."""
    found: dict[StackLocation, float] = {}
    for process in read_folder(folder / "events"):
        for record in process.of(events.WHERE):
            place = StackLocation(*process.name(record["a"]).split("\t"))
            found[place] = found.get(place, 0.0) + record["b"] / 1e6
    return found


def line(script: str, text: str) -> str:
    """Where the last line with some text is."""
    numbers = [n for n, each in enumerate(script.splitlines(), 1) if text in each]
    return f"train.py:{numbers[-1]}"


def test_a_busy_loop_and_a_sleep_are_found_with_their_lines(run: Run, tmp_path: Path) -> None:
    script = (
        WATCHED
        + LOOKS
        + (
            "took = timed(busy, 0.8), timed(lambda seconds: time.sleep(seconds), 0.8)\n"
            "print(json.dumps(took))\ntime.sleep(0.6)\n"
        )
    )
    busy, slept = run(script)
    found = told(tmp_path)
    at_busy = {p: s for p, s in found.items() if p.where == line(script, "sum(range")}
    at_sleep = {p: s for p, s in found.items() if "time.sleep(seconds)" in p.code}
    assert sum(at_busy.values()) == pytest.approx(busy, abs=0.3)
    assert sum(at_sleep.values()) == pytest.approx(slept, abs=0.3)
    assert {place.code for place in at_sleep} == {"time.sleep(seconds)"}
    assert {place.where for place in at_sleep} == {line(script, "timed(busy")}
    assert any("sum(range(2000))" in place.code for place in at_busy)
    assert sum(found.values()) > busy + slept - 0.3, "all of the time is accounted for"


def test_code_that_holds_the_interpreter_is_found_when_it_lets_go(run: Run, tmp_path: Path) -> None:
    script = (
        WATCHED
        + LOOKS
        + "big = list(range(3_000_000))[::-1]\n"
        + (
            "end = time.monotonic() + 0.8\nwhile time.monotonic() < end:\n    big.sort()\n"
            "    big.reverse()\ntime.sleep(0.5)\n"
        )
    )
    run(script)
    held = sum(s for place, s in told(tmp_path).items() if "big" in place.code)
    assert held > 0.4


def test_of_a_library_the_users_own_line_is_told_and_the_innermost_function(
    run: Run, tmp_path: Path
) -> None:
    script = (
        WATCHED
        + LOOKS
        + "import queue\nbatches = queue.Queue()\ntry:\n"
        + ("    batches.get(timeout=0.9)\nexcept queue.Empty:\n    pass\n")
    )
    run(script)
    (place,) = {p for p in told(tmp_path) if "batches.get" in p.code}
    assert place.where == line(script, "batches.get")
    assert place.inner.startswith("threading.py:wait")


def test_nothing_is_told_when_nobody_watches(run: Run, tmp_path: Path) -> None:
    run(BEGIN + LOOKS + "time.sleep(0.7)\n")
    assert list((tmp_path / "events").iterdir()) == []


def test_the_script_does_not_see_the_thread(run: Run) -> None:
    script = (
        WATCHED
        + LOOKS
        + LOOKS
        + (
            "wait_for_tasks(2)\n"
            "print(json.dumps([threading.active_count(), len(threading.enumerate()), tasks()]))\n"
        )
    )
    assert run(script) == [1, 1, 2], "one thread for the script, two for the kernel"


def test_a_forked_child_is_not_looked_at_until_it_trains(run: Run, tmp_path: Path) -> None:
    script = (
        WATCHED
        + LOOKS
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


def test_looking_costs_less_than_a_hundredth_of_a_cpu(run: Run) -> None:
    """By the clock of its own thread, and in the best of some tries: others only add to it."""
    script = (
        WATCHED
        + LOOKS
        + """
stack_samples.TELL_S, stack_samples.MOST_COST = 0.5, most_cost
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


def test_looks_that_cost_much_become_rare(run: Run) -> None:
    """Fifty in this time otherwise; a busy machine has fewer of them in any case."""
    script = (
        WATCHED
        + """
look, looks = stack_samples._place, []

def costly_look(frame):
    looks.append(time.thread_time())
    while time.thread_time() < looks[-1] + 0.004:
        pass
    return look(frame)

stack_samples._place, stack_samples.MOST_COST = costly_look, most_cost
stack_samples.begin(threading.get_ident())
time.sleep(2.5)
print(json.dumps(len(looks)))
"""
    )
    assert 2 <= run(script) < 20


def test_it_ends_with_the_thread_that_it_looks_at(run: Run) -> None:
    script = (
        WATCHED
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


def test_a_second_training_in_a_thread_of_its_own_is_looked_at_too(
    run: Run, tmp_path: Path
) -> None:
    script = (
        WATCHED
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
    assert sum(told(tmp_path).values()) > 0.8


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
def test_paths_are_as_a_user_would_write_them(stack_samples: Any, path: str, shown: str) -> None:
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
def test_what_is_the_users_own_is_told_from_libraries(
    stack_samples: Any, path: str, library: bool
) -> None:
    assert stack_samples.is_library(path) is library


def test_the_line_of_a_caller_is_outside_of_libraries(stack_samples: Any) -> None:
    where, _, code = stack_samples.line_of_caller(1).partition("\t")
    assert where.endswith(f"test_stack_samples.py:{sys._getframe().f_lineno - 1}")
    assert code.startswith("where, _, code = stack_samples.line_of_caller(1)")


def test_a_source_that_is_gone_is_no_line(stack_samples: Any) -> None:
    code = compile("x = 1", "/nowhere/gone.py", "exec")
    assert stack_samples.code_at((code, 0, 1)) == ""
