"""A neighbour that takes the CPUs during a block is noticed, and the block is run again."""

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


def test_a_disturbed_block_is_flagged_and_run_again(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    env = planted_environment(tmp_path, diary=diary)
    file = design(tmp_path, DESIGN)
    runner = subprocess.Popen(
        [*STUDY, "run", str(file), "--out", str(tmp_path)], env=env, stderr=subprocess.PIPE
    )
    hogs: list[subprocess.Popen[bytes]] = []
    try:
        wait_for(diary, "begin", 6, runner)  # the sentinel and three trials, then a sentinel again
        hogs = [subprocess.Popen([sys.executable, "-c", SPINS]) for _ in range(os.cpu_count() or 2)]
        wait_for(diary, "done", 8, runner)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
        _, said = runner.communicate(timeout=90)
    assert runner.returncode == 0, said

    told = json.loads(study("show", file, "--out", tmp_path, "--json", env=env).stdout)
    second = next(block for block in told["blocks"] if block["number"] == 2)
    assert second["flagged"] and second["rerun"], told["blocks"]
    assert any("others used" in reason for reason in second["reasons"])
    results = [
        json.loads(line)
        for ledger in sorted((tmp_path / "planted" / "ledger").iterdir())
        for line in ledger.read_text().splitlines()
    ]
    disturbed = {r["key"] for r in results if r["block"] == 2 and r["role"] == "trial"}
    again = {r["key"] for r in results if r["block"] > 2 and r["attempt"] == 2}
    assert len(disturbed) == 3
    assert disturbed <= again, "a trial of the disturbed block was not run again"


def wait_for(diary: Path, word: str, count: int, runner: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 60
    while not diary.exists() or diary.read_text().count(f" {word} ") < count:
        assert runner.poll() is None and time.monotonic() < until
        time.sleep(0.01)
