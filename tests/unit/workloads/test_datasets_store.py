"""Generated data is generated once and is complete, with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.errors import WorkloadError
from stepscope.workloads.datasets.store import (
    Recipe,
    complete_folders,
    data_home,
    is_complete,
    read_about,
    reuse_or_generate,
)

NUMBERS = Recipe("numbers", "three numbers", 1, 3)

SLOW_GENERATOR = """
import os, sys, time
from stepscope.workloads.datasets.store import Recipe, reuse_or_generate

def make(folder):
    (folder / "0").write_text("0")
    with open(sys.argv[1], "a") as log:
        log.write("called\\n")
    time.sleep(float(sys.argv[2]))
    for number in "12":
        (folder / number).write_text(number)

print(reuse_or_generate(Recipe("numbers", "three numbers", 1, 3), make))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def make_numbers(folder: Path) -> None:
    for number in "012":
        (folder / number).write_text(number)


def forbidden(folder: Path) -> None:
    raise AssertionError("the data exists")


def start_generator(log: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_GENERATOR, str(log), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} is missing"
        time.sleep(0.01)


def test_data_is_generated_once_and_described(home: Path) -> None:
    folder = reuse_or_generate(NUMBERS, make_numbers)
    assert folder == home / "numbers"
    assert reuse_or_generate(NUMBERS, forbidden) == folder
    about = json.loads((folder / "about.json").read_text())
    assert (about["description"], about["version"], about["count"]) == ("three numbers", 1, 3)
    assert (about["files"], about["bytes"]) == (3, 3)


def test_two_processes_generate_it_once(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = [start_generator(log, 0.5) for _ in range(2)]
    printed = {process.communicate(timeout=100)[0].strip() for process in processes}
    assert printed == {str(home / "numbers")}
    assert log.read_text() == "called\n"
    assert is_complete(home / "numbers")


def test_a_killed_process_leaves_no_partial_data(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start_generator(log, 60)
    wait_for(log)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (home / "numbers").exists()
    assert [path.name for path in home.glob(".*making")] == [".numbers.making"]

    folder = reuse_or_generate(NUMBERS, make_numbers)
    assert is_complete(folder)
    assert not list(home.glob(".*making"))


def test_a_failed_generator_leaves_nothing(home: Path) -> None:
    def fail(folder: Path) -> None:
        make_numbers(folder)
        raise ValueError("generator failed")

    with pytest.raises(ValueError, match="generator failed"):
        reuse_or_generate(NUMBERS, fail)
    assert [path.name for path in home.iterdir()] == [".numbers.lock"]
    assert is_complete(reuse_or_generate(NUMBERS, make_numbers))


@pytest.mark.parametrize("damage", ["missing", "cut", "no about", "bad about", "odd about"])
def test_a_damaged_folder_is_generated_again(home: Path, damage: str) -> None:
    folder = reuse_or_generate(NUMBERS, make_numbers)
    if damage == "missing":
        (folder / "1").unlink()
    elif damage == "cut":
        (folder / "1").write_text("")
    elif damage == "no about":
        (folder / "about.json").unlink()
    else:
        (folder / "about.json").write_text("{" if damage == "bad about" else "[]")
    assert not is_complete(folder)
    assert reuse_or_generate(NUMBERS, make_numbers) == folder
    assert (folder / "1").read_text() == "1"
    assert read_about(folder)["files"] == 3


def test_complete_folders_are_listed_largest_first(home: Path) -> None:
    for count in (1, 3, 2):
        reuse_or_generate(Recipe(f"some-{count}", "some numbers", 1, count), make_numbers)
    (home / "some-9").mkdir()
    assert [path.name for path in complete_folders("some-")] == ["some-3", "some-2", "some-1"]


def test_a_folder_that_is_not_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STEPSCOPE_DATA", str(tmp_path / "file" / "data"))
    with pytest.raises(
        WorkloadError, match=r"Generated data \(three numbers\) cannot be stored in .*: Not a dir"
    ) as caught:
        reuse_or_generate(NUMBERS, make_numbers)
    assert "STEPSCOPE_DATA" in caught.value.hint


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True
    )
    if made.returncode:
        pytest.skip("mounting a file system needs root")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.parametrize("known", [0, 10**9], ids=["unknown size", "known size"])
def test_a_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch, known: int) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA", str(small_disk))
    started: list[Path] = []

    def fill(folder: Path) -> None:
        started.append(folder)
        (folder / "large").write_bytes(bytes(1 << 20))

    with pytest.raises(WorkloadError, match="no space left") as caught:
        reuse_or_generate(Recipe("large", "a large file", 1, 1, known), fill)
    assert "STEPSCOPE_DATA" in caught.value.hint
    assert bool(started) == (known == 0)
    assert os.listdir(small_disk) == [".large.lock"]


def test_the_folder_for_generated_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data_home() == tmp_path / ".cache/stepscope/data"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_home() == tmp_path / "cache/stepscope/data"
    monkeypatch.setenv("STEPSCOPE_DATA", "~/mine")
    assert data_home() == tmp_path / "mine"
