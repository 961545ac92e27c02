"""`kill -9` of each process of `stepscope run` at random moments.

The command continues, receives its signals once, and ends with its own exit code. No step and at
most one second of samples is lost.
"""

from __future__ import annotations

import os
import pty
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from attack_runs import StartedRun, start_run
from attack_trials import children, until
from conftest import STEPSCOPE
from stepscope.opened_run import OpenedRun
from stepscope.report.run.derive import derive

AT_ONCE = 4
SECONDS_LOST = 1.0
LATE_S = 0.25
"""The test and the monitor may wait for a CPU. The longest wait of the monitor is the longest gap
between its samples."""
MAX_WAIT_S = 2.0
BLOCK = 1 << 18
"""Bytes that a pump reads at once, and loses if it is killed before it writes them."""
PATTERN = ("--epoch-pattern", r"epoch (\d+)")

STEPS = """
import os, sys, time, stepscope
counted = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for step in range(int(sys.argv[2])):
    stepscope.mark("step", step)
    os.write(counted, b".")
    print("step", step, flush=True)
    time.sleep(0.002)
os._exit(7)
"""
LINES = """
import os, sys, time
number = 0
while not os.path.exists(sys.argv[1]):
    for number in range(number + 1, number + 1001):
        os.write(1, b"line %09d of a training that prints a lot\\n" % number)
    time.sleep(0.01)
os.write(2, b"printed %d\\n" % number)
os._exit(7)
"""
SIGNALS = """
import os, signal
signal.signal(signal.SIGINT, lambda *_: os.write(1, b"SIGINT\\n"))
signal.signal(signal.SIGTERM, lambda *_: os.write(1, b"SIGTERM\\n"))
os.write(1, b"ready\\n")
while os.read(0, 1): pass
os._exit(7)
"""

Record = Callable[[str, object], None]


def kills(short: int, long: int) -> Any:
    """Run a test with a few kills, and with many in `make test-long`."""
    return pytest.mark.parametrize(
        ("seed", "count"), [(1, short), pytest.param(2, long, marks=pytest.mark.long)]
    )


class Training:
    """A training under `stepscope run`, in a shell that writes its exit code to a file: the
    training may become an orphan."""

    def __init__(self, folder: Path, steps: int, *options: str) -> None:
        folder.mkdir()
        script, self._counted = folder / "steps.py", folder / "counted"
        self.out, self._code = folder / "out", folder / "code"
        script.write_text(STEPS)
        shell = f'"$@"; code=$?; echo $code >{folder}/code.new; mv {folder}/code.new {self._code}'
        command = (sys.executable, str(script), str(self._counted), str(steps))
        with self.out.open("wb") as out:
            self.started = start_run(
                *(folder / "runs", "sh", "-c", f"{shell}; exit $code", "sh", *command),
                options=("-q", *options),
                **{"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.DEVNULL},
            )
        assert until(self._counted.exists)

    @property
    def run(self) -> OpenedRun:
        return self.started.run

    def kill_monitor(self) -> int:
        """Return the time of the kill."""
        self.started.process.kill()
        killed_ns = time.monotonic_ns()
        self.started.process.wait()
        return killed_ns

    def has_ended(self) -> bool:
        return self._code.exists()

    def check(self, steps: int) -> None:
        """The training ended by itself, and no step is lost."""
        assert until(self.has_ended) and self._code.read_text() == "7\n"
        assert self._counted.stat().st_size == steps == self.run.summary().steps
        assert until(lambda: self.out.read_text().endswith(f"step {steps - 1}\n"))
        assert self.out.read_text().count("\n") == steps
        derive(self.run)
        assert self.run.exit_status.outcome.value in self.run.paths.report_html.read_text()


def seconds_lost(run: OpenedRun, killed_ns: int) -> tuple[float, float]:
    """Return the seconds between the last sample and the kill, and the longest gap before."""
    times = run.samples("process", ["t_ns"]).column("t_ns").to_pylist()
    times = sorted({run.begin_ns, *times})
    gap = max((after - before for before, after in pairwise(times)), default=0)
    return (killed_ns - times[-1]) / 1e9, gap / 1e9


@pytest.mark.timeout(900)
@kills(4, 60)
def test_monitor(tmp_path: Path, record_property: Record, seed: int, count: int) -> None:
    def kill_one(number: int) -> float:
        chance = random.Random(f"{seed} {number}")
        options = PATTERN if number % 2 else ()
        training = Training(tmp_path / str(number), 1000, *options)
        time.sleep(chance.uniform(0, 2.0))
        killed_ns = training.kill_monitor()
        training.check(steps=1000)
        assert training.run.exit_status.outcome == "lost"
        lost_s, late_s = seconds_lost(training.run, killed_ns)
        assert lost_s <= SECONDS_LOST + min(late_s, MAX_WAIT_S) + LATE_S
        return lost_s

    with ThreadPoolExecutor(AT_ONCE) as pool:
        lost = list(pool.map(kill_one, range(count)))
    record_property("seconds of samples lost", f"{max(lost):.2f}, mean {sum(lost) / count:.2f}")


@pytest.mark.timeout(900)
@kills(4, 40)
def test_monitor_after_the_end(
    tmp_path: Path, record_property: Record, seed: int, count: int
) -> None:
    """While it records the outcome, forwards the output, converts the samples or reports."""

    def kill_one(number: int) -> str:
        chance = random.Random(f"{seed} {number}")
        options = PATTERN if number % 2 else ()
        training = Training(tmp_path / str(number), 100, *options)
        assert until(training.has_ended)
        time.sleep(chance.uniform(0, 0.3))
        training.kill_monitor()
        training.check(steps=100)
        exit_status = training.run.exit_status
        assert exit_status.outcome == "lost" or exit_status.exit_code == 7
        return exit_status.outcome.value

    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(kill_one, range(count)))
    record_property("lost outcomes", f"{outcomes.count('lost')} of {count}")


