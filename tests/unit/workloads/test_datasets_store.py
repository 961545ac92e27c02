"""Generated data is made once, whole or not at all, by real processes."""

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

from stepscope.errors import BadWorkload
from stepscope.workloads.datasets.store import (
    Recipe,
    about_of,
    data_home,
    is_complete,
    made_before,
    reuse_or_make,
)

NUMBERS = Recipe("numbers", "Three numbers", 1, 3)

SLOW_MAKER = """
import os, sys, time
from stepscope.workloads.datasets.store import Recipe, reuse_or_make

def make(folder):
    (folder / "0").write_text("0")
    with open(sys.argv[1], "a") as told:
        told.write("made\\n")
    time.sleep(float(sys.argv[2]))
    for number in "12":
        (folder / number).write_text(number)

print(reuse_or_make(Recipe("numbers", "Three numbers", 1, 3), make))
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def make_numbers(folder: Path) -> None:
    for number in "012":
        (folder / number).write_text(number)


def forbidden(folder: Path) -> None:
    raise AssertionError("it is made already")


def start_maker(told: Path, seconds: float) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SLOW_MAKER, str(told), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


def test_made_once_and_described(home: Path) -> None:
    folder = reuse_or_make(NUMBERS, make_numbers)
    assert folder == home / "numbers"
    assert reuse_or_make(NUMBERS, forbidden) == folder
    about = json.loads((folder / "about.json").read_text())
    assert (about["what"], about["version"], about["count"]) == ("Three numbers", 1, 3)
    assert (about["files"], about["bytes"]) == (3, 3)


def test_two_processes_make_it_once(home: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    makers = [start_maker(told, 0.5) for _ in range(2)]
    printed = {maker.communicate(timeout=100)[0].strip() for maker in makers}
    assert printed == {str(home / "numbers")}
    assert told.read_text() == "made\n"
    assert is_complete(home / "numbers")


def test_a_killed_maker_leaves_nothing_half(home: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    maker = start_maker(told, 60)
    wait_for(told)
    maker.send_signal(signal.SIGKILL)
    maker.communicate(timeout=60)
    assert not (home / "numbers").exists()
    assert [path.name for path in home.glob(".*making")] == [".numbers.making"]

    folder = reuse_or_make(NUMBERS, make_numbers)
    assert is_complete(folder)
    assert not list(home.glob(".*making"))


def test_a_maker_that_fails_leaves_nothing(home: Path) -> None:
    def fail(folder: Path) -> None:
        make_numbers(folder)
        raise ValueError("no more numbers")

    with pytest.raises(ValueError, match="no more"):
        reuse_or_make(NUMBERS, fail)
    assert [path.name for path in home.iterdir()] == [".numbers.lock"]
    assert is_complete(reuse_or_make(NUMBERS, make_numbers))


@pytest.mark.parametrize("damage", ["missing", "cut", "no about", "bad about", "odd about"])
def test_a_damaged_folder_is_made_anew(home: Path, damage: str) -> None:
    folder = reuse_or_make(NUMBERS, make_numbers)
    if damage == "missing":
        (folder / "1").unlink()
    elif damage == "cut":
        (folder / "1").write_text("")
    elif damage == "no about":
        (folder / "about.json").unlink()
    else:
        (folder / "about.json").write_text("{" if damage == "bad about" else "[]")
    assert not is_complete(folder)
    assert reuse_or_make(NUMBERS, make_numbers) == folder
    assert (folder / "1").read_text() == "1"
    assert about_of(folder)["files"] == 3


def test_what_was_made_before_is_found_largest_first(home: Path) -> None:
    for count in (1, 3, 2):
        reuse_or_make(Recipe(f"some-{count}", "Some", 1, count), make_numbers)
    (home / "some-9").mkdir()
    assert [path.name for path in made_before("some-")] == ["some-3", "some-2", "some-1"]


def test_a_place_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STEPSCOPE_DATA", str(tmp_path / "file" / "data"))
    with pytest.raises(BadWorkload, match=r"Three numbers cannot be kept in .*Not a dir") as caught:
        reuse_or_make(NUMBERS, make_numbers)
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


@pytest.mark.parametrize("known", [0, 10**9], ids=["found out", "known before"])
def test_a_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch, known: int) -> None:
    monkeypatch.setenv("STEPSCOPE_DATA", str(small_disk))
    begun: list[Path] = []

    def fill(folder: Path) -> None:
        begun.append(folder)
        (folder / "large").write_bytes(bytes(1 << 20))

    with pytest.raises(BadWorkload, match="no room") as caught:
        reuse_or_make(Recipe("large", "A large file", 1, 1, known), fill)
    assert "STEPSCOPE_DATA" in caught.value.hint
    assert bool(begun) == (known == 0)
    assert os.listdir(small_disk) == [".large.lock"]


def test_where_data_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert data_home() == tmp_path / ".cache/stepscope/data"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert data_home() == tmp_path / "cache/stepscope/data"
    monkeypatch.setenv("STEPSCOPE_DATA", "~/mine")
    assert data_home() == tmp_path / "mine"
