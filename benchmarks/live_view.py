"""CPU time and memory of `stepscope top` while it follows a run, in terminals of two sizes.

    python benchmarks/live_view.py [--quick]

A run is monitored at 10 Hz; `top` follows it in a pseudo-terminal. Its CPU time is measured from
outside, without its imports. GPUs are those of the fake NVML of the tests.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from pathlib import Path
from typing import Any

import results_file

ROOT = Path(__file__).parents[1]
TRAIN = ROOT / "examples" / "plain_loop" / "train.py"
STARTED_S = 12.0
"""Time until the training loop runs and `top` has drawn some frames."""


def cpu_of(pid: int) -> float:
    return time.clock_gettime(((~pid) << 3) | 2)


def follow(folder: Path, seconds: float, gpus: int, columns: int, lines: int) -> dict[str, Any]:
    """Measure `top` on a training run with this many fake GPUs."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if gpus:
        environment["PYTHONPATH"] = str(ROOT / "tests" / "fakes")
        environment["FAKE_NVML"] = json.dumps({"gpus": [{"load": "matmul"}] * gpus})
    run = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "stepscope",
            "run",
            "-q",
            "--out",
            str(folder),
            "--",
            sys.executable,
            str(TRAIN),
            "--epochs",
            "1000",
            "--fraction",
            "0.05",
        ],
        env=environment,
        stdout=subprocess.DEVNULL,
    )
    time.sleep(2.0)
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    top = subprocess.Popen(
        [sys.executable, "-m", "stepscope", "top", str(folder)],
        stdin=slave,
        stdout=slave,
        env={**os.environ, "TERM": "xterm-256color"},
    )
    drawn = [0]
    threading.Thread(target=_drain, args=(master, drawn), daemon=True).start()
    time.sleep(STARTED_S)
    cpu, started, before = cpu_of(top.pid), time.monotonic(), drawn[0]
    time.sleep(seconds)
    share = (cpu_of(top.pid) - cpu) / (time.monotonic() - started)
    rss = int(Path(f"/proc/{top.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert drawn[0] > before, "nothing was drawn"
    for process in (top, run):
        process.terminate()
        process.wait()
    return {
        "terminal": f"{columns}x{lines}",
        "gpus": gpus,
        "share_of_a_core": round(share, 4),
        "rss_mb": round(rss / 1e6, 1),
    }


def _drain(descriptor: int, drawn: list[int]) -> None:
    while True:
        drawn[0] += len(os.read(descriptor, 65536))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds each")
    options = parser.parse_args()
    seconds = 5.0 if options.quick else 20.0
    with tempfile.TemporaryDirectory() as name:
        figures = {
            label: follow(Path(name) / label, seconds, *arguments)
            for label, arguments in {
                "plain": (0, 80, 24),
                "one_gpu": (1, 80, 24),
                "eight_gpus": (8, 160, 50),
            }.items()
        }
    print(json.dumps(figures, indent=1))
    if not options.quick:
        print(results_file.write("live_view", figures))


if __name__ == "__main__":
    main()
