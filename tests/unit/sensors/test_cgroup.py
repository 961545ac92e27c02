"""Control groups: version 1, version 2, hybrid and in a container, synthetic and real."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.sensors.cgroup import Cgroup, CgroupSensor, allowed_cpus, find_cgroup

PID = 42
GIB = 1 << 30
UNLIMITED_V1 = 9223372036854771712


class FakeMachine:
    """Synthetic /proc and cgroup mounts in one folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = root / "proc"
        self.lines: list[str] = []
        self.mounts = ["22 27 0:21 / /proc rw - proc proc rw", "23 1 8:1 / / rw - ext4  rw"]

    def belongs(self, controllers: str, path: str) -> None:
        self.lines.append(f"{len(self.lines)}:{controllers}:{path}")

    def mount(self, name: str, kind: str, options: str, root: str = "/") -> Path:
        point = self.root / "cgroup" / name
        point.mkdir(parents=True, exist_ok=True)
        escaped = str(point).replace(" ", "\\040")
        self.mounts.append(f"31 23 0:28 {root} {escaped} rw shared:5 - {kind} {kind} {options}")
        return point

    def find(self) -> Cgroup:
        for pid, name, lines in (
            (str(PID), "cgroup", self.lines),
            ("self", "mountinfo", self.mounts),
        ):
            (self.proc / pid).mkdir(parents=True, exist_ok=True)
            (self.proc / pid / name).write_text("\n".join(lines) + "\n")
        return find_cgroup(PID, str(self.proc))


def fill(group: Path, **files: str | int) -> Path:
    """Write files of a group; the first `_` becomes a dot: memory_max is memory.max."""
    group.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (group / name.replace("_", ".", 1)).write_text(f"{content}\n")
    return group


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def v2(machine: FakeMachine, path: str = "/user/job", root: str = "/") -> Path:
    machine.belongs("", path)
    return machine.mount("v2", "cgroup2", "rw,nsdelegate", root)


V2_FILES: dict[str, str | int] = {
    "memory_current": 1000,
    "memory_events": "low 0\nhigh 0\nmax 3\noom 2\noom_kill 2\noom_group_kill 0",
    "cpu_stat": "usage_usec 2500000\nuser_usec 1\nthrottled_usec 500000",
}


def v1(machine: FakeMachine, path: str, root: str = "/") -> tuple[Path, Path]:
    machine.belongs("cpu,cpuacct", path)
    machine.belongs("memory", path)
    cpu = machine.mount("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct", root)
    return cpu, machine.mount("memory", "cgroup", "rw,memory", root)


V1_CPU: dict[str, str | int] = {
    "cpuacct_usage": 2500000000,
    "cpu_stat": "nr_periods 9\nnr_throttled 3\nthrottled_time 500000000",
    "cpu_cfs_quota_us": -1,
    "cpu_cfs_period_us": 100000,
}
V1_MEMORY: dict[str, str | int] = {
    "memory_usage_in_bytes": 1000,
    "memory_limit_in_bytes": UNLIMITED_V1,
    "memory_oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2",
}
USED = {
    "cgroup_cpu": 2.5,
    "cgroup_throttled": 0.5,
    "cgroup_memory": 1000,
    "cgroup_oom_kills": 2,
}


def test_v2_reads_its_group_and_the_lowest_limits(machine: FakeMachine) -> None:
    point = v2(machine)
    fill(point / "user/job", **V2_FILES, memory_max="max", cpu_max="max 100000")
    fill(point / "user", memory_max=4 * GIB, cpu_max="150000 100000")
    cgroup = machine.find()
    assert cgroup.version == "v2"
    assert set(cgroup.paths.values()) == {str(point / "user/job")}
    assert cgroup.memory_limit() == 4 * GIB
    assert cgroup.cpu_quota() == 1.5
    assert cgroup.oom_kills() == 2
    sensor = CgroupSensor(cgroup)
    [reading] = sensor.read()
    sensor.close()
    assert reading.values == USED | {"cgroup_memory_limit": 4 * GIB}


def test_v2_root_group_has_reasons_for_missing_memory(machine: FakeMachine) -> None:
    point = v2(machine, "/")
    fill(point, cpu_stat="usage_usec 2500000")
    sensor = CgroupSensor(machine.find())
    [reading] = sensor.read()
    sensor.close()
    assert reading.values == dict.fromkeys(sensor.metrics) | {"cgroup_cpu": 2.5}
    assert "root cgroup" in sensor.missing["cgroup_memory"]
    assert "root cgroup" in sensor.missing["cgroup_oom_kills"]
    assert sensor.missing.keys() == set(sensor.metrics) - {"cgroup_cpu"}


