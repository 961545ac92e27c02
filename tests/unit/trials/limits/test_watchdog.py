"""The soft memory limit: shared pages count once, and exceeding the limit is detected."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from stepscope.sensors import procfs
from stepscope.trials.limits import enforcement
from stepscope.trials.limits.enforcement import Watchdog
from stepscope.trials.outcome import Stopped

MIB = 1 << 20

PAGE = os.sysconf("SC_PAGE_SIZE")
FAMILY = f"""
import mmap, os, sys
data = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
for place in range(0, len(data), {PAGE}): data[place] = 1
pids = []
for _ in range(3):
    pid = os.fork()
    if pid == 0:
        sum(data[place] for place in range(0, len(data), {PAGE}))
        print("ready", flush=True)
        os.read(0, 1)
        more = bytearray(b"x" * (96 << 20))
        print("grown", flush=True)
        os.read(0, 1)
        os._exit(0)
    pids.append(pid)
print(*pids, flush=True)
for pid in pids: os.waitpid(pid, 0)
"""


@pytest.fixture
def family() -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process with 64 MiB and three forks that share them."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", FAMILY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(4)]
    [children] = [line for line in lines if line != "ready\n"]
    yield process, [process.pid, *map(int, children.split())]
    process.communicate("xxxxxx")


def inspect_for(watchdog: Watchdog, pids: list[int], seconds: float) -> Stopped | None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if breach := watchdog.inspect(pids):
            return breach
        time.sleep(0.02)
    return None


def test_shared_pages_count_once_and_growth_exceeds_the_limit(
    family: tuple[subprocess.Popen[str], list[int]],
) -> None:
    process, pids = family
    assert process.stdin is not None and process.stdout is not None
    watchdog = Watchdog(150 * MIB)  # the sum of the resident sizes is 4 times 64 MiB
    assert inspect_for(watchdog, pids, 0.3) is None
    process.stdin.write("x")
    process.stdin.flush()
    assert process.stdout.readline() == "grown\n"
    breach = inspect_for(watchdog, pids, 30)
    assert breach is not None
    assert "memory limit of 150 MiB" in breach.reason
    assert 150 * MIB < breach.evidence["pss"] < 220 * MIB < breach.evidence["rss"]
    assert max(breach.evidence["largest"].values()) > 96 * MIB


def test_proportional_memory_is_read_only_if_needed(
    family: tuple[subprocess.Popen[str], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pids = family
    reads: list[int] = []
    read = procfs.proportional_memory

    def reading(pid: int) -> procfs.ProportionalMemory | None:
        reads.append(pid)
        return read(pid)

    monkeypatch.setattr(procfs, "proportional_memory", reading)
    monkeypatch.setattr(enforcement, "_MAX_PSS_SHARE", 1e9)
    Watchdog(1 << 40).inspect(pids)
    assert reads == []
    watchdog = Watchdog(150 * MIB)
    for _ in range(5):
        assert watchdog.inspect(pids) is None
    assert reads == pids  # once: nothing has grown since


def test_exited_process_uses_no_memory() -> None:
    assert Watchdog(1).inspect([2**22 + 1]) is None
