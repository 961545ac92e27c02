"""Compare the overhead of two versions of stepscope: refactoring must not make it slower.

    python benchmarks/before_after.py OLD [--rounds 5]

OLD is another checkout. Both run the same commands alternately, in fresh processes of the same
interpreter. A figure is the median over the rounds; the ratio is the median of the ratios of each
round, with its lowest and highest.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import results_file

ROOT = Path(__file__).resolve().parents[1]
RECORDED = ROOT / "tests" / "data" / "bottlenecks" / "recorded" / "cpu_slow_transform.tar.xz"
TREE = """
import multiprocessing, time
def work(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(2000))
        time.sleep(0.02)
with multiprocessing.Pool(8) as pool:
    pool.map(work, [SECONDS] * 8, chunksize=1)
"""
DESIGN = """
workload: cnn
fixed: {framework: made_up.loop, data: random}
factors: {batch_size: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]}
blocks: {reruns: 0}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each monitored command")
    options = parser.parse_args()
    checkouts = {"before": options.old.resolve(), "now": ROOT}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with tarfile.open(RECORDED) as archive:
            archive.extractall(folder / "recorded", filter="data")
        run = folder / "recorded"
        (folder / "design.yaml").write_text(DESIGN)
        programs: dict[str, Callable[[Path, Path], float]] = {
            "monitor: CPU ms per second, 9 processes at 10 Hz": (
                lambda checkout, out: monitor_ms(checkout, out, options.seconds)
            ),
            "import stepscope: CPU s": (
                lambda checkout, out: cpu_seconds(checkout, "-c", "import stepscope")
            ),
            "run -- true: CPU s": (
                lambda checkout, out: stepscope(checkout, "run", "-q", "--out", out, "--", "true")
            ),
            "explain of a recorded run: CPU s": (
                lambda checkout, out: stepscope(checkout, "explain", run)
            ),
            "report of a recorded run: CPU s": lambda checkout, out: stepscope(
                checkout, "report", run
            ),
            "trial: s beyond its process": trial_seconds,
            "study: s per trial beyond its process": (
                lambda checkout, out: study_seconds(checkout, out, folder / "design.yaml")
            ),
        }
        measured: dict[str, dict[str, list[float]]] = {
            name: {version: [] for version in checkouts} for name in programs
        }
        for number in range(options.rounds):
            for name, program in programs.items():
                order = list(checkouts) if number % 2 else list(reversed(checkouts))
                for version in order:
                    with tempfile.TemporaryDirectory(dir=folder) as out:
                        measured[name][version].append(program(checkouts[version], Path(out)))
    figures = {name: compared(**each) for name, each in measured.items()}
    for name, each in figures.items():
        ratio = f"{each['ratio']:.2f} ({each['ratio_low']:.2f} to {each['ratio_high']:.2f})"
        print(f"{name:52} {each['before']:8.3f} {each['now']:8.3f}   {ratio}")
    print(f"written: {results_file.write('before_after', figures)}", file=sys.stderr)


def compared(before: list[float], now: list[float]) -> dict[str, float]:
    ratios = [b / a for a, b in zip(before, now, strict=True)]
    return {
        "before": statistics.median(before),
        "now": statistics.median(now),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
    }


def environment(checkout: Path) -> dict[str, str]:
    planted = checkout / "tests" / "data" / "studies"
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (checkout / "src", planted))),
        "PLANTED_REAL_S": "0.2",
    }


def cpu_seconds(checkout: Path, *words: str | Path) -> float:
    """Return the user and system time of a process and its children."""
    child = subprocess.Popen(
        [sys.executable, *map(str, words)],
        env=environment(checkout),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{checkout}: {words} exited with status {status}")
    return usage.ru_utime + usage.ru_stime


def stepscope(checkout: Path, *words: str | Path) -> float:
    return cpu_seconds(checkout, "-m", "stepscope", *words)


def monitor_ms(checkout: Path, out: Path, seconds: float) -> float:
    script = TREE.replace("SECONDS", str(seconds))
    command = [sys.executable, "-m", "stepscope", "run", "-q", "--json", "--out", str(out)]
    done = subprocess.run(
        [*command, "--", sys.executable, "-c", script],
        env=environment(checkout),
        stdout=subprocess.PIPE,
        check=True,
    )
    return 1000 * float(json.loads(done.stdout)["monitor"]["cores"])


def trial_seconds(checkout: Path, out: Path) -> float:
    words = ["trial", "cnn", "--framework", "made_up.loop", "--data", "random", "-q"]
    return _beyond_processes(checkout, [*words, "--out", str(out)], out)


def study_seconds(checkout: Path, out: Path, design: Path) -> float:
    words = ["study", "run", str(design), "-q", "--out", str(out)]
    return _beyond_processes(checkout, words, out)


def _beyond_processes(checkout: Path, words: list[str], out: Path) -> float:
    """Return the seconds per trial outside of its process."""
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "stepscope", *words], env=environment(checkout), check=True
    )
    wall = time.monotonic() - started
    trials = [json.loads(path.read_text())["trial"] for path in out.rglob("run.json")]
    inside: float = sum(trial["ended_ns"] - trial["spawned_ns"] for trial in trials) / 1e9
    return (wall - inside) / len(trials)


if __name__ == "__main__":
    main()
