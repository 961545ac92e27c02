"""The lock for trials on this machine, and the message of a process that waits for it."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from runners import exited_runner
from stepscope.errors import TrialError
from stepscope.trials.processes import trial_processes
from stepscope.trials.state import machine_turn

UNKNOWN = "waiting for another stepscope process on this machine to finish"
HOLDER = """
import sys
from pathlib import Path
from stepscope.trials.state import machine_turn
with machine_turn(print, Path(sys.argv[1]), "fit"):
    print("holding", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("stepscope.trials.state._ATTEMPTS", 2)
    return tmp_path / "state" / "machine.lock"


@contextmanager
def held(lock: Path, contents: bytes) -> Iterator[None]:
    """Another process holds a lock file with the given contents."""
    lock.parent.mkdir()
    lock.write_bytes(contents)
    with lock.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def waiting_message(lock: Path) -> str:
    """The message of `machine_turn` while the lock is held, without waiting for it."""
    messages: list[str] = []

    def notify(text: str) -> None:
        messages.append(text)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), machine_turn(notify, lock, "study"):
        pass
    return messages[0]


def test_message_names_the_holder(lock: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "holding\n"
    assert waiting_message(lock) == (
        f"waiting for another stepscope process on this machine (fit, PID {process.pid}) to finish"
    )
    process.communicate("\n")
    with machine_turn(pytest.fail, lock, "study"):
        command, runner = lock.read_text().split()
        assert (command, runner) == ("study", trial_processes.runner_name())
    assert lock.read_text() == ""


def test_killed_holder_is_not_named(lock: Path) -> None:
    with held(lock, f"fit {exited_runner()}\n".encode()):
        assert waiting_message(lock) == UNKNOWN


@pytest.mark.parametrize(
    "contents", [b"", b"fit", b"fit 1 2 3", b"\xff\xfe\x00", b"fit 1.2.00000000\n", b"fit x.y.z"]
)
def test_unreadable_holder_is_not_named(lock: Path, contents: bytes) -> None:
    with held(lock, contents):
        assert waiting_message(lock) == UNKNOWN


def test_lock_of_a_killed_process_is_free(lock: Path) -> None:
    lock.parent.mkdir()
    lock.write_text(f"fit {exited_runner()}\n")
    with machine_turn(pytest.fail, lock, "study"):
        assert lock.read_text().startswith("study ")


def test_unwritable_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(TrialError, match="Cannot write") as caught,
        machine_turn(pytest.fail, tmp_path / "file" / "machine.lock", "study"),
    ):
        pass
    assert caught.value.hint == "Set STEPSCOPE_STATE to a writable folder"
    assert os.listdir(tmp_path) == ["file"]
