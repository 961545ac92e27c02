"""OOM kills are reported with the count of the cgroup, also if only a worker was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import STEPSCOPE
from stepscope.opened_run import open_run
from stepscope.runs.reader import latest_run
from stepscope.sensors.cgroup import find_cgroup

LIMIT = 400 << 20

ALLOCATE = "data = []\nwhile True: data.append(bytearray(b'x' * (8 << 20)))"
WORKER_ALLOCATES = f"""
import os, sys
if os.fork() == 0:
    {ALLOCATE.replace(chr(10), chr(10) + "    ")}
_, status = os.wait()
sys.exit(1 if status else 0)
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A cgroup with a memory limit, if it can be created."""
    try:
        own = find_cgroup(os.getpid()).groups["memory"]
        group = own.top / f"stepscope-oom-{os.getpid()}"
        group.mkdir()
        names = ("memory.max", "memory.swap.max")
        if own.version == 1:
            names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        (group / names[0]).write_text(str(LIMIT))
        if (group / names[1]).exists():
            (group / names[1]).write_text("0" if own.version == 2 else str(LIMIT))
    except (KeyError, OSError) as error:
        pytest.skip(f"cannot create a memory cgroup: {error}")
    yield group
    group.rmdir()


@pytest.mark.parametrize("program", [ALLOCATE, WORKER_ALLOCATES], ids=["main", "worker"])
def test_host_oom(
    group: Path, python_file: Callable[[str], str], tmp_path: Path, program: str
) -> None:
    enter = f"echo $$ > {group}/cgroup.procs && exec "
    command = [
        *STEPSCOPE,
        "run",
        "--out",
        str(tmp_path / "runs"),
        "--",
        sys.executable,
        "-S",
        python_file(program),
    ]
    done = subprocess.run(
        ["sh", "-c", enter + " ".join(command)], capture_output=True, text=True, timeout=60
    )

    run = open_run(latest_run(tmp_path / "runs"))
    assert run.exit_status.outcome == "host_oom", (run.exit_status, done.stderr)
    assert "1 OOM kill was recorded in its cgroup" in run.exit_status.reason
    assert "host_oom" in done.stderr
    peak = max(s.max for s in run.summary().statistics if s.metric == "cgroup_memory")
    limit = max(s.max for s in run.summary().statistics if s.metric == "cgroup_memory_limit")
    assert limit == LIMIT
    assert peak <= LIMIT * 1.05