def test_v1_reads_each_hierarchy(machine: FakeMachine) -> None:
    cpu, memory = v1(machine, "/slurm/job_7")
    fill(cpu / "slurm/job_7", **V1_CPU)
    fill(cpu / "slurm", cpu_cfs_quota_us=50000, cpu_cfs_period_us=100000)
    fill(memory / "slurm/job_7", **V1_MEMORY)
    fill(memory / "slurm", memory_limit_in_bytes=2 * GIB)
    fill(memory, memory_limit_in_bytes=UNLIMITED_V1)
    cgroup = machine.find()
    assert cgroup.version == "v1"
    assert cgroup.memory_limit() == 2 * GIB
    assert cgroup.cpu_quota() == 0.5
    sensor = CgroupSensor(cgroup)
    [reading] = sensor.read()
    sensor.close()
    assert reading.values == USED | {"cgroup_memory_limit": 2 * GIB}


def test_v1_without_limits(machine: FakeMachine) -> None:
    cpu, memory = v1(machine, "/")
    fill(cpu, **V1_CPU)
    fill(memory, **V1_MEMORY)
    cgroup = machine.find()
    assert cgroup.memory_limit() is None
    assert cgroup.cpu_quota() is None
    sensor = CgroupSensor(cgroup)
    [reading] = sensor.read()
    sensor.close()
    assert reading.values["cgroup_memory_limit"] is None
    assert sensor.missing == {"cgroup_memory_limit": "no memory limit is set"}


def test_v1_reads_limits_of_ancestors_hidden_in_a_container(machine: FakeMachine) -> None:
    _, memory = v1(machine, "/docker/abc", root="/docker/abc")
    fill(memory, **V1_MEMORY, memory_stat=f"cache 1\nhierarchical_memory_limit {GIB}")
    assert machine.find().memory_limit() == GIB


def test_hybrid_uses_the_v1_controllers(machine: FakeMachine) -> None:
    cpu, memory = v1(machine, "/a")
    machine.belongs("", "/init.scope")
    fill(machine.mount("unified", "cgroup2", "rw") / "init.scope", cpu_stat="usage_usec 1")
    fill(cpu / "a", **V1_CPU)
    fill(memory / "a", **V1_MEMORY)
    cgroup = machine.find()
    assert cgroup.version == "hybrid"
    assert cgroup.paths["memory"] == str(memory / "a")


def test_hybrid_with_memory_in_v2(machine: FakeMachine) -> None:
    machine.belongs("cpu,cpuacct", "/a")
    cpu = fill(machine.mount("cpu", "cgroup", "rw,cpu,cpuacct") / "a", **V1_CPU)
    job = fill(v2(machine) / "user/job", memory_current=1000, memory_max=GIB)
    cgroup = machine.find()
    assert cgroup.paths == {"cpu": str(cpu), "cpuacct": str(cpu), "memory": str(job)}
    assert cgroup.version == "hybrid"
    assert cgroup.memory_limit() == GIB


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/docker/abc", "/docker/abc", ""),  # a container without a cgroup namespace
        ("/docker/abc/job", "/docker/abc", "job"),
        ("/", "/", ""),  # a container with one
        ("/../other", "/", ""),  # a process outside our cgroup namespace
        ("/docker/abcdef", "/docker/abc", ""),  # same prefix, not a descendant
        ("/kubepods/pod1/gone", "/", ""),  # a path in another namespace that does not exist here
        ("/../other/job", "/../other", "job"),
    ],
)
def test_containers(machine: FakeMachine, path: str, root: str, expected: str) -> None:
    point = v2(machine, path, root)
    fill(point / "job", **V2_FILES)
    assert machine.find().paths["memory"] == str(point / expected)


def test_the_mount_that_contains_the_group_is_used(machine: FakeMachine) -> None:
    machine.mount("elsewhere", "cgroup2", "rw", root="/other")
    job = fill(v2(machine) / "user/job", **V2_FILES)
    assert machine.find().paths["cpu"] == str(job)


def test_mount_point_with_blanks(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path / "a b")
    job = fill(v2(machine) / "user/job", **V2_FILES)
    assert machine.find().paths["cpu"] == str(job)


