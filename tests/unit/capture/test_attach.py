"""Processes that somebody else started: which can be watched, and how their end is learnt."""

from __future__ import annotations

import dataclasses
import os
import platform
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.capture.attach import judge_end, stop_requests
from stepscope.capture.outcome import KernelEvidence
from stepscope.capture.target import Target, find_target
from stepscope.errors import CannotWatch
from stepscope.inject.events import FOLDER_VARIABLE
from stepscope.sensors import procfs

KERNEL = tuple(int(word) for word in platform.release().split("-")[0].split(".")[:2])
PIDFD_TELLS = KERNEL >= (6, 15)

WAITS = "import sys; sys.stdin.readline(); "


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[str]], code: str, **more: str) -> subprocess.Popen[str]:
    """A child that does what it shall once it is told to."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS + code],
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, **more},
    )
    started.append(process)
    while not procfs.command_line(process.pid):  # its new memory may not be in place yet
        time.sleep(0.001)
    return process


def let_end(process: subprocess.Popen[str], target: Target) -> None:
    """It ends, and stays a zombie: nobody has waited for it."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.close()
    process.stdin = None
    assert target.pidfd is not None
    assert select.select([target.pidfd], [], [], 20)[0]


def test_who_it_is(started: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    events = tmp_path / "run" / "events"
    process = start(started, "pass", **{FOLDER_VARIABLE: str(events)})
    target = find_target(process.pid)
    assert target.command == [sys.executable, "-c", WAITS + "pass"]
    assert target.cwd == Path.cwd()
    assert target.owner is None
    assert target.reports_to == tmp_path / "run"
    assert not target.has_ended()
    target.close()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3 << 8),
        ("import os; os.kill(os.getpid(), 9)", signal.SIGKILL),
    ],
)
def test_a_zombie_shows_its_status(
    started: list[subprocess.Popen[str]], code: str, status: int
) -> None:
    process = start(started, code)
    target = find_target(process.pid)
    let_end(process, target)
    assert target.has_ended()
    assert target.status() == status
    target.close()


def test_after_its_parent_waited_only_a_new_kernel_tells(
    started: list[subprocess.Popen[str]],
) -> None:
    process = start(started, "sys.exit(3)")
    target = find_target(process.pid)
    let_end(process, target)
    process.wait()
    assert target.has_ended()
    assert target.status() == (3 << 8 if PIDFD_TELLS else None)
    without = dataclasses.replace(target, pidfd=None)
    assert without.has_ended()
    assert without.status() is None
    target.close()


def test_a_zero_that_may_be_a_refusal_is_not_believed(
    started: list[subprocess.Popen[str]],
) -> None:
    process = start(started, "sys.exit(0)")
    target = find_target(process.pid)
    let_end(process, target)
    assert dataclasses.replace(target, owner="somebody").status() is None
    target.close()


def test_a_process_whose_main_thread_has_ended_goes_on(
    started: list[subprocess.Popen[str]],
) -> None:
    leaves = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(30,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    process = start(started, leaves)
    target = find_target(process.pid)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    stat = Path(f"/proc/{process.pid}/stat")
    end = time.monotonic() + 60
    while stat.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < end:
        time.sleep(0.01)
    assert not dataclasses.replace(target, pidfd=None).has_ended()
    target.close()
    find_target(process.pid).close()


def test_what_cannot_be_watched(started: list[subprocess.Popen[str]]) -> None:
    with pytest.raises(CannotWatch, match=r"There is no process 999999999\. List yours with: ps"):
        find_target(999999999)
    with pytest.raises(CannotWatch, match="is this stepscope itself"):
        find_target(os.getpid())
    process = start(started, "pass")
    held = find_target(process.pid)
    let_end(process, held)
    with pytest.raises(CannotWatch, match=rf"has ended already.*{os.getpid()}"):
        find_target(process.pid)
    held.close()


def test_a_thread_is_no_process() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with pytest.raises(CannotWatch, match=rf"is a thread of process {os.getpid()} \("):
            find_target(thread.native_id or 0)
    finally:
        end.set()
        thread.join()


def test_a_thread_of_the_kernel_is_no_process() -> None:
    if not Path("/proc/2/comm").exists() or Path("/proc/2/comm").read_text() != "kthreadd\n":
        pytest.skip("no thread of the kernel can be seen here")
    with pytest.raises(CannotWatch, match=r"2 is a thread of the kernel \(kthreadd\)"):
        find_target(2)


def test_no_descriptor_is_leaked(started: list[subprocess.Popen[str]]) -> None:
    process = start(started, "pass")
    before = len(os.listdir("/proc/self/fd"))
    find_target(process.pid).close()
    for pid in (os.getpid(), 999999999):
        with pytest.raises(CannotWatch):
            find_target(pid)
    with stop_requests():
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_signals_are_heard_and_given_back() -> None:
    ours = signal.getsignal(signal.SIGINT)
    with stop_requests() as stop:
        assert not select.select([stop], [], [], 0)[0]
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([stop], [], [], 5)[0]
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is ours


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not select.select([stop], [], [], 0.05)[0]
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("status", "kills", "outcome", "words"),
    [
        (0, 0, "ok", "ended normally"),
        (3 << 8, 0, "crashed", "exit code 3"),
        (9, 0, "crashed", "somebody sent it"),
        (9, 1, "host_oom", "its cgroup counted 1 OOM kill"),
        (15, 0, "interrupted", "killed by SIGTERM"),
        (1 << 8, 0, "crashed", "exit code 1"),
        (None, 2, "host_oom", "how is not known, but its cgroup counted 2 OOM kills"),
        (None, 0, "lost", "it ended, but how is not known"),
    ],
)
def test_how_it_ended(status: int | None, kills: int, outcome: str, words: str) -> None:
    ending = judge_end(status, KernelEvidence(0, 0), KernelEvidence(kills, 0), None)
    assert ending.outcome == outcome
    assert words in ending.reason
