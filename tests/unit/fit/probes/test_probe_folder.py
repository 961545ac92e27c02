"""Temporary folders of probes, and cleanup of leftover ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.fit.probes.client import probe_folder

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
