"""What would bite, on made-up machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepscope.doctor.surroundings import (
    Condition,
    cpus,
    cuda_settings,
    disk,
    limits,
    look_around,
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


def of_level(level: str, remarks: Any) -> list[Condition]:
    return [remark for remark in remarks if remark.level == level]


def test_all_cpus_are_fine() -> None:
    assert list(cpus(machine())) == [Condition("CPUs", "64, all of them allowed")]


def test_a_quota_bites_who_counts_cpus() -> None:
    (remark,) = cpus(with_cpus(64, 4.0))
    assert remark.level == "bites"
    assert "4 of 64 allowed (cgroup quota 4)" in remark.text
    assert "num_workers=4" in remark.hint and "does not know of the quota" in remark.hint


def test_an_affinity_narrower_than_the_quota_is_named_with_it() -> None:
    (remark,) = cpus(with_cpus(2, 8.0))
    assert "affinity 2, cgroup quota 8" in remark.text
    assert "does not know" not in remark.hint


@pytest.mark.parametrize(
    ("variables", "environment", "level", "words"),
    [
        ({}, with_cpus(64, None), "note", "start 64 threads in every process"),
        ({}, with_cpus(4, None), "note", "start 4 threads in every process"),
        ({}, with_cpus(64, 4.0), "bites", "start 64 threads"),
        ({"OMP_NUM_THREADS": "16"}, with_cpus(4, None), "bites", "but 4 CPUs are allowed"),
        ({"OMP_NUM_THREADS": "4"}, with_cpus(4, None), "fine", "up to 16 threads"),
        ({"OMP_NUM_THREADS": "1"}, with_cpus(4, None), "fine", "up to 4 threads"),
        ({"MKL_NUM_THREADS": "96"}, with_cpus(64, None), "bites", "MKL_NUM_THREADS=96"),
        ({"OMP_NUM_THREADS": "4,2"}, with_cpus(4, None), "fine", "OMP_NUM_THREADS=4,2"),
    ],
)
def test_threads(
    variables: dict[str, str], environment: Environment, level: str, words: str
) -> None:
    (remark,) = threads(replace(environment, variables=variables))
    assert remark.level == level
    assert words in remark.text


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


def test_a_memory_limit_bites(tmp_path: Path) -> None:
    root = fake_meminfo(tmp_path, 200 * GIB)
    (remark,) = memory(machine(cgroup={"memory_limit_bytes": 8 * GIB}), root)
    assert remark.level == "bites"
    assert "the cgroup allows 8.59 GB of the machine's 275 GB" in remark.text


def test_little_memory_and_swap_are_noted(tmp_path: Path) -> None:
    root = fake_meminfo(tmp_path, 5 * GIB, swap_used=4 * GIB)
    tight, swap = memory(machine(), root)
    assert (tight.topic, tight.level) == ("Memory", "note")
    assert (swap.topic, swap.level) == ("Swap", "note")
    assert "4.29 GB in use" in swap.text


def test_enough_memory_is_fine(tmp_path: Path) -> None:
    (remark,) = memory(machine(), fake_meminfo(tmp_path, 200 * GIB))
    assert remark.level == "fine"


@pytest.mark.parametrize(
    ("size", "free", "level"),
    [
        (64 << 20, 64 << 20, "bites"),
        (8 * GIB, GIB // 2, "note"),
        (8 * GIB, 8 * GIB, "fine"),
        (0, 0, "fine"),
    ],
)
def test_shared_memory(size: int, free: int, level: str) -> None:
    remark = shm_remark(size, free)
    assert remark.level == level
    assert ("--shm-size" in remark.hint) == (level == "bites")


def test_no_shared_memory_bites(tmp_path: Path) -> None:
    remark = shared_memory(tmp_path)
    assert remark.level == "bites"


def test_low_limits_are_noted() -> None:
    low = {
        "nofile": {"soft": 1024},
        "nproc": {"soft": 512},
        "memlock": {"soft": 65536},
        "core": {"soft": 0},
    }
    noted = limits(machine(limits=low))
    assert "open files 1,024, processes 512" in noted.text and noted.level == "note"
    assert "ulimit -n 65536" in noted.hint and "ulimit -u 65536" in noted.hint
    assert "core dumps off" in noted.text and "65.5 kB" in noted.text
    unbound = limits(machine())
    assert "open files unlimited" in unbound.text and unbound.level == "fine"


def test_disk_looks_at_the_folder_above(tmp_path: Path) -> None:
    remark = disk(tmp_path / "not" / "there")
    assert str(tmp_path) in remark.text and "not/there" not in remark.text
    assert nearest_folder(tmp_path / "x") == tmp_path


@pytest.mark.parametrize(
    ("variables", "level", "words"),
    [
        ({"CUDA_VISIBLE_DEVICES": ""}, "bites", "(empty) hides every GPU"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "bites", "hides every GPU"),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, "fine", "the others are hidden"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "bites", "every kernel waits"),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "bites", "very slow"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "fine", "expandable_segments"),
    ],
)
def test_cuda_settings(variables: dict[str, str], level: str, words: str) -> None:
    (remark,) = cuda_settings(machine(variables=variables))
    assert remark.level == level
    assert words in remark.text


def test_cuda_settings_that_are_off_are_no_news() -> None:
    assert not list(cuda_settings(machine(variables={"CUDA_LAUNCH_BLOCKING": "0"})))


def test_neighbours_on_a_gpu() -> None:
    two = other_processes_remark("GPU 0", "NVIDIA H200", [(7, 2e9), (8, 1.1e9)], 150e9)
    assert two.level == "bites"
    assert two.text == ("GPU 0 (NVIDIA H200): 2 other processes hold 3.10 GB, 2.1 % of its memory")
    one = other_processes_remark("GPU 0", "NVIDIA H200", [(7, None)], 150e9)
    assert one.text.endswith("1 other process holds an unknown amount of memory")
    assert other_processes_remark("GPU 0", "NVIDIA H200", [], 150e9).level == "fine"


def test_an_environment_without_anything_is_survived(tmp_path: Path) -> None:
    remarks = look_around(Environment(), tmp_path, tmp_path)
    assert of_level("bites", remarks) == [shm for shm in remarks if shm.topic == "/dev/shm"]


def test_this_machine(tmp_path: Path) -> None:
    from stepscope.capture.environment import environment_record

    remarks = look_around(environment_record([], tmp_path, None), tmp_path)
    assert {"CPUs", "Memory", "/dev/shm", "Limits", "Disk", "GPUs"} <= {r.topic for r in remarks}
