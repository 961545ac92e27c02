"""The host sensor, with synthetic and real files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stepscope.sensors import procfs
from stepscope.sensors.host import HostSensor

TICKS = os.sysconf("SC_CLK_TCK")
MEMINFO = b"""\
MemTotal:       24684100 kB
MemFree:        23628832 kB
MemAvailable:   24200292 kB
Buffers:           16076 kB
Cached:           717900 kB
SwapCached:            7 kB
SwapTotal:          1000 kB
SwapFree:            400 kB
Dirty:              2512 kB
Shmem:             12772 kB
"""


def write(root: Path, files: dict[str, str | bytes]) -> str:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(root)


def pressure(some: int, full: int) -> str:
    return "".join(
        f"{kind} avg10=0.29 avg60=0.25 avg300=0.24 total={total}\n"
        for kind, total in (("some", some), ("full", full))
    )


def stat(iowait: int = 500) -> str:
    return f"cpu  100 20 30 4000 {iowait} 6 7 80 9 1\ncpu0 1 2 3 4 5 6 7 8 9 10\nintr 12\n"


@pytest.fixture
def proc(tmp_path: Path) -> str:
    files: dict[str, str | bytes] = {"stat": stat(), "meminfo": MEMINFO}
    for resource in ("cpu", "memory", "io"):
        files[f"pressure/{resource}"] = pressure(2_500_000, 1_000_000)
    return write(tmp_path, files)


def test_reads_a_synthetic_machine(proc: str) -> None:
    sensor = HostSensor(proc)
    [reading] = sensor.read()
    sensor.close()
    assert reading.entity.name == "host"
    assert reading.values == {
        "host_cpu": pytest.approx(163 / TICKS),
        "host_iowait": pytest.approx(500 / TICKS),
        "host_steal": pytest.approx(80 / TICKS),
        "host_memory": (24684100 - 24200292) * 1024,
        "host_available": 24200292 * 1024,
        "page_cache": (717900 + 16076 - 12772) * 1024,
        "dirty_pages": 2512 * 1024,
        "host_swap": 600 * 1024,
        "pressure_cpu": 2.5,
        "pressure_memory": 2.5,
        "pressure_memory_full": 1.0,
        "pressure_io": 2.5,
        "pressure_io_full": 1.0,
    }
    assert sensor.missing == {}


def test_io_wait_does_not_decrease(proc: str) -> None:
    sensor = HostSensor(proc)
    [before] = sensor.read()
    Path(proc, "stat").write_text(stat(iowait=400))
    [after] = sensor.read()
    sensor.close()
    assert after.values["host_iowait"] == before.values["host_iowait"]


def test_kernel_without_pressure_has_a_reason(proc: str) -> None:
    for resource in ("cpu", "memory", "io"):
        Path(proc, "pressure", resource).unlink()
    sensor = HostSensor(proc)
    [reading] = sensor.read()
    sensor.close()
    assert reading.values["pressure_io"] is None
    assert "PSI" in sensor.missing["pressure_io_full"]
    assert reading.values["host_cpu"] is not None


def test_pressure_disabled_at_boot_has_a_reason(proc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.pread

    def fail(descriptor: int, size: int, offset: int) -> bytes:
        if "pressure" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return read(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", fail)
    sensor = HostSensor(proc)
    [reading] = sensor.read()
    sensor.close()
    assert reading.values["pressure_cpu"] is None
    assert "not supported" in sensor.missing["pressure_cpu"]


@pytest.mark.parametrize("text", ["", "garbage\n", "cpu 1 2\n", "cpu a b c d e f g h\n"])
def test_unexpected_contents_are_missing_values(proc: str, text: str) -> None:
    Path(proc, "stat").write_text(text)
    sensor = HostSensor(proc)
    [reading] = sensor.read()
    sensor.close()
    assert reading.values["host_cpu"] is None
    assert sensor.missing["host_cpu"]
    assert reading.values["host_memory"] is not None


def test_old_kernel_without_available_memory() -> None:
    memory = procfs.parse_meminfo(MEMINFO.replace(b"MemAvailable", b"MemSomething"))
    assert (memory.available, memory.used) == (None, None)
    assert None not in (memory.page_cache, memory.dirty_pages, memory.swap_used)


def test_real_cpu_time_is_measured() -> None:
    text = Path("/proc/stat").read_bytes()
    before = procfs.parse_cpu_times(text).busy
    assert before == pytest.approx(sum(map(int, (w := text.split())[1:4] + w[6:8])) / TICKS)
    end = os.times().user + 0.1
    while os.times().user < end:
        pass
    assert procfs.parse_cpu_times(Path("/proc/stat").read_bytes()).busy - before >= 0.05
