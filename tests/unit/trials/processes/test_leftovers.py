"""Leftovers of trials are found and removed; files of other processes are kept."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fake_nvml
from runners import PYTHON, SLEEPS, exited_runner, hide_from_other_tests
from stepscope.trials.processes import leftovers, trial_processes
from stepscope.trials.processes.leftovers import Leftovers, RunningTrial, Snapshot, check_clean
from stepscope.trials.processes.leftovers import leftovers as find_leftovers

HOLDS = """
import mmap, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(descriptor, 8192)
if sys.argv[2] == "mapped":
    data = mmap.mmap(descriptor, 8192)
    os.closerange(3, 64)  # mmap keeps its own descriptor
print("ready", flush=True)
time.sleep(60)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in /dev/shm, separate from other processes."""
    folder = Path("/dev/shm") / f"stepscope-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no writable /dev/shm: {error}")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def begin(code: str, *arguments: str, token: str = "") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*PYTHON, code, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, trial_processes.VARIABLE: token} if token else None,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def token() -> str:
    return trial_processes.new_token()


def names(paths: tuple[str, ...]) -> list[str]:
    return [Path(path.split(" (")[0]).name for path in paths]


def test_no_leftovers(shm: Path, token: str) -> None:
    (shm / "psm_00000001").write_bytes(b"before")
    left = find_leftovers(Snapshot.take(shm), token, (), shm)
    assert left == Leftovers() and left.describe() == []
    assert (shm / "psm_00000001").exists()


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_shared_memory_of_a_killed_process_is_removed(
    shm: Path, start: Start, token: str, how: str
) -> None:
    before = Snapshot.take(shm)
    process = start(HOLDS, str(shm / "psm_1a2b3c4d"), how, token=token)
    in_use = find_leftovers(before, token, (), shm)
    assert in_use.describe() and in_use.processes[0].pid == process.pid
    assert names(in_use.shm) == ["psm_1a2b3c4d"] and "8 KiB" in in_use.describe()[1]
    process.kill()
    process.wait()
    left = find_leftovers(before, token, (), shm)
    assert not left.describe() and names(left.removed) == ["psm_1a2b3c4d"]
    assert list(shm.iterdir()) == []


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_files_in_use_by_other_processes_are_ignored(
    shm: Path, start: Start, token: str, how: str
) -> None:
    before = Snapshot.take(shm)
    start(HOLDS, str(shm / "psm_1a2b3c4d"), how)
    assert find_leftovers(before, token, (), shm) == Leftovers()
    assert (shm / "psm_1a2b3c4d").exists()


def test_unknown_files_are_reported_and_kept(shm: Path, token: str) -> None:
    before = Snapshot.take(shm)
    (shm / "my dataset").write_bytes(b"precious")
    (shm / f"torch_{os.getpid()}_123_0").write_bytes(b"of a running process")
    left = find_leftovers(before, token, (), shm)
    assert not left.describe() and left.removed == ()
    assert names(left.unclaimed) == ["my dataset", f"torch_{os.getpid()}_123_0"]
    assert len(list(shm.iterdir())) == 2


def test_replaced_file_is_new(shm: Path, token: str) -> None:
    (shm / "sem.mp-abc").write_bytes(b"a")
    before = Snapshot.take(shm)
    (shm / "other").write_bytes(b"b")
    (shm / "other").rename(shm / "sem.mp-abc")
    assert names(find_leftovers(before, token, (), shm).removed) == ["sem.mp-abc"]


def test_file_names_with_a_pid_of_the_trial(shm: Path, start: Start, token: str) -> None:
    process = start(SLEEPS, token=token)
    known = [each for each in (trial_processes.identify(process.pid),) if each]
    process.kill()
    process.wait()
    before = Snapshot.take(shm)
    for name in (f"torch_{process.pid}_77_1", f"__KMP_REGISTERED_LIB_{process.pid}_0", "nccl-aXb3"):
        (shm / name).write_bytes(b"x")
    left = find_leftovers(before, token, known, shm)
    assert len(left.removed) == 3 and left.unclaimed == ()


def test_real_multiprocessing_leftovers_are_recognized(start: Start) -> None:
    """The names depend on the version of Python."""
    code = """
