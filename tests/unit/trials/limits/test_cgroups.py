"""Control groups of trials: synthetic ones of both versions, and real ones of this machine."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runners import PYTHON, SLEEPS, exited_runner, hide_from_other_tests
from stepscope.sensors.cgroup import Cgroup, Group, find_cgroup
from stepscope.trials.limits import cgroups
from stepscope.trials.limits.cgroups import (
    PREFIX,
    GroupCounts,
    Refused,
    TrialGroup,
    make_group,
    remove_groups,
    stale_groups,
)
from stepscope.trials.processes import trial_processes

MIB = 1 << 20
FORKS = """
import os, time
while True:
    if os.fork() == 0:
        time.sleep(0.3)
        os._exit(0)
    time.sleep(0.005)
"""


def folder_v2(path: Path, controllers: str = "cpu memory pids", enabled: str = "") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "cgroup.controllers").write_text(f"{controllers}\n")
    (path / "cgroup.subtree_control").write_text(f"{enabled}\n")
    (path / "cgroup.procs").write_text("")
    return path


def busy(path: Path) -> None:
    """Make enabling controllers fail, as in a group with processes."""
    (path / "cgroup.subtree_control").unlink()
    (path / "cgroup.subtree_control").mkdir()


def own_v2(path: Path, top: Path) -> Cgroup:
    return Cgroup(dict.fromkeys(("cpu", "memory"), Group(2, path, top)))


def made(group: TrialGroup | Refused) -> TrialGroup:
    assert isinstance(group, TrialGroup), group
    return group


def test_v2_in_the_root_group(tmp_path: Path) -> None:
    top = folder_v2(tmp_path)
    group = made(make_group("x", 512 * MIB, 1.5, own_v2(top, top)))
    assert group.folders == (top / "x",) and group.version == "cgroup v2"
    assert (top / "cgroup.subtree_control").read_text() == "+memory +cpu"
    assert (top / "x/memory.max").read_text() == str(512 * MIB)
    assert (top / "x/memory.swap.max").read_text() == "0"
    assert (top / "x/cpu.max").read_text() == "150000 100000"
    assert not (top / "x/memory.oom.group").exists()  # the OOM killer may kill a single worker
    group.place(4711)
    assert (top / "x/cgroup.procs").read_text() == "4711"


def test_v1_process_is_moved_back_if_it_cannot_enter_all_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for controller in ("memory", "cpu"):
        (tmp_path / controller / "x").mkdir(parents=True)
    (tmp_path / "cpu/x/cgroup.procs").mkdir()  # cannot be written
    own = {name: Group(1, tmp_path / name, tmp_path / name) for name in ("memory", "cpu")}
    monkeypatch.setattr(cgroups, "find_cgroup", lambda pid: Cgroup(own))
    groups = {name: Group(1, tmp_path / name / "x", tmp_path / name) for name in own}
    with pytest.raises(OSError):
        TrialGroup(Cgroup(groups)).place(4711)
    assert (tmp_path / "memory/cgroup.procs").read_text() == "4711"
    assert not (tmp_path / "cpu/cgroup.procs").exists()


def test_v2_uses_an_ancestor_if_our_group_has_processes(tmp_path: Path) -> None:
    top = folder_v2(tmp_path, enabled="memory")
    slice_ = folder_v2(top / "app.slice", enabled="cpu memory")
    shell = folder_v2(slice_ / "shell.scope")
    busy(shell)
    group = made(make_group("x", 512 * MIB, None, own_v2(shell, top)))
    assert group.folders == (slice_ / "x",)
    assert not (shell / "x").exists()
    assert (slice_ / "cgroup.subtree_control").read_text() == "cpu memory\n"  # unchanged
    assert group.controllers == {"memory"}
    assert group.cgroup.memory_limit() == 512 * MIB


def test_v2_enables_a_controller_in_the_ancestors(tmp_path: Path) -> None:
    top = folder_v2(tmp_path, enabled="memory cpu")
    service = folder_v2(top / "user.service", enabled="memory")
    slice_ = folder_v2(service / "app.slice", controllers="memory", enabled="memory")
    shell = folder_v2(slice_ / "shell.scope", controllers="memory")
    busy(shell)
    group = made(make_group("x", None, 0.5, own_v2(shell, top)))
    assert group.folders == (slice_ / "x",)
    assert (service / "cgroup.subtree_control").read_text() == "+cpu"
    assert (slice_ / "cgroup.subtree_control").read_text() == "+cpu"
    assert (slice_ / "x/cpu.max").read_text() == "50000 100000"


def test_v2_keeps_current_limits(tmp_path: Path) -> None:
    top = folder_v2(tmp_path, enabled="memory cpu")
    shell = folder_v2(top / "limited.scope")
    busy(shell)
    (shell / "memory.max").write_text(str(256 * MIB))
    (shell / "cpu.max").write_text("50000 100000")
    group = made(make_group("x", 512 * MIB, None, own_v2(shell, top)))
    assert (top / "x/memory.max").read_text() == str(256 * MIB)
    assert (top / "x/cpu.max").read_text() == "50000 100000"
    assert group.controllers == {"memory", "cpu"}


def test_v2_refusal_has_a_reason_and_leaves_nothing(tmp_path: Path) -> None:
    top = folder_v2(tmp_path)
    shell = folder_v2(top / "shell.scope")
    busy(shell)
    busy(top)
    refused = make_group("x", 512 * MIB, None, own_v2(shell, top))
    assert refused == Refused("Is a directory")
    assert list(tmp_path.glob("**/x")) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root has all permissions")
def test_missing_permission_is_the_reason(tmp_path: Path) -> None:
    top = folder_v2(tmp_path, enabled="memory")
    top.chmod(0o555)
    refused = make_group("x", 512 * MIB, None, own_v2(top, top))
    top.chmod(0o755)
    assert refused == Refused("no permission to create a cgroup")


def test_v1_creates_a_group_per_controller(tmp_path: Path) -> None:
    memory, cpu = tmp_path / "memory", tmp_path / "cpu"
    for folder in (memory / "job", cpu):
        folder.mkdir(parents=True)
        (folder / "cgroup.procs").write_text("")
    own = Cgroup({"memory": Group(1, memory / "job", memory), "cpu": Group(1, cpu, cpu)})
    group = made(make_group("x", 512 * MIB, 1.5, own))
    assert set(group.folders) == {memory / "job/x", cpu / "x"}
    assert (memory / "job/x/memory.limit_in_bytes").read_text() == str(512 * MIB)
    assert (memory / "job/x/memory.memsw.limit_in_bytes").read_text() == str(512 * MIB)
    assert (cpu / "x/cpu.cfs_quota_us").read_text() == "150000"
    assert (cpu / "x/cpu.cfs_period_us").read_text() == "100000"
    group.place(4711)
    assert {(folder / "cgroup.procs").read_text() for folder in group.folders} == {"4711"}
    only_memory = made(make_group("y", 512 * MIB, None, own))
    assert only_memory.folders == (memory / "job/y",)


def test_v2_group_without_limits_enables_no_controller(tmp_path: Path) -> None:
    """Even if our own group has limits: they apply to its children."""
    top = folder_v2(tmp_path, enabled="memory cpu")
    shell = folder_v2(top / "limited.scope")
    busy(shell)
    (shell / "memory.max").write_text(str(256 * MIB))
    group = made(make_group("x", None, None, Cgroup({"unified": Group(2, shell, top)})))
    assert group.folders == (shell / "x",) and not group.has_limits
    assert os.listdir(shell / "x") == []
    assert (top / "cgroup.subtree_control").read_text() == "memory cpu\n"
    assert group.counts() == GroupCounts()


def test_v1_group_without_limits_uses_the_first_possible_hierarchy(tmp_path: Path) -> None:
    own = {name: Group(1, tmp_path / name / "job", tmp_path / name) for name in ("freezer", "pids")}
    for group in own.values():
        group.top.mkdir()
        (group.top / "cgroup.procs").write_text("")
    own["pids"].path.mkdir()
    (own["pids"].path / "cgroup.procs").write_text("")
    group = made(make_group("x", None, None, Cgroup(own)))
    assert group.folders == (tmp_path / "pids/job/x",) and group.version == "cgroup v1"
    assert list(tmp_path.glob("freezer/*/x")) == [] and not (tmp_path / "freezer/x").exists()
    group.place(4711)
    assert (tmp_path / "pids/job/x/cgroup.procs").read_text() == "4711"


def test_group_without_limits_is_not_created_below_an_ancestor(tmp_path: Path) -> None:
    """There, the limits of our own group would not apply."""
    top = folder_v2(tmp_path)
    refused = make_group("x", None, None, Cgroup({"unified": Group(2, top / "gone", top)}))
    assert refused == Refused("the controller is not available")
    assert not (top / "x").exists()
    assert make_group("x", None, None, Cgroup(reason="none")) == Refused("none")


def test_missing_controller_is_the_reason() -> None:
    assert make_group("x", MIB, None, Cgroup(reason="none is mounted")) == Refused(
        "none is mounted"
    )
    group = Group(1, Path("/nowhere"), Path("/nowhere"))
    refused = make_group("x", MIB, 0.5, Cgroup({"memory": group}))
    assert refused == Refused("the cgroup does not have the cpu controller")


def test_counters_of_both_versions(tmp_path: Path) -> None:
    files = {
        "v2": {"memory.events": "low 0\nmax 3\noom_kill 2\n", "memory.peak": "1000\n"},
        "v1": {
            "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
            "memory.max_usage_in_bytes": "1000\n",
            "memory.failcnt": "7\n",
        },
    }
    for version, contents in files.items():
        folder = tmp_path / version
        folder.mkdir()
        for name, text in contents.items():
            (folder / name).write_text(text)
        group = TrialGroup(Cgroup({"memory": Group(int(version[1]), folder, folder)}))
        counts = group.counts()
        assert counts.kills == 2 and counts.peak == 1000
        counters = counts.counters
        assert counters.keys() == contents.keys()
        assert 2 in counters.get("memory.events", counters.get("memory.oom_control")).values()
    empty = TrialGroup(Cgroup({"memory": Group(2, tmp_path, tmp_path)}))
    assert empty.counts() == GroupCounts()


Make = Callable[..., TrialGroup]


@pytest.fixture
def real() -> Iterator[Make]:
    """Creates real groups on this machine, if permitted."""
    groups: list[TrialGroup] = []

    def make(memory: int | None, cpus: float | None = None) -> TrialGroup:
        group = make_group(f"{PREFIX}{trial_processes.new_token()}", memory, cpus)
        if isinstance(group, Refused):
            pytest.skip(f"cannot create a cgroup: {group.reason}")
        groups.append(group)
        return group

    yield make
    for group in groups:
        group.kill_all()
        assert group.remove() == []


def start(code: str = SLEEPS) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*PYTHON, code], stdout=subprocess.DEVNULL)


def test_real_group_has_limits_and_members(real: Make) -> None:
    group = real(100 * MIB, 0.5)
    process = start()
    group.place(process.pid)
    inside = find_cgroup(process.pid)
    assert inside.memory_limit() == 100 * MIB
    assert inside.cpu_quota() == 0.5
    assert process.pid in {member.pid for member in trial_processes.members(str(group.folders[0]))}
    assert group.counts().kills == 0 and group.counts().counters
    group.kill_all()
    assert process.wait(20) == -9
    assert group.remove() == []
    assert not any(folder.exists() for folder in group.folders)
    assert group.counts().kills is None and group.remove() == []


def test_real_group_without_limits_holds_processes_and_changes_nothing(real: Make) -> None:
    group = real(None)
    before = find_cgroup(os.getpid())
    process = start("import os, time; os.fork() or os.setsid(); os.fork(); time.sleep(60)")
    group.place(process.pid)
    inside = find_cgroup(process.pid)
    assert inside.memory_limit() == before.memory_limit()
    assert inside.cpu_quota() == before.cpu_quota()
    until = time.monotonic() + 20
    while len(group.members()) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert len(group.members()) == 4
    group.kill_all()
    assert process.wait(20) == -9 and group.members() == []


def test_real_group_with_processes_is_not_removed(real: Make) -> None:
    group = real(100 * MIB)
    process = start()
    group.place(process.pid)
    assert not trial_processes.remove_group(str(group.folders[0]), patience_s=0.05)
    group.kill_all()
    process.wait()


def test_all_processes_of_a_real_group_are_killed(real: Make) -> None:
    group = real(100 * MIB)
    process = start(FORKS)
    group.place(process.pid)
    group.kill_all()
    assert trial_processes.members(str(group.folders[0])) == []
    assert process.wait(20) == -9


def unified() -> Path:
    """Return the mount point of version 2; it has no controllers in a hybrid layout."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, *_ = line.split()
        if kind == "cgroup2" and os.access(point, os.W_OK):
            return Path(point)
    pytest.skip("no writable cgroup v2 is mounted")


