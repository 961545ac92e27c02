"""The /dev/shm sensor."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepscope.sensors.host import ShmSensor


def test_file_in_shared_memory_is_counted() -> None:
    path = Path(f"/dev/shm/stepscope-test-{os.getpid()}")
    if not os.access(path.parent, os.W_OK):
        pytest.skip("/dev/shm is not writable")
    sensor = ShmSensor()
    [before] = sensor.read()
    try:
        path.write_bytes(b"x" * (8 << 20))
        [after] = sensor.read()
    finally:
        path.unlink(missing_ok=True)
    used_before, used_after = before.values["shm_used"], after.values["shm_used"]
    assert used_before is not None and used_after is not None
    assert used_after - used_before >= 7 << 20
    assert after.values["shm_size"] == before.values["shm_size"]


def test_missing_shared_memory_has_a_reason(tmp_path: Path) -> None:
    sensor = ShmSensor(str(tmp_path / "shm"))
    assert sensor.read() == []
    assert "No such file" in sensor.missing["shm_used"]


def test_shared_memory_without_a_size_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = SimpleNamespace(f_blocks=0, f_bfree=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: nothing)
    sensor = ShmSensor()
    assert sensor.read() == []
    assert "without a size" in sensor.missing["shm_size"]
