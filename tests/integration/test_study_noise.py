"""A block is rerun if other processes use the CPUs during it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from studies import STUDY, design, planted_environment, study

pytestmark = pytest.mark.quiet

DESIGN = """
workload: cnn
fixed: {framework: made_up.busy, data: random, seconds: 0.8}
factors:
  batch_size: [1, 2, 3, 4, 5, 6]
blocks: {size: 3, reruns: 1}
"""
SPINS = "while True: pass"


def test_a_block_with_interference_is_flagged_and_rerun(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    env = planted_environment(tmp_path, diary=diary)
    file = design(tmp_path, DESIGN)
    runner = subprocess.Popen(
        [*STUDY, "run", str(file), "--out", str(tmp_path)], env=env, stderr=subprocess.PIPE
    )
    hogs: list[subprocess.Popen[bytes]] = []
    try:
        wait_for(diary, "begin", 6, runner)  # a reference trial, three trials, a reference trial
        hogs = [subprocess.Popen([sys.executable, "-c", SPINS]) for _ in range(os.cpu_count() or 2)]
        wait_for(diary, "done", 8, runner)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
        _, stderr = runner.communicate(timeout=90)
    assert runner.returncode == 0, stderr

    shown = json.loads(study("show", file, "--out", tmp_path, "--json", env=env).stdout)
    second = next(block for block in shown["blocks"] if block["block"] == 2)
    assert second["flagged"] and second["rerun"], shown["blocks"]
    assert any("cores" in reason for reason in second["reasons"])
    results = [
        json.loads(line)
        for ledger in sorted((tmp_path / "planted" / "ledger").iterdir())
        for line in ledger.read_text().splitlines()
    ]
    flagged = {r["key"] for r in results if r["block"] == 2 and r["role"] == "trial"}
    rerun = {r["key"] for r in results if r["block"] > 2 and r["attempt"] == 2}
    assert len(flagged) == 3
    assert flagged <= rerun, "a trial of the flagged block was not rerun"


def wait_for(diary: Path, word: str, count: int, runner: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while not diary.exists() or diary.read_text().count(f" {word} ") < count:
        assert runner.poll() is None and time.monotonic() < until
        time.sleep(0.01)
