"""Checks of the machine, on synthetic machines."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.doctor.machine import (
    MachineRemark,
    ProcessLoad,
    check_machine,
    cpu_load_remark,
    cpus,
    cuda_settings,
    disk,
    limits,
    measure_cpu_load,
    memory,
    nearest_folder,
    other_processes_remark,
    shared_memory,
    shm_remark,
    threads,
)
from stepscope.records.facts import Environment
from stepscope.runs.facts import parse_facts

GIB = 1 << 30


def machine(**sections: Any) -> Environment:
    cpu = {"logical": 64, "affinity": 64, "quota": None, "allowed": 64.0}
    recorded = {
        "cpu": cpu,
        "memory": {"total_bytes": 256 * GIB},
        "cgroup": {"memory_limit_bytes": None},
        "limits": {name: {"soft": "unlimited"} for name in ("nofile", "nproc", "memlock", "core")},
        "variables": {},
        **sections,
    }
    return parse_facts({"environment": recorded}, Path("run")).environment


def with_cpus(affinity: int, quota: float | None) -> Environment:
    allowed = min(float(affinity), quota or 1e9)
    return machine(cpu={"logical": 64, "affinity": affinity, "quota": quota, "allowed": allowed})


def of_level(level: str, remarks: Any) -> list[MachineRemark]:
    return [remark for remark in remarks if remark.level == level]


def test_all_cpus_allowed() -> None:
    assert list(cpus(machine())) == [MachineRemark("CPUs", "64 of 64 allowed")]


def test_cpu_quota_is_a_problem() -> None:
    (remark,) = cpus(with_cpus(64, 4.0))
    assert remark.level == "problem"
    assert "4 of 64 allowed (cgroup quota 4)" in remark.text
    assert "num_workers=4" in remark.hint and "ignores the quota" in remark.hint


def test_affinity_and_quota_are_both_named() -> None:
    (remark,) = cpus(with_cpus(2, 8.0))
    assert "affinity 2, cgroup quota 8" in remark.text
    assert "does not include" not in remark.hint


@pytest.mark.parametrize(
    ("variables", "environment", "level", "expected"),
    [
        ({}, with_cpus(64, None), "note", "start 64 threads in every process"),
        ({}, with_cpus(4, None), "note", "start 4 threads in every process"),
        ({}, with_cpus(64, 4.0), "problem", "start 64 threads"),
        (
            {"OMP_NUM_THREADS": "16"},
            with_cpus(4, None),
            "problem",
            "number of allowed CPUs is 4",
        ),
        ({"OMP_NUM_THREADS": "4"}, with_cpus(4, None), "ok", "up to 16 threads"),
        ({"OMP_NUM_THREADS": "1"}, with_cpus(4, None), "ok", "up to 4 threads"),
        ({"MKL_NUM_THREADS": "96"}, with_cpus(64, None), "problem", "MKL_NUM_THREADS=96"),
        ({"OMP_NUM_THREADS": "4,2"}, with_cpus(4, None), "ok", "OMP_NUM_THREADS=4,2"),
    ],
)
def test_threads(
    variables: dict[str, str], environment: Environment, level: str, expected: str
) -> None:
    (remark,) = threads(replace(environment, variables=variables))
    assert remark.level == level
    assert expected in remark.text


def fake_meminfo(root: Path, available: int, swap_used: int = 0) -> Path:
    (root / "proc").mkdir(exist_ok=True)
    lines = {
        "MemTotal": 256 * GIB,
        "MemAvailable": available,
        "SwapTotal": 8 * GIB,
        "SwapFree": 8 * GIB - swap_used,
    }
    text = "".join(f"{name}: {size // 1024} kB\n" for name, size in lines.items())
    (root / "proc/meminfo").write_text(text)
    return root


def test_memory_limit_is_a_problem(tmp_path: Path) -> None:
    root = fake_meminfo(tmp_path, 200 * GIB)
    (remark,) = memory(machine(cgroup={"memory_limit_bytes": 8 * GIB}), root)
    assert remark.level == "problem"
    assert "the cgroup limit is 8.00 GiB (the machine has 256 GiB" in remark.text


def test_low_memory_and_swap_are_notes(tmp_path: Path) -> None:
    root = fake_meminfo(tmp_path, 5 * GIB, swap_used=4 * GIB)
    low, swap = memory(machine(), root)
    assert (low.topic, low.level) == ("Memory", "note")
    assert (swap.topic, swap.level) == ("Swap", "note")
    assert "4.00 GiB in use" in swap.text


def test_enough_memory_is_ok(tmp_path: Path) -> None:
    (remark,) = memory(machine(), fake_meminfo(tmp_path, 200 * GIB))
    assert remark.level == "ok"


@pytest.mark.parametrize(
    ("size", "free", "level"),
    [
        (64 << 20, 64 << 20, "problem"),
        (8 * GIB, GIB // 2, "note"),
        (8 * GIB, 8 * GIB, "ok"),
        (0, 0, "ok"),
    ],
)
def test_shared_memory(size: int, free: int, level: str) -> None:
    remark = shm_remark(size, free)
    assert remark.level == level
    assert ("--shm-size" in remark.hint) == (level == "problem")


def test_missing_shared_memory_is_a_problem(tmp_path: Path) -> None:
    remark = shared_memory(tmp_path)
    assert remark.level == "problem"


def test_low_limits_are_notes() -> None:
    low = {
        "nofile": {"soft": 1024},
        "nproc": {"soft": 512},
        "memlock": {"soft": 65536},
        "core": {"soft": 0},
    }
    low_remark = limits(machine(limits=low))
    assert "open files 1,024, processes 512" in low_remark.text and low_remark.level == "note"
    assert "ulimit -n 65536" in low_remark.hint and "ulimit -u 65536" in low_remark.hint
    assert "core dumps off" in low_remark.text and "64.0 KiB" in low_remark.text
    unlimited = limits(machine())
    assert "open files unlimited" in unlimited.text and unlimited.level == "ok"


def test_disk_uses_the_nearest_existing_folder(tmp_path: Path) -> None:
    remark = disk(tmp_path / "not" / "there")
    assert str(tmp_path) in remark.text and "not/there" not in remark.text
    assert nearest_folder(tmp_path / "x") == tmp_path


@pytest.mark.parametrize(
    ("variables", "level", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "problem", "(empty) hides all GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "problem", "hides all GPUs"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "ok", "other GPUs are hidden"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "problem", "every kernel launch blocks"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "problem", "very slow"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "ok", "expandable_segments"),
    ],
)
def test_cuda_settings(variables: dict[str, str], level: str, expected: str) -> None:
    (remark,) = cuda_settings(machine(variables=variables))
    assert remark.level == level
    assert expected in remark.text


def test_disabled_cuda_settings_are_not_reported() -> None:
    assert not list(cuda_settings(machine(variables={"CUDA_LAUNCH_BLOCKING": "0"})))


def test_other_processes_on_a_gpu() -> None:
    two = other_processes_remark("GPU 0", "NVIDIA H200", [(7, 2e9), (8, 1.1e9)], 150e9)
    assert two.level == "problem"
    assert (
        two.text == "GPU 0 (NVIDIA H200): 2 other processes use 2.89 GiB, 2.1% of the GPU's memory"
    )
    one = other_processes_remark("GPU 0", "NVIDIA H200", [(7, None)], 150e9)
    assert one.text.endswith("1 other process uses an unknown amount of memory")
    assert other_processes_remark("GPU 0", "NVIDIA H200", [], 150e9).level == "ok"


def test_empty_environment(tmp_path: Path) -> None:
    remarks = check_machine(Environment(), tmp_path, tmp_path)
    assert of_level("problem", remarks) == [shm for shm in remarks if shm.topic == "/dev/shm"]


def test_this_machine(tmp_path: Path) -> None:
    from stepscope.capture.environment import environment_record

    remarks = check_machine(environment_record([], tmp_path, None), tmp_path)
    topics = {"CPUs", "CPU load", "Memory", "/dev/shm", "Limits", "Disk", "GPUs"}
    assert topics <= {remark.topic for remark in remarks}


def load(cores: float, name: str = "python", pid: int = 4711) -> ProcessLoad:
    return ProcessLoad(name, pid, "alice", cores)


@pytest.mark.parametrize(
    ("used", "level"),
    [(0.0, "ok"), (0.2, "ok"), (0.3, "note"), (1.0, "note"), (1.1, "problem"), (2.5, "problem")],
)
def test_cpu_load_levels(used: float, level: str) -> None:
    remark = cpu_load_remark(1.5, 2, 2, 2.0, used, [load(used)])
    assert (remark.topic, remark.level) == ("CPU load", level)
    assert ("PID 4711" in remark.text) == (level != "ok")
    assert bool(remark.hint) == (level != "ok")


def test_cpu_load_names_the_three_busiest_processes() -> None:
    processes = [load(1.2), load(0.4, "dd", 12), load(0.2, "ps", 13), load(0.1, "sh", 14)]
    remark = cpu_load_remark(13.2, 2, 2, 2.0, 1.9, processes)
    assert remark.text == (
        "load average 13.2 on 2 cores; other processes use 1.9 cores: "
        "python (PID 4711, user alice, 1.2 cores), dd (PID 12, user alice, 0.4 cores), "
        "ps (PID 13, user alice, 0.2 cores)"
    )
    assert remark.hint == "Timings will vary; wait until the machine is idle"


def test_cpu_load_of_invisible_processes() -> None:
    """In a container, processes of the host are counted but not listed."""
    remark = cpu_load_remark(None, 2, 2, 2.0, 1.9, [load(0.01)])
    assert (remark.level, remark.text) == ("problem", "other processes use 1.9 cores")


def test_cpu_load_counts_only_the_allowed_cpus() -> None:
    pinned = cpu_load_remark(30.0, 64, 2, 2.0, 1.5, [])
    assert pinned.level == "problem"
    assert pinned.text == (
        "load average 30.0 on 64 cores; other processes use 1.5 of the 2 allowed cores"
    )


def test_cpu_load_leaves_room_for_a_quota() -> None:
    """With a quota of 4 of 64 cores, 20 busy cores do not matter and 62 do."""
    assert cpu_load_remark(20.0, 64, 64, 4.0, 20.0, []).level == "ok"
    assert cpu_load_remark(62.0, 64, 64, 4.0, 61.0, []).level == "note"
    assert cpu_load_remark(62.0, 64, 64, 4.0, 63.0, []).level == "problem"


@pytest.mark.quiet
def test_busy_process_is_measured() -> None:
    cpu = min(os.sched_getaffinity(0))
    code = f"import os; os.sched_setaffinity(0, {{{cpu}}}); print(flush=True)\nwhile True: pass"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as busy:
        assert busy.stdout is not None and busy.stdout.readline()
        used, processes = measure_cpu_load({cpu}, window_s=0.3)
        busy.kill()
    (measured,) = [each for each in processes if each.pid == busy.pid]
    assert measured.name.startswith("python") and measured.user
    assert measured.cores > 0.2 and used > 0.2
    assert os.getpid() not in {each.pid for each in processes}
