"""Whether the monitor of a run is still running."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.records.facts import ProcessIdentity
from stepscope.runs.facts import identity_of_self, is_alive

UNUSED_PID = 2**22 + 1
"""A pid above the maximum."""


def test_process_of_this_namespace(tmp_path: Path) -> None:
    me = identity_of_self()
    assert is_alive(me, tmp_path)
    assert is_alive(replace(me, pid_namespace=None), tmp_path), "a folder of an older version"
    assert not is_alive(replace(me, pid=UNUSED_PID), tmp_path)
    assert not is_alive(replace(me, started_ticks=1), tmp_path)


@pytest.mark.parametrize("elsewhere", [{"pid_namespace": "pid:[1]"}, {"boot_id": "another"}])
def test_process_of_another_container_or_machine(tmp_path: Path, elsewhere: dict[str, str]) -> None:
    monitor: ProcessIdentity = replace(identity_of_self(), pid=UNUSED_PID, **elsewhere)
    assert not is_alive(monitor, tmp_path)
    stream = tmp_path / "process.arrows"
    stream.touch()
    (tmp_path / "process.0.arrows").symlink_to("packed in the meantime")
    assert is_alive(monitor, tmp_path)
    os.utime(stream, (0, 0))
    assert not is_alive(monitor, tmp_path)