def test_missing_process_and_missing_mount_have_reasons(tmp_path: Path) -> None:
    nothing = find_cgroup(PID, str(tmp_path))
    assert nothing.version == "none"
    assert "No such file" in nothing.reason
    unmounted = FakeMachine(tmp_path)
    unmounted.belongs("", "/")
    cgroup = unmounted.find()
    assert cgroup.reason == "no cgroup file system is mounted"
    assert cgroup.describe().memory_limit_bytes is None
    sensor = CgroupSensor(cgroup)
    assert sensor.read() == []
    assert sensor.missing.keys() == set(sensor.metrics)


def test_the_limit_is_read_again(machine: FakeMachine) -> None:
    job = fill(v2(machine) / "user/job", **V2_FILES, memory_max=GIB)
    sensor = CgroupSensor(machine.find())
    assert sensor.read()[0].values["cgroup_memory_limit"] == GIB
    fill(job, memory_max=2 * GIB)
    limits = [sensor.read()[0].values["cgroup_memory_limit"] for _ in range(sensor.LIMIT_EVERY)]
    sensor.close()
    assert limits[-1] == 2 * GIB


def test_old_kernel_without_oom_kill_counter(machine: FakeMachine) -> None:
    cpu, memory = v1(machine, "/")
    fill(cpu, **V1_CPU)
    fill(memory, **V1_MEMORY | {"memory_oom_control": "oom_kill_disable 0\nunder_oom 0"})
    cgroup = machine.find()
    sensor = CgroupSensor(cgroup)
    [reading] = sensor.read()
    sensor.close()
    assert cgroup.oom_kills() is None
    assert reading.values["cgroup_oom_kills"] is None
    assert "does not contain" in sensor.missing["cgroup_oom_kills"]


def test_allowed_cpus_is_the_lower_of_affinity_and_quota(machine: FakeMachine) -> None:
    mine = len(os.sched_getaffinity(0))
    assert allowed_cpus(os.getpid()) == mine
    job = fill(v2(machine) / "user/job", cpu_max="25000 100000")
    assert allowed_cpus(os.getpid(), machine.find()) == 0.25
    fill(job, cpu_max="90000000 100000")
    assert allowed_cpus(os.getpid(), machine.find()) == mine
    assert allowed_cpus(2**22 + 1, None) == os.cpu_count()


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A new memory group next to our own, if that is permitted."""
    try:
        own = find_cgroup(os.getpid()).groups["memory"]
        group = own.top / f"stepscope-test-{os.getpid()}"
        group.mkdir()
    except (KeyError, OSError) as error:
        pytest.skip(f"cannot create a memory cgroup: {error}")
    file = "memory.max" if own.version == 2 else "memory.limit_in_bytes"
    try:
        (group / file).write_text(str(64 << 20))
    except OSError as error:
        group.rmdir()
        pytest.skip(f"cannot set a memory limit: {error}")
    yield group
    if group.is_dir():
        group.rmdir()


HOLD = "import sys; data = b'x' * (16 << 20); print('ready', flush=True); sys.stdin.read()"
EAT = "data = []\nwhile True: data.append(b'x' * (4 << 20))"


def start_in(group: Path, code: str) -> subprocess.Popen[str]:
    """Start a child that enters the group before it runs its code."""
    entering = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    return subprocess.Popen(
        [sys.executable, "-c", entering + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_real_group_is_found_and_may_be_removed(real_group: Path) -> None:
    with start_in(real_group, HOLD) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "ready\n"
        cgroup = find_cgroup(child.pid)
        sensor = CgroupSensor(cgroup)
        [reading] = sensor.read()
        child.stdin.close()
    assert cgroup.paths["memory"] == str(real_group)
    assert cgroup.memory_limit() == 64 << 20
    assert (reading.values["cgroup_memory"] or 0) > 16 << 20
    real_group.rmdir()
    [removed] = sensor.read()
    sensor.close()
    assert removed.values["cgroup_memory"] is None
    assert sensor.missing["cgroup_memory"]
    assert cgroup.oom_kills() is None


def test_real_oom_kill_is_counted(real_group: Path) -> None:
    with start_in(real_group, "import sys; sys.stdin.readline()\n" + EAT) as child:
        cgroup = find_cgroup(child.pid)
        while cgroup.paths["memory"] != str(real_group):
            cgroup = find_cgroup(child.pid)
        assert cgroup.oom_kills() == 0
        child.communicate("go\n", timeout=30)
    assert child.returncode == -9
    assert cgroup.oom_kills() == 1