import os, time
from multiprocessing import shared_memory
print(shared_memory.SharedMemory(create=True, size=10).name, flush=True)
time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    path = Path("/dev/shm") / name
    try:
        assert leftovers.is_of_trial(name, ())
    finally:
        path.unlink(missing_ok=True)


def test_leftover_processes_are_named(shm: Path, start: Start, token: str) -> None:
    process = start(SLEEPS, token=token)
    left = find_leftovers(Snapshot.take(shm), token, (), shm)
    assert left.describe()
    [text] = left.describe()
    assert text.startswith("python") and f"(PID {process.pid}, state " in text


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(leftovers, "_DRIVER_S", 0.3)

    def set_processes(sizes: dict[int, int]) -> None:
        processes = [{"pid": pid, "bytes": size} for pid, size in sizes.items()]
        library = fake_nvml.FakeNvml({"gpus": [{"processes": processes}]})
        monkeypatch.setitem(sys.modules, "pynvml", library)

    return set_processes


def test_gpu_memory_still_in_use_by_the_trial(
    shm: Path, start: Start, token: str, nvml: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "in_initial_pid_namespace", lambda: True)
    before = Snapshot.take(shm)
    known = [trial_processes.TrialProcess(2**22 + 1, "python", "Z", 1, 1)]
    nvml({2**22 + 1: 3 << 30, 4711: 1 << 30})
    begun = time.monotonic()
    left = find_leftovers(before, token, known, shm)
    assert left.gpu == (f"GPU 0: 3 GiB of pid {2**22 + 1}",) and left.describe()
    assert time.monotonic() - begun >= 0.3
    nvml({4711: 1 << 30})
    assert not find_leftovers(before, token, known, shm).describe()


def test_new_gpu_processes_in_a_container_are_reported_only(
    shm: Path, token: str, nvml: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "in_initial_pid_namespace", lambda: False)
    nvml({4711: 1 << 30})
    before = Snapshot.take(shm)
    assert find_leftovers(before, token, (), shm) == Leftovers()
    nvml({4711: 1 << 30, 4712: 2 << 30})
    left = find_leftovers(before, token, (), shm)
    assert not left.describe() and left.unclaimed == ("GPU 0: 2 GiB of pid 4712",)


