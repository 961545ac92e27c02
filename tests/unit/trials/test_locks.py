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
from stepscope.trials.locks import machine_turn
from stepscope.trials.processes import trial_processes

UNKNOWN = "waiting for another process to release {}"
HOLDER = """
import sys
from pathlib import Path
from stepscope.trials.locks import machine_turn
with machine_turn(print, Path(sys.argv[1]), "fit"):
    print("holding", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("stepscope.trials.locks._ATTEMPTS", 2)
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
        assert waiting_message(lock) == UNKNOWN.format(lock)


@pytest.mark.parametrize(
    "contents", [b"", b"fit", b"fit 1 2 3", b"\xff\xfe\x00", b"fit 1.2.00000000\n", b"fit x.y.z"]
)
def test_unreadable_holder_is_not_named(lock: Path, contents: bytes) -> None:
    with held(lock, contents):
        assert waiting_message(lock) == UNKNOWN.format(lock)


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


def test_link_in_place_of_a_lock_is_not_followed(lock: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("of the user")
    lock.parent.mkdir()
    lock.symlink_to(tmp_path / "precious")
    with (
        pytest.raises(TrialError, match="is a symbolic link") as caught,
        machine_turn(pytest.fail, lock, "study"),
    ):
        pass
    assert caught.value.hint == "Remove it, or set STEPSCOPE_STATE to another folder"
    assert (tmp_path / "precious").read_text() == "of the user"


def test_fifo_in_place_of_a_lock_is_an_error(lock: Path) -> None:
    lock.parent.mkdir()
    os.mkfifo(lock)
    with (
        pytest.raises(TrialError, match="is not a regular file"),
        machine_turn(pytest.fail, lock, "study"),
    ):
        pass


def test_lock_that_is_replaced_is_not_written(lock: Path, tmp_path: Path) -> None:
    """The contents are written to the file that was locked."""
    (tmp_path / "precious").write_text("of the user")
    with machine_turn(pytest.fail, lock, "study"):
        lock.unlink()
        lock.symlink_to(tmp_path / "precious")
    assert (tmp_path / "precious").read_text() == "of the user"
