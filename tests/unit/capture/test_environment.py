"""The environment record of a run."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stepscope.capture import environment
from stepscope.inject.masking import MASK
from stepscope.records.codec import to_json
from stepscope.sensors import procfs

SECTIONS = {
    "hostname",
    "os",
    "cpu",
    "memory",
    "storage",
    "shm",
    "cgroup",
    "limits",
    "python",
    "versions",
    "versions_of",
    "git",
    "gpus",
    "driver",
    "variables",
    "unreadable",
}


def environment_record(command: list[str], cwd: Path, pid: int | None, **root: Path) -> Any:
    """Return the record as stored in run.json."""
    return to_json(environment.environment_record(command, cwd, pid, **root))


def git(folder: Path, *words: str) -> None:
    user = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *user, *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    try:
        git(tmp_path, "init", "-b", "trunk")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("git is not available")
    (tmp_path / "train.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    return tmp_path


def test_this_machine(tmp_path: Path) -> None:
    record = environment_record([sys.executable, "train.py"], tmp_path, None)
    assert record.keys() == SECTIONS
    assert record["unreadable"] == {}
    assert json.loads(json.dumps(record)) == record
    assert 0 < record["cpu"]["allowed"] <= record["cpu"]["logical"]
    assert record["cpu"]["affinity"] == len(os.sched_getaffinity(0))
    assert record["memory"]["total_bytes"] > 1 << 28
    assert record["storage"]["mount"].startswith("/")
    assert 0 < record["storage"]["free_bytes"] <= record["storage"]["total_bytes"]
    assert record["python"]["executable"] == Path(sys.executable).name
    assert record["versions"]["numpy"]
    assert record["cgroup"]["version"] in {"v1", "v2", "hybrid", "none"}


def test_environment_record_is_fast(tmp_path: Path) -> None:
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        environment_record(["python"], tmp_path, None)
        times.append(time.perf_counter() - begin)
    print(f"environment_record: {min(times) * 1000:.1f} ms")
    assert min(times) < 1.0


def test_empty_machine_has_all_sections(tmp_path: Path) -> None:
    missing = tmp_path / "gone"
    record = environment_record([], missing, 2**22 + 1, root=tmp_path / "empty")
    assert record.keys() == SECTIONS
    assert record["unreadable"] == {}
    assert record["cpu"]["model"] is None
    assert record["memory"] == {"total_bytes": None, "swap_total_bytes": None}
    assert record["storage"]["mount"] is None
    assert record["shm"] == {"size_bytes": None}
    assert record["git"] is None
    json.dumps(record)


def test_failed_section_is_null_and_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("token=hunter2x")

    monkeypatch.setattr(environment, "_storage", fail)
    record = environment_record([], tmp_path, None)
    assert record["storage"] is None
    assert record["unreadable"] == {"storage": f"RuntimeError: token={MASK}"}


def test_git_state_with_masked_remote(repository: Path) -> None:
    git(repository, "remote", "add", "origin", "https://me:hunter2@host/x.git")
    state = environment_record([], repository, None)["git"]
    assert len(state["commit"]) == 40 and set(state["commit"]) <= set("0123456789abcdef")
    assert state["branch"] == "trunk"
    assert state["dirty"] is False
    assert state["remote"] == f"https://{MASK}@host/x.git"
    (repository / "train.py").write_text("x = 2\n")
    (repository / "inner").mkdir()
    assert environment_record([], repository / "inner", None)["git"]["dirty"] is True
    git(repository, "checkout", "--detach")
    assert environment_record([], repository, None)["git"]["branch"] is None


def test_slow_git_is_abandoned(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path_factory.mktemp("bin") / "git"
    slow.write_text("#!/bin/sh\nexec sleep 100\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(slow.parent), prepend=os.pathsep)
    monkeypatch.setattr(environment, "GIT_SECONDS", 0.2)
    begin = time.perf_counter()
    assert environment_record([], repository, None)["git"] is None
    assert time.perf_counter() - begin < 50


def test_only_training_variables_are_stored_and_masked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name not in {"PATH", "HOME"}:
            monkeypatch.delenv(name)
    kept = {
        "OMP_NUM_THREADS": "4",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "NCCL_DEBUG": "INFO",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "10.0.0.1",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "8",
        "SLURM_NTASKS": "2",
        "PYTORCH_CUDA_ALLOC_CONF": "x:1",
        "TORCHINDUCTOR_CACHE_DIR": "/c",
        "XLA_FLAGS": "--a=b",
        "PYTHONHASHSEED": "0",
    }
    for name, value in (kept | {"MY_FRANK": "no", "WANDB_API_KEY": "no", "EDITOR": "no"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "hunter2")
    monkeypatch.setenv("TORCH_HUB_URL", "https://me:pw@host/")
    variables = environment_record([], tmp_path, None)["variables"]
    masked = {"RAY_AUTH_TOKEN": MASK, "TORCH_HUB_URL": f"https://{MASK}@host/"}
    assert variables == kept | masked
    assert list(variables) == sorted(variables)


def test_variables_of_the_monitored_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        env={"OMP_NUM_THREADS": "3"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        record = environment_record([], tmp_path, child.pid)
        child.communicate(b"\n")
    assert record["variables"] == {"OMP_NUM_THREADS": "3"}


def test_unreadable_values_are_not_taken_from_the_monitor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int, which: int) -> None:
        raise PermissionError

    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(procfs, "environ", lambda pid, proc: {})
    monkeypatch.setattr(resource, "prlimit", refused)
    record = environment_record([], tmp_path, os.getpid())
    assert (record["variables"], record["limits"]) == ({}, {})


def test_versions_of_the_virtual_environment_of_the_command(tmp_path: Path) -> None:
    python = tmp_path / "venv/bin/python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    info = tmp_path / "venv/lib/python3.12/site-packages/torch-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9+cu1\n")
    record = environment_record([str(python), "train.py"], tmp_path, None)
    assert (record["versions"], record["versions_of"]) == ({"torch": "9.9+cu1"}, "command")
    assert environment_record(["no-such-program"], tmp_path, None)["versions_of"] == "monitor"


def fake(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_nvidia_gpus_without_the_library(tmp_path: Path) -> None:
    information = (
        "Model: \t\t NVIDIA H200\nIRQ:   \t\t 5\nGPU UUID: \t GPU-1-2\nBus Type: \t PCIe\n"
    )
    root = fake(
        tmp_path,
        {
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64 "
            "580.65.06  Release Build\nGCC version:  gcc version 12.2.0\n",
            "proc/driver/nvidia/gpus/0000:01:00.0/information": information,
        },
    )
    record = environment_record([], tmp_path, None, root=root)
    assert record["driver"] == "580.65.06"
    (gpu,) = record["gpus"]
    expected = {"model": "NVIDIA H200", "uuid": "GPU-1-2", "bus": "0000:01:00.0"}
    assert gpu.items() >= expected.items()


def test_processor_and_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    files = {
        "proc/cpuinfo": "model name\t: Fast CPU 9\nflags\t\t: fpu hypervisor\n",
        "etc/os-release": 'NAME="X"\nPRETTY_NAME="Some Linux 3"\n',
        ".dockerenv": "",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
    }
    for cpu in range(8):
        topology = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{topology}/thread_siblings_list"] = f"{cpu % 4},{cpu % 4 + 4}\n"
        files[f"{topology}/physical_package_id"] = f"{cpu % 2}\n"
    for node in range(2):
        files[f"sys/devices/system/node/node{node}/cpulist"] = ""
    record = environment_record([], tmp_path, None, root=fake(tmp_path, files))
    expected: dict[str, Any] = {
        "model": "Fast CPU 9",
        "physical": 4,
        "sockets": 2,
        "numa_nodes": 2,
        "governor": "powersave",
    }
    assert record["cpu"].items() >= expected.items()
    assert record["os"]["distribution"] == "Some Linux 3"
    assert record["os"]["container"] == "docker"
    assert record["os"]["virtual_machine"] is True


def test_storage_is_the_innermost_and_latest_mount(tmp_path: Path) -> None:
    data = tmp_path / "dataset"
    data.mkdir()
    escaped = str(data).replace(" ", "\\040")
    disk = tmp_path / "sys/devices/disk"
    mounts = [
        "1 0 8:1 / / rw - ext4 /dev/sda1 rw",
        f"2 1 8:2 / {tmp_path}/dat rw - ext4 /dev/wrong rw",
        f"3 1 0:9 / {escaped} rw - nfs4 server:/old rw",
        f"4 1 8:17 / {escaped} rw shared:1 - xfs /dev/sdb1 rw",
    ]
    root = fake(
        tmp_path,
        {
            "proc/self/mountinfo": "\n".join(mounts),
            "sys/devices/disk/queue/rotational": "1\n",
            "sys/devices/disk/sdb1/partition": "1\n",
        },
    )
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block/8:17").symlink_to(disk / "sdb1")
    storage = environment_record([], data, None, root=root)["storage"]
    assert (storage["mount"], storage["filesystem"]) == (str(data), "xfs")
    assert (storage["device"], storage["rotational"]) == ("/dev/sdb1", True)
