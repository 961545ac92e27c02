"""The processes of a tree, by real ones that are seen at awkward moments."""

from __future__ import annotations

import os
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
    """A process that takes the name of a loader worker once it is told to, and then works; its
    pid, and where to tell it."""
    heard, told = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(heard, 1)
        Path("/proc/self/comm").write_text("pt_data_worker")
        end = time.process_time() + _BURN_S
        while time.process_time() < end:
            pass
        time.sleep(60)
        os._exit(0)
    try:
        yield child, told
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(heard)
        os.close(told)


def test_a_process_seen_before_it_takes_its_name_gets_its_role_with_the_next_look() -> None:
    tree = ProcessTree(os.getpid())
    sensor = UsageSensor(tree, born_here=False)
    with late_worker() as (child, told):
        sensor.account(thorough=True)
        assert tree.processes[child].role == "other"
        os.write(told, b"!")
        while procfs.name(child) != "pt_data_worker":
            time.sleep(0.01)
        sensor.account()
        assert tree.processes[child].role == "worker"
        while time.clock_gettime(tree.processes[child].clock) < _BURN_S:
            time.sleep(0.02)
        sensor.account()
        assert sensor.cpu.totals["worker"] > 0.6 * _BURN_S
    tree.close()
