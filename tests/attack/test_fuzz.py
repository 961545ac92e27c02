"""Damaged and hostile folders do not harm their reader: a part of what `fuzz.py` can do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = [sys.executable, str(Path(__file__).parent / "fuzz.py")]


def fuzz(*options: str) -> None:
    done = subprocess.run([*FUZZ, *options], capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_intact_folders_are_read() -> None:
    """Else the fuzzer would test nothing."""
    fuzz("--intact")


def test_damaged_folders() -> None:
    fuzz("--seed", "0", "--folders", "150", "--readers", "2")


@pytest.mark.long
@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_many_damaged_folders(seed: str) -> None:
    fuzz("--seed", seed, "--folders", "1500")
