"""Time and peak memory of `stepscope explain` for a run of one day at 10 Hz.

    python benchmarks/explain_cost.py [--quick] [--reading-only]

The run is synthetic: 864,000 samples, 864,000 steps, and five million records of the hook and the
loader workers. One run has ended and all of its samples are packed; the other was killed before the
last samples were packed. The whole command is timed in fresh processes with all files in the page
cache; `reading` is the part that reads the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results_file

TESTS = Path(__file__).parents[1] / "tests"
READING = """
import sys
from stepscope.analysis.bottleneck.explain import METRICS
from stepscope.runs.load import load
from stepscope.runs.reader import open_run
load(open_run(sys.argv[1]), METRICS)
"""
PROGRAMS = {
    "reading": lambda run: ["-c", READING, run],
    "explain": lambda run: ["-m", "stepscope", "explain", run, "--json"],
}


def cost(program: list[str]) -> tuple[float, float]:
    """Return the seconds and peak bytes of one process."""
    started = time.monotonic()
    child = subprocess.Popen([sys.executable, *program], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    seconds = time.monotonic() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(program)} failed")
    return seconds, used.ru_maxrss * 1024.0


def figures_of(program: list[str], repeats: int) -> dict[str, Any]:
    cost(program)  # into the page cache
    costs = [cost(program) for _ in range(repeats)]
    seconds = [each for each, _ in costs]
    return {
        "seconds_best": round(min(seconds), 2),
        "seconds_median": round(statistics.median(seconds), 2),
        "peak_rss_mib": round(max(peak for _, peak in costs) / (1 << 20)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one repeat, result not stored")
    parser.add_argument("--reading-only", action="store_true", help="time only the reading")
    options = parser.parse_args()
    parts = ["reading"] if options.reading_only else list(PROGRAMS)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for gpus in (0, 1):
            folder = Path(name) / f"gpus{gpus}"
            make = [sys.executable, str(TESTS / "synthetic_day.py"), str(folder), str(gpus)]
            subprocess.run(make, check=True)
            for exit_status in ("ended", "killed"):
                for part in parts:
                    program = PROGRAMS[part](str(folder / exit_status))
                    key = f"{part}_{exit_status}_{gpus}_gpus"
                    figures[key] = figures_of(program, 1 if options.quick else 5)
                    print(key, json.dumps(figures[key]), flush=True)
    if not options.quick and not options.reading_only:
        print(results_file.write("explain_cost", figures))


if __name__ == "__main__":
    main()