def test_stale_processes_are_stopped_before_a_trial(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_from_other_tests(monkeypatch)
    stale = start(SLEEPS, token=f"{exited_runner()}.ab")
    own = start(SLEEPS, token=trial_processes.new_token())
    monkeypatch.setenv("STEPSCOPE_STATE", "/nonexistent")
    messages = check_clean()
    assert stale.wait(20) == -signal.SIGTERM
    assert any(text.startswith("stopped ") and f"PID {stale.pid}" in text for text in messages)
    assert own.poll() is None


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The token of a trial whose runner was killed, with a run folder and a state folder."""
    hide_from_other_tests(monkeypatch)
    monkeypatch.setenv("STEPSCOPE_STATE", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    return f"{exited_runner()}.ab.1"


def write_record(token: str, tmp_path: Path, before: Snapshot) -> Path:
    RunningTrial.of(tmp_path / "run", (), before).write(token)
    (record,) = (tmp_path / "state" / "running").glob(f"{token}*")
    return record


def test_files_of_a_killed_trial_are_removed_by_the_next(
    shm: Path, tmp_path: Path, killed: str
) -> None:
    (shm / "psm_00000001").write_bytes(b"before")
    record = write_record(killed, tmp_path, Snapshot.take(shm))
    (shm / "psm_00000002").write_bytes(bytes(8192))
    (shm / "my dataset").write_bytes(b"precious")
    (shm / f"torch_{os.getpid()}_1_0").write_bytes(b"of a running process")
    (message,) = check_clean(shm)
    file = f"{shm / 'psm_00000002'} (8 KiB)"
    assert message == f"removed {file}, a leftover file of a trial whose runner was killed"
    kept = {"psm_00000001", "my dataset", f"torch_{os.getpid()}_1_0"}
    assert set(os.listdir(shm)) == kept
    assert not record.exists() and check_clean(shm) == []


@pytest.mark.parametrize("folder_exists", [True, False])
def test_file_that_is_newer_than_the_killed_trial_is_kept(
    shm: Path, tmp_path: Path, killed: str, folder_exists: bool
) -> None:
    record = write_record(killed, tmp_path, Snapshot.take(shm))
    long_ago = time.time() - 60
    os.utime(record, (long_ago, long_ago))
    if folder_exists:
        os.utime(tmp_path / "run" / "run.json", (long_ago, long_ago))
        (tmp_path / "run" / "derived").mkdir()  # a report that was made later
        (tmp_path / "run" / "derived" / "report.html").write_text("")
    else:
        shutil.rmtree(tmp_path / "run")
    (shm / "psm_00000001").write_bytes(b"of another program")
    os.utime(shm / "psm_00000001", (long_ago, long_ago))  # does not change its ctime
    assert check_clean(shm) == [] and (shm / "psm_00000001").exists()


def test_file_in_use_is_kept(shm: Path, start: Start, tmp_path: Path, killed: str) -> None:
    write_record(killed, tmp_path, Snapshot.take(shm))
    start(HOLDS, str(shm / "psm_00000001"), "mapped")
    assert check_clean(shm) == [] and (shm / "psm_00000001").exists()


def test_files_are_kept_while_another_trial_is_running(
    shm: Path, tmp_path: Path, killed: str
) -> None:
    """It may have created them. They are removed after it."""
    write_record(killed, tmp_path, Snapshot.take(shm))
    running = trial_processes.new_token()
    RunningTrial(str(tmp_path / "other")).write(running)
    (shm / "psm_00000001").write_bytes(b"x")
    assert check_clean(shm) == [] and (shm / "psm_00000001").exists()
    RunningTrial.remove(running)
    assert len(check_clean(shm)) == 1 and not (shm / "psm_00000001").exists()


def test_only_records_of_killed_runners_of_this_machine_are_used(
    shm: Path, tmp_path: Path, killed: str
) -> None:
    (shm / "psm_00000001").write_bytes(b"x")
    record = write_record(killed, tmp_path, Snapshot({}))
    record.rename(record.with_name("1.2.00000000.ab.1.json"))
    (record.parent / f"{killed}.json").write_text("not JSON")
    (record.parent / f"{killed}0.json").symlink_to(record.parent / "1.2.00000000.ab.1.json")
    os.mkfifo(record.parent / f"{killed}1.json")
    assert check_clean(shm) == [] and (shm / "psm_00000001").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of another user")
def test_record_of_another_user_is_ignored(shm: Path, tmp_path: Path, killed: str) -> None:
    (shm / "psm_00000001").write_bytes(b"x")
    os.chown(write_record(killed, tmp_path, Snapshot({})), 12345, 12345)
    assert check_clean(shm) == [] and (shm / "psm_00000001").exists()


def test_registered_processes_and_groups_of_a_killed_trial_are_ended(
    shm: Path, start: Start, tmp_path: Path, killed: str
) -> None:
    """They have no token, and the group is not near our own."""
    orphan, reused, bystander = (start(SLEEPS) for _ in range(3))
    started = {
        pid: process.started
        for pid in (orphan.pid, reused.pid)
        if (process := trial_processes.identify(pid))
    }
    processes = ((orphan.pid, started[orphan.pid]), (reused.pid, started[reused.pid] - 1))
    other = tmp_path / "user.slice"  # a group with another name is not ours
    other.mkdir()
    (other / "cgroup.procs").write_text(f"{bystander.pid}\n")
    RunningTrial("", (str(other),), processes=processes).write(killed)
    (message,) = check_clean(shm)
    assert f"PID {orphan.pid}" in message and orphan.wait(20) == -signal.SIGTERM
    assert reused.poll() is None and bystander.poll() is None


@pytest.mark.parametrize("state", ["missing", "a file"])
def test_trial_runs_without_a_state_folder(
    shm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    hide_from_other_tests(monkeypatch)
    folder = tmp_path / "state"
    if state == "a file":
        folder.write_text("")
        folder = folder / "below"
    monkeypatch.setenv("STEPSCOPE_STATE", str(folder))
    assert check_clean(shm) == []
    RunningTrial("").write("1.2.3.4")
    RunningTrial.remove("1.2.3.4")
    assert RunningTrial.read_all() == {}