def test_real_v2_group_is_killed_and_removed() -> None:
    top = unified()
    folder = top / f"{PREFIX}{trial_processes.new_token()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"cannot create a cgroup: {error}")
    (folder / "below").mkdir()
    group = TrialGroup(Cgroup({"memory": Group(2, folder, top)}))
    try:
        process = start(FORKS)
        group.place(process.pid)
        group.kill_all()
        assert trial_processes.members(str(folder)) == []
        assert process.wait(20) == -9
    finally:
        assert group.remove() == []
    assert not folder.exists()


def test_real_v2_hierarchy_without_the_controller_is_refused() -> None:
    top = unified()
    if "memory" in (top / "cgroup.controllers").read_text():
        pytest.skip("the controller is available")
    refused = make_group("stepscope-none", 100 * MIB, None, own_v2(top, top))
    assert isinstance(refused, Refused) and refused.reason
    assert not (top / "stepscope-none").exists()


@pytest.mark.parametrize("memory", [100 * MIB, None], ids=["with a limit", "without limits"])
def test_groups_of_exited_runners_are_removed_with_their_processes(
    real: Make, monkeypatch: pytest.MonkeyPatch, memory: int | None
) -> None:
    hide_from_other_tests(monkeypatch)
    current = real(memory)
    stale = make_group(f"{PREFIX}{exited_runner()}.ab", memory, None)
    foreign = make_group(f"{PREFIX}1.2.00000000.ab", memory, None)
    process = start()
    made(stale).place(process.pid)
    try:
        groups = stale_groups()
        assert made(stale).folders[0] in groups
        assert not {current.folders[0], made(foreign).folders[0]} & set(groups)
        assert remove_groups(made(stale).folders) == []
        assert process.wait(20) == -9
        assert not made(stale).folders[0].exists()
    finally:
        assert made(foreign).remove() == []