def kill_pump(started: StartedRun, pump: int) -> None:
    os.kill(pump, signal.SIGKILL)
    assert until(lambda: pump not in started.pumps())


@pytest.mark.timeout(900)
@kills(3, 40)
def test_pump(tmp_path: Path, record_property: Record, seed: int, count: int) -> None:
    """Of an output of several MB/s, each kill loses at most what the pump had read."""
    chance = random.Random(seed)
    stop, out = tmp_path / "stop", tmp_path / "out"
    with out.open("wb") as file:
        started = start_run(
            *(tmp_path / "runs", sys.executable, "-S", "-c", LINES, str(stop)),
            options=PATTERN,
            stdout=file,
        )
    started.wait_for_begin()
    for _ in range(count):
        time.sleep(chance.uniform(0, 0.3))
        assert until(lambda: len(started.pumps()) == 2)
        kill_pump(started, chance.choice(started.pumps()))
    stop.touch()
    code, _, err = started.finish()
    assert code == 7 and "was killed and has been restarted" in err, err
    printed = int(re.findall(r"printed (\d+)", err)[0])
    line = len(b"line %09d of a training that prints a lot\n" % 0)
    forwarded = out.read_bytes()
    missing = printed * line - len(forwarded)
    assert 0 <= missing <= count * BLOCK
    numbers = [int(n) for n in re.findall(rb"^line (\d{9}) of a training", forwarded, re.M)]
    assert numbers == sorted(set(numbers)), "no line is repeated"
    assert started.run.exit_status.exit_code == 7
    record_property("output", f"{len(forwarded) / 1e6:.0f} MB, {missing / 1e3:.0f} kB missing")


def member_of(started: StartedRun) -> int:
    """Return the process that shows which signals were sent to the whole process group."""
    (member,) = children(started.process.pid, "stepscope")
    return member


def kill_member(started: StartedRun) -> None:
    before = member_of(started)
    os.kill(before, signal.SIGKILL)
    replaced = until(lambda: children(started.process.pid, "stepscope") not in ([], [before]))
    assert replaced


@pytest.mark.timeout(900)
@kills(3, 20)
def test_group_member(tmp_path: Path, seed: int, count: int) -> None:
    """Signals to stepscope are forwarded, and those to the group are not sent twice."""
    chance = random.Random(seed)
    command = (sys.executable, "-S", "-c", SIGNALS)
    started = start_run(tmp_path / "runs", *command)
    stdout = started.process.stdout
    assert stdout is not None and stdout.readline() == b"ready\n"
    started.wait_for_begin()
    for _ in range(count):
        kill_member(started)
        number = chance.choice([signal.SIGTERM, signal.SIGINT])
        chance.choice([os.kill, os.killpg])(started.process.pid, number)
        assert stdout.readline().decode() == f"{number.name}\n"
    code, rest, _ = started.finish()
    assert (code, rest) == (7, ""), "a signal was received twice"


def test_ctrl_c_after_a_kill(tmp_path: Path) -> None:
    words = [*STEPSCOPE, "run", "--out", str(tmp_path / "runs"), "-q", "--"]
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(words[0], [*words, sys.executable, "-S", "-c", SIGNALS])
    seen = b""

    def has_printed(text: bytes) -> bool:
        nonlocal seen
        seen += os.read(terminal, 1000)
        return text in seen

    assert until(lambda: has_printed(b"ready"))
    assert until(lambda: children(pid, "stepscope"))
    (member,) = children(pid, "stepscope")
    os.kill(member, signal.SIGKILL)
    assert until(lambda: children(pid, "stepscope") not in ([], [member]))
    os.write(terminal, b"\x03")
    assert until(lambda: has_printed(b"SIGINT"))
    os.kill(pid, signal.SIGTERM)  # it is forwarded after SIGINT would have been
    assert until(lambda: has_printed(b"SIGTERM"))
    os.write(terminal, b"\n\x04")  # the end of the input
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 7 and seen.count(b"SIGINT") == 1
