"""Stack dumps of stalled processes: in a sleep, in C code, in a forked worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stepscope.trials.processes import stacks

SOURCE = str(Path(stacks.__file__).parents[3])
ARMS = f"""
import os, sys, threading, time
sys.path.append({SOURCE!r})
from pathlib import Path
from stepscope.trials.processes import stacks
stacks.arm(Path(sys.argv[1]))
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "stacks.txt"


@pytest.fixture
def start(path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(code: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


SLEEPS = f"""{ARMS}
waits = threading.Event()
def wait_for_data():
    waits.set()
    time.sleep(60)
threading.Thread(target=wait_for_data, daemon=True).start()
def train():
    waits.wait()
    print("ready", flush=True)
    time.sleep(60)
train()
"""
IN_C = f"""{ARMS}
def count_forever():
    print("ready", flush=True)
    sum(range(10**15))
count_forever()
"""
FORKED = f"""{ARMS}
def load_a_batch():
    print("ready", flush=True)
    time.sleep(60)
pid = os.fork()
if pid == 0:
    load_a_batch()
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_all_threads_of_a_sleeping_process(path: Path, start: Start) -> None:
    process = start(SLEEPS, RANK="3")
    assert stacks.dump([process.pid], path) == 1
    text = path.read_text()
    assert text.startswith(f"--- PID {process.pid} python")
    assert text.splitlines()[0].endswith(" (rank3) ---")
    assert "in wait_for_data" in text and "in train" in text
    assert process.poll() is None


def test_process_in_c_code_that_holds_the_gil(path: Path, start: Start) -> None:
    process = start(IN_C)
    time.sleep(0.1)
    assert stacks.dump([process.pid], path) == 1
    assert "in count_forever" in path.read_text()


def test_forked_workers_have_separate_headers(path: Path, start: Start) -> None:
    parent = start(FORKED)
    [worker] = map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
    assert stacks.dump([worker, parent.pid], path) == 2
    of_worker, of_parent = path.read_text().split("--- PID ")[1:]
    assert of_worker.startswith(str(worker)) and "in load_a_batch" in of_worker
    assert of_parent.startswith(str(parent.pid)) and "in load_a_batch" not in of_parent


def test_unregistered_processes_are_not_signaled(path: Path, start: Start) -> None:
    process = start("import time; print('ready', flush=True); time.sleep(60)")
    assert not stacks.is_armed(process.pid)
    assert stacks.dump([process.pid, 2**22 + 1], path) == 0
    assert process.poll() is None and path.read_text() == ""


def test_unresponsive_process_does_not_block_for_long(path: Path, start: Start) -> None:
    stopped, running = start(SLEEPS), start(SLEEPS)
    os.kill(stopped.pid, signal.SIGSTOP)
    begun = time.monotonic()
    assert stacks.dump([stopped.pid, running.pid], path) == 1
    assert time.monotonic() - begun < 8, "less than the timeout for all processes"
    assert "no response: python" in path.read_text()
    assert f"(PID {stopped.pid}, state T)" in path.read_text()
