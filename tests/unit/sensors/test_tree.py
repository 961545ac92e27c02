"""The process tree, with real processes that are read at inconvenient moments."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.sensors import procfs
from stepscope.sensors.process import UsageSensor
from stepscope.sensors.tree import ProcessTree

_BURN_S = 0.3


@contextmanager
def late_worker() -> Iterator[tuple[int, int]]:
    """A process that renames itself to a loader worker on request and then uses CPU time. Yields
    its pid and the descriptor to write the request to."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reader, 1)
        Path("/proc/self/comm").write_text("pt_data_worker")
        end = time.process_time() + _BURN_S
        while time.process_time() < end:
            pass
        time.sleep(60)
        os._exit(0)
    try:
        yield child, writer
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_role_follows_a_later_rename() -> None:
    tree = ProcessTree(os.getpid())
    sensor = UsageSensor(tree, started_here=False)
    with late_worker() as (child, writer):
        sensor.account(thorough=True)
        assert tree.processes[child].role == "other"
        os.write(writer, b"!")
        while procfs.name(child) != "pt_data_worker":
            time.sleep(0.01)
        sensor.account()
        assert tree.processes[child].role == "worker"
        while time.clock_gettime(tree.processes[child].clock) < _BURN_S:
            time.sleep(0.02)
        sensor.account()
        assert sensor.cpu.totals["worker"] > 0.6 * _BURN_S
    tree.close()


def test_processes_beyond_the_limit_of_open_files() -> None:
    tree = ProcessTree(os.getpid())
    sensor = UsageSensor(tree, started_here=False)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with late_worker() as (child, _):
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
        try:
            sensor.account(thorough=True)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert child not in tree.processes and os.getpid() in tree.processes
        assert sensor.notes == ["Some processes are not monitored: Too many open files"]
    tree.close()
