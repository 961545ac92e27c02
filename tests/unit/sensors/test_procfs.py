"""Parsing of /proc: this process, a child process, and synthetic files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepscope.sensors import procfs

MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
23 22 0:5 / /tmp rw - tmpfs tmpfs rw
24 22 0:6 / /mnt/my\\040data rw - xfs /dev/sdb rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("/home/x", "ext4"), ("/tmp/y", "tmpfs"), ("/tmpfile", "ext4"), ("/mnt/my data/z", "xfs")],
)
def test_file_system_of_a_folder(folder: str, kind: str) -> None:
    mount = procfs.mount_of(folder, procfs.parse_mounts(MOUNTS))
    assert mount is not None and mount.filesystem == kind


def test_later_mount_at_the_same_point_wins() -> None:
    mounts = procfs.parse_mounts(MOUNTS + "25 22 0:7 / /tmp rw - ext3 /dev/sdc rw\n")
    mount = procfs.mount_of("/tmp", mounts)
    assert mount is not None and mount.device == "/dev/sdc"


def test_stat_of_this_process() -> None:
    stat = procfs.stat(os.getpid())
    assert stat is not None
    assert stat.parent == os.getppid()
    assert stat.session == os.getsid(0)
    assert stat.state == "R"
    assert not stat.has_ended
    usage = procfs.ProcessUsage()
    usage.update(Path("/proc/self/stat").read_bytes())
    assert usage.rss == pytest.approx(procfs.statm("self").total, rel=0.2)  # type: ignore[union-attr]
    assert procfs.start_ticks(os.getpid()) == stat.started_ticks


def test_busy_time_of_some_cpus(tmp_path: Path) -> None:
    lines = ["cpu  30 0 0 0 0 0 0 0", "cpu0 1 2 3 4 5 6 7 8", "cpu1 9 0 0 0 0 0 0 0", "intr 12"]
    (tmp_path / "stat").write_text("\n".join(lines))
    assert procfs.busy_seconds({0}, str(tmp_path)) == pytest.approx(19 * procfs.TICK)
    assert procfs.busy_seconds({0, 1}, str(tmp_path)) == pytest.approx(28 * procfs.TICK)
    assert procfs.busy_seconds({0}, str(tmp_path / "missing")) == 0


def test_load_average(tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text("13.21 0.28 0.59 1/93 7179\n")
    assert procfs.load_average(str(tmp_path)) == 13.21
    assert procfs.load_average(str(tmp_path / "missing")) is None


def test_cpu_of_this_process() -> None:
    stat = procfs.stat(os.getpid())
    assert stat is not None and stat.last_cpu in os.sched_getaffinity(0)
    assert stat.cpu_s == pytest.approx(time.process_time(), abs=0.2)


def test_process_name_with_blanks_and_parentheses() -> None:
    fields = " ".join(["S", "7", *["0"] * 15, "2", *["0"] * 40])
    stat = procfs.ProcessStat(f"12 (a) (b c) {fields}\n".encode())
    assert (stat.name, stat.parent, stat.threads) == ("a) (b c", 7, 2)


def test_exit_code_of_a_zombie() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]) as child:
        while (stat := procfs.stat(child.pid)) is None or not stat.has_ended:
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(stat.exit_code) == 3
        assert procfs.start_ticks(child.pid) is None
    assert procfs.stat(child.pid) is None
    assert procfs.environ(child.pid) == {}
    assert procfs.command_line(child.pid) == []


def test_command_line_and_environment_of_a_process(tmp_path: Path) -> None:
    command = ["sleep", "60"]
    with subprocess.Popen(command, cwd=tmp_path, env={"A": "1=2", "B": ""}) as child:
        while procfs.name(child.pid) != "sleep":
            time.sleep(0.01)
        assert procfs.command_line(child.pid) == command
        assert procfs.environ(child.pid) == {"A": "1=2", "B": ""}
        assert procfs.environ_value(child.pid, "A") == "1=2"
        assert procfs.environ_value(child.pid, "C") is None
        assert procfs.working_directory(child.pid) == str(tmp_path)
        assert child.pid in procfs.children()
        assert child.pid in procfs.pids()
        assert child.pid in procfs.pids_of_user(os.getuid())
        child.kill()
    assert not procfs.exists(child.pid)


def test_signal_handling_of_a_process() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        status = procfs.status("self")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert status is not None
    assert status.thread_group == os.getpid()
    assert status.ignores(signal.SIGUSR1)
    assert status.catches(signal.SIGINT) and not status.ignores(signal.SIGINT)
    assert not status.has_pending(signal.SIGUSR2)
    assert (status.size("VmHWM") or 0) >= (status.size("VmRSS") or 0) > 0


def test_open_and_mapped_files(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        status = os.fstat(file.fileno())
        used = set(procfs.files_in_use(os.getpid()))
    assert (status.st_dev, status.st_ino) in used
    assert any(inode == os.stat(sys.executable).st_ino for _, inode in used)


def test_imports_are_light() -> None:
    """The guard of a trial imports the module in a bare interpreter."""
    heavy = "{'typing_extensions', 'dataclasses', 'pathlib', 'subprocess', 'json'}"
    root = str(Path(procfs.__file__).parents[2])
    program = (
        f"import sys; sys.path.append({root!r}); import stepscope.sensors.procfs; "
        f"print(sorted({heavy} & set(sys.modules)))"
    )
    command = [sys.executable, "-I", "-S", "-c", program]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "[]\n"
