"""Temporary folders of probes, and cleanup of leftover ones."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runners import exited_runner, hide_from_other_tests
from stepscope.fit.probes.client import probe_folder
from stepscope.fit.probes.host import TrialProbes
from stepscope.trials.limits.spec import Limits
from stepscope.trials.processes.leftovers import RunningTrial, Snapshot
from stepscope.workloads.spec import make_workload

PROGRAM = """
import os, signal
from stepscope.fit.probes.client import probe_folder
folder = probe_folder()
(folder / "left").write_text("by a command that was killed")
print(folder, flush=True)
"""
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_of_a_killed_process_is_deleted(inside: Path) -> None:
    command = [sys.executable, "-c", PROGRAM + KILLED]
    left = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    assert (left / "left").exists() and left.parent == inside
    made = probe_folder()
    assert list(inside.iterdir()) == [made] and list(made.iterdir()) == []


def test_the_folder_of_a_running_process_is_kept(inside: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM + "input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        used = Path(other.stdout.readline().strip())
        own = {probe_folder(), probe_folder()}
        assert set(inside.iterdir()) == {used, *own} and len(own) == 2
        other.communicate("\n")


@pytest.mark.parametrize(
    "name", ["stepscope-fit-k2j3h4", "stepscope-fit-999999999-00000000-abc", "stepscope-fit-9"]
)
def test_other_folders_are_kept(inside: Path, name: str) -> None:
    """A folder may belong to a process of another machine with the same temporary folder."""
    (inside / name).mkdir()
    made = probe_folder()
    assert {path.name for path in inside.iterdir()} == {name, made.name}


@pytest.fixture
def stale_name(inside: Path) -> str:
    """The name that a killed process of this user would have left."""
    command = [sys.executable, "-c", PROGRAM + KILLED]
    left = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    shutil.rmtree(left)
    return left.name


def test_links_are_not_followed(inside: Path, stale_name: str) -> None:
    (inside / "precious").mkdir()
    (inside / "precious/file").write_text("of the user")
    (inside / stale_name).symlink_to(inside / "precious")
    probe_folder()
    assert (inside / "precious/file").exists() and (inside / stale_name).is_symlink()


def test_fifo_does_not_block(inside: Path, stale_name: str) -> None:
    os.mkfifo(inside / stale_name)
    probe_folder()
    assert (inside / stale_name).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of another user")
def test_folders_of_other_users_are_kept(inside: Path, stale_name: str) -> None:
    (inside / stale_name).mkdir()
    (inside / stale_name / "file").write_text("of another user")
    os.chown(inside / stale_name, 12345, 12345)
    probe_folder()
    assert (inside / stale_name / "file").exists()


def test_files_of_a_killed_probe_are_removed_before_its_folder(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run folder shows until when the probe was active."""
    hide_from_other_tests(monkeypatch)
    monkeypatch.setenv("STEPSCOPE_STATE", str(inside / "state"))
    token = f"{exited_runner()}.ab.1"
    pid, _, home = token.split(".")[:3]
    run = inside / f"stepscope-fit-{pid}-{home}-abc" / "run"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    RunningTrial.of(run, (), Snapshot.take()).write(token)
    (record,) = (inside / "state" / "running").iterdir()
    os.utime(record, (0, 0))
    file = Path(f"/dev/shm/psm_{secrets.token_hex(4)}")
    file.write_bytes(b"x")
    try:
        with TrialProbes(make_workload("cnn", {}), Limits(), str, str):
            assert not file.exists() and not run.exists() and not record.exists()
    finally:
        file.unlink(missing_ok=True)
