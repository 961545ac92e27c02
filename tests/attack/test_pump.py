"""The process that captures the output is killed, and the command does not notice."""

from __future__ import annotations

import os
import pty
import re
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from attack_runs import StartedRun, start_run
from attack_trials import children, until
from stepscope.inject.pump import LineSearch, required_text

PATTERN = ("--epoch-pattern", r"Epoch (\d+)")
ECHO = """
import os, sys
for line in sys.stdin:
    print(line, end="", flush=True)
os._exit(7)
"""
"""Prints each line of its input at once."""


def start_echo(folder: Path, *options: str, **popen: int) -> StartedRun:
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


def test_reason_of_a_closed_output(tmp_path: Path) -> None:
    started = start_run(tmp_path / "runs", "yes", options=PATTERN)
    assert started.process.stdout is not None and started.process.stdout.read(10)
    started.process.stdout.close()
    assert started.process.wait(60) == -signal.SIGPIPE
    reason = "killed by SIGPIPE: the reader of its standard output had exited"
    assert started.run.exit_status.reason == reason


PATTERNS = [r"Epoch (\d+)", "(?i)ePOCh (\\d)", "(?i)kelvin", r"^(\d)$", "x*", "ä+", r"a|b", "�"]


def searched_naively(pattern: re.Pattern[str], data: bytes) -> list[str]:
    ends = (line[-65536:].decode("utf-8", "replace") for line in re.split(b"[\r\n]", data))
    return [match[0] for end in filter(None, ends) if (match := pattern.search(end))]


@given(
    st.sampled_from(PATTERNS),
    st.lists(
        st.sampled_from([b"\n", b"\r", b"\r\n", b"Epoch 1", b"EPOCH", b" 2", b"x" * 70_000])
        | st.binary(max_size=20)
        | st.sampled_from("ä ab 7 \u212aelvin \ufffd".encode().split()),
        max_size=30,
    ),
    st.integers(1, 200),
)
@example(r"Epoch (\d+)", [b"Epoch 1\r\nEpoch 2\nEpoch ", b"3"], 3)
@example("(?i)kelvin", ["\u212aelvin\n".encode()], 2)
def test_every_line_is_searched(source: str, pieces: list[bytes], block: int) -> None:
    """In whatever blocks the output arrives."""
    data, pattern = b"".join(pieces), re.compile(source)
    found: list[str] = []
    lines = LineSearch(pattern, lambda match: found.append(match[0]))
    for begin in range(0, len(data), max(block, len(data) // 50)):
        lines.add(data[begin : begin + max(block, len(data) // 50)])
    lines.end()
    assert found == searched_naively(pattern, data)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"Epoch (\d+)/\d+", "Epoch "),
        (r"\[(\d+)/\d+\] train (loss|accuracy)", "] train "),
        ("(?i)Epoch: (\\d+)", "epoch: "),
        ("(?i)Step", "tep"),
        ("(?i:epoch) (\\d)", ""),
        ("epoch|step", ""),
        ("(abc)?x", "x"),
        ("(?:abc)+", "abc"),
        (r"(\d+)", ""),
    ],
)
def test_text_that_each_match_contains(pattern: str, text: str) -> None:
    assert required_text(re.compile(pattern)) == text.encode()
