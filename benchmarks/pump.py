"""Measures how fast `--epoch-pattern` forwards the output of a command.

    python benchmarks/pump.py [--megabytes 500] [--rounds 7]

A program prints lines as a training does, as fast as it can, to `cat`, to `tee` (which also stores
them), and under `stepscope run` with several patterns. The target is /dev/null. The program times
itself, so that the start of stepscope does not count. All variants run in turn in each round.

The goal holds for patterns with a text that each match contains: lines without it are skipped.
Other patterns are searched in each line.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import results_file

GOAL_MB_PER_S = 300
WITH_TEXT = ("text", "text, any case")
PATTERNS = {
    "text": r"Epoch (\d+)",
    "text, any case": r"(?i)epoch[ :]+(\d+)",
    "alternatives": r"(?:Epoch|epoch) (\d+)",
    "digits": r"(\d+)/\d+",
}
PRINTS = """
import os, sys, time
step = "[2026-11-18 13:05:{0:02},{1:03}][INFO] step {2} loss={3:.5f} lr=1.0e-03 512 samples/s\\n"
lines = (step.format(n % 60, n % 1000, n, 1 / (n + 1)) for n in range(3000))
block = "".join(lines).encode() + b"Epoch 3/10 finished\\n"
size = int(float(sys.argv[1]) * 1e6)
begun = time.monotonic()
for _ in range(size // len(block)):
    rest = memoryview(block)
    while rest:
        rest = rest[os.write(1, rest) :]
print(size / 1e6 / (time.monotonic() - begun), file=sys.stderr)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=float, default=500)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        for name in ("cat", "tee", *PATTERNS):
            rates.setdefault(name, []).append(_measure(name, options.megabytes))
    figures = _summed(rates)
    for name, each in figures["variants"].items():
        print(
            f"{name:15} {each['median_mb_per_s']:6.0f} MB/s (median), "
            f"{each['lowest_mb_per_s']:.0f} to {each['highest_mb_per_s']:.0f}, "
            f"{each['median_share_of_tee']:.2f} of tee"
        )
    print(f"goal: {GOAL_MB_PER_S} MB/s: {'reached' if figures['reached'] else 'MISSED'}")
    print(f"written: {results_file.write('pump', {'megabytes': options.megabytes, **figures})}")


def _measure(name: str, megabytes: float) -> float:
    """Return MB/s as seen by the program."""
    program = [sys.executable, "-S", "-c", PRINTS, str(megabytes)]
    with tempfile.TemporaryDirectory() as folder:
        if name in PATTERNS:
            stepscope = [sys.executable, "-m", "stepscope", "run", "-q", "--out", folder]
            words = [*stepscope, "--epoch-pattern", PATTERNS[name], "--", *program]
        else:
            reader = "cat" if name == "cat" else f"tee {folder}/log"
            words = ["sh", "-c", f'"$@" | {reader}', "sh", *program]
        done = subprocess.run(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=True
        )
        _check(Path(folder), name, megabytes)
    return float(done.stderr)


def _check(folder: Path, name: str, megabytes: float) -> None:
    stored = sum(log.stat().st_size for log in folder.glob("**/*log"))
    assert name == "cat" or stored > 0.99e6 * megabytes, "output is missing"


def _summed(rates: dict[str, list[float]]) -> dict[str, Any]:
    variants = {
        name: {
            "pattern": PATTERNS.get(name),
            "mb_per_s": each,
            "median_mb_per_s": statistics.median(each),
            "lowest_mb_per_s": min(each),
            "highest_mb_per_s": max(each),
            "median_share_of_tee": statistics.median(
                rate / tee for rate, tee in zip(each, rates["tee"], strict=True)
            ),
        }
        for name, each in rates.items()
    }
    reached = all(statistics.median(rates[name]) >= GOAL_MB_PER_S for name in WITH_TEXT)
    return {"variants": variants, "goal_mb_per_s": GOAL_MB_PER_S, "reached": reached}


if __name__ == "__main__":
    main()
