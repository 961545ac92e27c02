"""Attaching to running processes: which can be monitored, and how their exit is judged."""

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

from stepscope.capture.attach import judge_exit, stop_requests
from stepscope.capture.outcome import KernelEvidence
from stepscope.capture.target import Target, find_target
from stepscope.errors import MonitorError
from stepscope.inject.events import FOLDER_VARIABLE
from stepscope.sensors import procfs

KERNEL = tuple(int(word) for word in platform.release().split("-")[0].split(".")[:2])
PIDFD_HAS_STATUS = KERNEL >= (6, 15)

WAIT_FOR_INPUT = "import sys; sys.stdin.readline(); "


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def start(started: list[subprocess.Popen[str]], code: str, **more: str) -> subprocess.Popen[str]:
    """Start a child that runs the code after a line of input."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT_FOR_INPUT + code],
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, **more},
    )
    started.append(process)
    while not procfs.command_line(process.pid):  # the exec may not be complete yet
        time.sleep(0.001)
    return process


def let_exit(process: subprocess.Popen[str], target: Target) -> None:
    """Let the child exit and stay a zombie."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.close()
    process.stdin = None
    assert target.pidfd is not None
    assert select.select([target.pidfd], [], [], 20)[0]


def test_find_target(started: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    events = tmp_path / "run" / "events"
    process = start(started, "pass", **{FOLDER_VARIABLE: str(events)})
    target = find_target(process.pid)
    assert target.command == [sys.executable, "-c", WAIT_FOR_INPUT + "pass"]
    assert target.cwd == Path.cwd()
    assert target.owner is None
    assert target.reports_to == tmp_path / "run"
    assert not target.has_exited()
    target.close()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("sys.exit(0)", 0),
        ("sys.exit(3)", 3 << 8),
        ("import os; os.kill(os.getpid(), 9)", signal.SIGKILL),
    ],
)
def test_status_of_a_zombie(started: list[subprocess.Popen[str]], code: str, status: int) -> None:
    process = start(started, code)
    target = find_target(process.pid)
    let_exit(process, target)
    assert target.has_exited()
    assert target.status() == status
    target.close()


def test_status_of_a_reaped_process_needs_a_new_kernel(
    started: list[subprocess.Popen[str]],
) -> None:
    process = start(started, "sys.exit(3)")
    target = find_target(process.pid)
    let_exit(process, target)
    process.wait()
    assert target.has_exited()
    assert target.status() == (3 << 8 if PIDFD_HAS_STATUS else None)
    without = dataclasses.replace(target, pidfd=None)
    assert without.has_exited()
    assert without.status() is None
    target.close()


def test_zero_without_permission_is_unknown(
    started: list[subprocess.Popen[str]],
) -> None:
    process = start(started, "sys.exit(0)")
    target = find_target(process.pid)
    let_exit(process, target)
    assert dataclasses.replace(target, owner="another user").status() is None
    target.close()


def test_process_runs_on_after_its_main_thread_exits(
    started: list[subprocess.Popen[str]],
) -> None:
    code = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(30,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""
    process = start(started, code)
    target = find_target(process.pid)
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    stat = Path(f"/proc/{process.pid}/stat")
    end = time.monotonic() + 60
    while stat.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < end:
        time.sleep(0.01)
    assert not dataclasses.replace(target, pidfd=None).has_exited()
    target.close()
    find_target(process.pid).close()


def test_processes_that_cannot_be_monitored(started: list[subprocess.Popen[str]]) -> None:
    with pytest.raises(
        MonitorError, match=r"There is no process 999999999\. List your processes with `ps"
    ):
        find_target(999999999)
    with pytest.raises(MonitorError, match="is stepscope itself"):
        find_target(os.getpid())
    process = start(started, "pass")
    held = find_target(process.pid)
    let_exit(process, held)
    with pytest.raises(MonitorError, match=rf"has already exited.*{os.getpid()}"):
        find_target(process.pid)
    held.close()


def test_thread_id_is_rejected() -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        with pytest.raises(MonitorError, match=rf"is a thread of process {os.getpid()} \("):
            find_target(thread.native_id or 0)
    finally:
        end.set()
        thread.join()


def test_kernel_thread_is_rejected() -> None:
    if not Path("/proc/2/comm").exists() or Path("/proc/2/comm").read_text() != "kthreadd\n":
        pytest.skip("kernel threads are not visible here")
    with pytest.raises(MonitorError, match=r"2 is a kernel thread \(kthreadd\)"):
        find_target(2)


def test_descriptors_are_closed(started: list[subprocess.Popen[str]]) -> None:
    process = start(started, "pass")
    before = len(os.listdir("/proc/self/fd"))
    find_target(process.pid).close()
    for pid in (os.getpid(), 999999999):
        with pytest.raises(MonitorError):
            find_target(pid)
    with stop_requests():
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_signal_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGINT)
    with stop_requests() as stop:
        assert not select.select([stop], [], [], 0)[0]
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([stop], [], [], 5)[0]
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_ignored_signals_stay_ignored() -> None:
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
        (0, 0, "ok", "exited normally"),
        (3 << 8, 0, "crashed", "exit code 3"),
        (9, 0, "crashed", "another process probably sent the signal"),
        (9, 1, "host_oom", "1 OOM kill was recorded in its cgroup"),
        (15, 0, "interrupted", "killed by SIGTERM"),
        (1 << 8, 0, "crashed", "exit code 1"),
        (None, 2, "host_oom", "unknown exit code; 2 OOM kills were recorded in its cgroup"),
        (None, 0, "lost", "unknown exit code"),
    ],
)
def test_judge_exit(status: int | None, kills: int, outcome: str, words: str) -> None:
    exit_status = judge_exit(status, KernelEvidence(0, 0), KernelEvidence(kills, 0), None)
    assert exit_status.outcome == outcome
    assert words in exit_status.reason
