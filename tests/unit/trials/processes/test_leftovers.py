"""What trials leave is found and removed; what may be somebody else's is left alone."""

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
from runners import PYTHON, SLEEPS, dead_runner, hide_from_other_tests
from stepscope.trials.processes import leftovers, trial_processes
from stepscope.trials.processes.leftovers import Leftovers, Snapshot, check_clean
from stepscope.trials.processes.leftovers import leftovers as look

HOLDS = """
import mmap, os, sys, time
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(descriptor, 8192)
if sys.argv[2] == "mapped":
    data = mmap.mmap(descriptor, 8192)
    os.closerange(3, 64)  # mmap keeps one of its own
print("ready", flush=True)
time.sleep(60)
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def shm() -> Iterator[Path]:
    """A part of /dev/shm for us: others work there too."""
    folder = Path("/dev/shm") / f"stepscope-test-{secrets.token_hex(4)}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no /dev/shm here: {error}")
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


def test_nothing_is_left_of_nothing(shm: Path, token: str) -> None:
    (shm / "psm_00000001").write_bytes(b"before")
    left = look(Snapshot.take(shm), token, (), shm)
    assert left == Leftovers() and left.describe() == []
    assert (shm / "psm_00000001").exists()


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_shared_memory_of_a_killed_process_is_removed(
    shm: Path, start: Start, token: str, how: str
) -> None:
    before = Snapshot.take(shm)
    process = start(HOLDS, str(shm / "psm_1a2b3c4d"), how, token=token)
    in_use = look(before, token, (), shm)
    assert in_use.describe() and in_use.processes[0].pid == process.pid
    assert names(in_use.shm) == ["psm_1a2b3c4d"] and "8 KiB" in in_use.describe()[1]
    process.kill()
    process.wait()
    left = look(before, token, (), shm)
    assert not left.describe() and names(left.removed) == ["psm_1a2b3c4d"]
    assert list(shm.iterdir()) == []


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_what_others_use_is_none_of_our_business(
    shm: Path, start: Start, token: str, how: str
) -> None:
    before = Snapshot.take(shm)
    start(HOLDS, str(shm / "psm_1a2b3c4d"), how)
    assert look(before, token, (), shm) == Leftovers()
    assert (shm / "psm_1a2b3c4d").exists()


def test_what_no_framework_makes_is_told_and_left_alone(shm: Path, token: str) -> None:
    before = Snapshot.take(shm)
    (shm / "my data set").write_bytes(b"precious")
    (shm / f"torch_{os.getpid()}_123_0").write_bytes(b"of a process that lives")
    left = look(before, token, (), shm)
    assert not left.describe() and left.removed == ()
    assert names(left.unclaimed) == ["my data set", f"torch_{os.getpid()}_123_0"]
    assert len(list(shm.iterdir())) == 2


def test_a_file_that_was_replaced_is_new(shm: Path, token: str) -> None:
    (shm / "sem.mp-abc").write_bytes(b"a")
    before = Snapshot.take(shm)
    (shm / "other").write_bytes(b"b")
    (shm / "other").rename(shm / "sem.mp-abc")
    assert names(look(before, token, (), shm).removed) == ["sem.mp-abc"]


def test_names_with_the_number_of_a_process_of_the_trial(
    shm: Path, start: Start, token: str
) -> None:
    process = start(SLEEPS, token=token)
    known = [each for each in (trial_processes.identify(process.pid),) if each]
    process.kill()
    process.wait()
    before = Snapshot.take(shm)
    for name in (f"torch_{process.pid}_77_1", f"__KMP_REGISTERED_LIB_{process.pid}_0", "nccl-aXb3"):
        (shm / name).write_bytes(b"x")
    left = look(before, token, known, shm)
    assert len(left.removed) == 3 and left.unclaimed == ()


def test_what_multiprocessing_really_leaves_is_recognised(start: Start) -> None:
    """The names are those of this Python: a new one may choose others."""
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


def test_processes_that_survive_are_named(shm: Path, start: Start, token: str) -> None:
    process = start(SLEEPS, token=token)
    left = look(Snapshot.take(shm), token, (), shm)
    assert left.describe()
    [text] = left.describe()
    assert text.startswith("python") and f"(pid {process.pid}, state " in text


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(leftovers, "_DRIVER_S", 0.3)

    def play(holds: dict[int, int]) -> None:
        processes = [{"pid": pid, "bytes": size} for pid, size in holds.items()]
        library = fake_nvml.FakeNvml({"gpus": [{"processes": processes}]})
        monkeypatch.setitem(sys.modules, "pynvml", library)

    return play


def test_memory_of_a_gpu_that_a_process_of_the_trial_still_holds(
    shm: Path, start: Start, token: str, nvml: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "in_first_namespace", lambda: True)
    before = Snapshot.take(shm)
    known = [trial_processes.TrialProcess(2**22 + 1, "python", "Z", 1, 1)]
    nvml({2**22 + 1: 3 << 30, 4711: 1 << 30})
    begun = time.monotonic()
    left = look(before, token, known, shm)
    assert left.gpu == (f"GPU 0: 3 GiB of pid {2**22 + 1}",) and left.describe()
    assert time.monotonic() - begun >= 0.3
    nvml({4711: 1 << 30})
    assert not look(before, token, known, shm).describe()


def test_in_a_container_who_came_since_is_told_but_not_blamed(
    shm: Path, token: str, nvml: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "in_first_namespace", lambda: False)
    nvml({4711: 1 << 30})
    before = Snapshot.take(shm)
    assert look(before, token, (), shm) == Leftovers()
    nvml({4711: 1 << 30, 4712: 2 << 30})
    left = look(before, token, (), shm)
    assert not left.describe() and left.unclaimed == ("GPU 0: 2 GiB of pid 4712",)


def test_strays_are_ended_before_a_trial_and_said(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_from_other_tests(monkeypatch)
    stray = start(SLEEPS, token=f"{dead_runner()}.ab")
    ours = start(SLEEPS, token=trial_processes.new_token())
    told = check_clean()
    assert stray.wait(20) == -signal.SIGTERM
    assert any(f"pid {stray.pid}" in text and "was ended" in text for text in told)
    assert ours.poll() is None
