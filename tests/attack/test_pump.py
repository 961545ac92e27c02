"""The process that captures the output is killed, and the command does not notice."""

from __future__ import annotations

import os
import pty
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from attack_runs import StartedRun, start_run
from attack_trials import children, until

PATTERN = ("--epoch-pattern", r"Epoch (\d+)")
ECHO = """
import os, sys
for line in sys.stdin:
    print(line, end="", flush=True)
os._exit(7)
"""
"""Prints each line of its input at once."""


def start_echo(folder: Path, *options: str, **popen: Any) -> StartedRun:
    """Start `ECHO` and wait until it is monitored."""
    command = (sys.executable, "-S", "-c", ECHO)
    started = start_run(folder / "runs", *command, options=(*PATTERN, *options), **popen)
    started.wait_for_begin()
    return started


def echo(started: StartedRun, number: int) -> None:
    """Send a line and read it again."""
    process = started.process
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"Epoch %d\n" % number)
    process.stdin.flush()
    assert process.stdout.readline() == b"Epoch %d\n" % number


def kill_pumps(started: StartedRun) -> None:
    pumps = started.pumps()
    assert len(pumps) == 2
    for pump in pumps:
        os.kill(pump, signal.SIGKILL)
    assert until(lambda: not set(pumps) & set(started.pumps()))


@pytest.mark.parametrize("interval", ["0.1", "60"])
def test_killed_pumps_are_replaced(tmp_path: Path, interval: str) -> None:
    """Also between rare samples, and again if they are killed at once."""
    started = start_echo(tmp_path, "--interval", interval)
    for number in range(3):
        echo(started, number)
        kill_pumps(started)
        echo(started, 10 + number)
        assert until(lambda: len(started.pumps()) == 2)
    code, _, err = started.finish()
    assert code == 7
    assert "the process that captures the output was killed and has been restarted" in err
    run = started.run
    assert [mark["value"] for mark in run.marks().to_pylist()] == ["0", "10", "1", "11", "2", "12"]
    assert (run.path / "stdout.log").read_text().endswith("Epoch 12\n")


def test_killed_helpers_are_not_counted_as_processes(tmp_path: Path) -> None:
    started = start_echo(tmp_path)
    for _ in range(2):
        kill_pumps(started)
        (member,) = set(children(started.process.pid, "stepscope")) - set(started.pumps())
        os.kill(member, signal.SIGKILL)
        assert until(lambda: len(children(started.process.pid, "stepscope")) == 3)
    echo(started, 0)
    assert started.finish()[0] == 7
    counted = started.run.samples("process", ["processes"]).column("processes").to_pylist()
    assert max(filter(None, counted)) == 1


def test_killed_pump_of_a_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    started = start_echo(tmp_path, stdout=theirs)
    os.close(theirs)
    for number in range(2):
        assert started.process.stdin is not None
        started.process.stdin.write(b"Epoch %d\n" % number)
        started.process.stdin.flush()
        assert os.read(ours, 100) == b"Epoch %d\r\n" % number
        kill_pumps(started)
    assert started.finish()[0] == 7
    os.close(ours)


def test_output_that_cannot_be_written(tmp_path: Path) -> None:
    """The command continues, as it does without stepscope."""
    with open("/dev/full", "wb") as full:
        started = start_echo(tmp_path, stdout=full)
    code, _, err = started.finish(b"Epoch 0\n" * 3)
    assert code == 7 and "part of the command's standard output could not be written" in err
    assert (started.folder / "stdout.log").read_text() == "Epoch 0\n" * 3


def test_reason_of_a_closed_output(tmp_path: Path) -> None:
    started = start_run(tmp_path / "runs", "yes", options=PATTERN)
    assert started.process.stdout is not None and started.process.stdout.read(10)
    started.process.stdout.close()
    assert started.process.wait(60) == -signal.SIGPIPE
    reason = "killed by SIGPIPE: the reader of its standard output had exited"
    assert started.run.exit_status.reason == reason
