"""Whether the interval printed for one trial is true, and what a trial costs beyond its steps.

    python benchmarks/trial_noise.py [--trials 12] [--learn 6] [--seconds 4] [--quick]

The spread between processes is learnt first, from repeats, in a state folder of its own. Then every
configuration is tried again and again in fresh processes, in turn, through the command line. Each
printed interval is held against the mean of the other trials of the same: it should cover it in at
least 85 % of cases. Beside it stands what an interval from the steps of one process alone covers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import results_file
from stepscope.analysis.trial.throughput import students_t

Trial = dict[str, Any]

CONFIGURATIONS = {
    "cnn": ["cnn"],
    "cnn, 2 workers": ["cnn", "--batch-size", "128", "--workers", "2"],
    "lstm": ["lstm"],
}
GOAL = 0.85
OVERHEADS = (
    "overhead",
    "start",
    "import",
    "data",
    "build",
    "first_step",
    "warmup",
    "closing",
    "other",
    "cleanup",
)


class Bench:
    """Runs `stepscope trial` in a folder and with a memory of its own."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._seconds = seconds

    def trial(self, words: Sequence[str], *more: str) -> dict[str, Any]:
        """What one command says of its trial, or trials, as JSON."""
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "stepscope",
                "trial",
                *words,
                "--seconds",
                str(self._seconds),
                "--out",
                str(self._folder / "runs"),
                "--json",
                "--quiet",
                *more,
            ],
            env=os.environ | {"STEPSCOPE_STATE": str(self._folder / "state")},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        told: dict[str, Any] = json.loads(done.stdout)
        return told


def others_mean(rates: Sequence[float], one: int) -> float:
    return statistics.mean(rate for place, rate in enumerate(rates) if place != one)


def covered(trials: Sequence[Trial], interval: Callable[[Trial], tuple[float, float]]) -> int:
    """How many intervals hold the mean of the other trials."""
    rates = [trial["samples_per_second"] for trial in trials]
    means = [others_mean(rates, place) for place in range(len(rates))]
    pairs = zip(map(interval, trials), means, strict=True)
    return sum(low <= mean <= high for (low, high), mean in pairs)


def printed(trial: Trial) -> tuple[float, float]:
    return trial["samples_per_second_low"], trial["samples_per_second_high"]


def naive(trial: Trial) -> tuple[float, float]:
    """What a tool would print that has never seen a second process."""
    rate = trial["samples_per_second"]
    half = rate * trial["within_process"] * students_t(19)
    return rate - half, rate + half


def figures_of(trials: Sequence[Trial]) -> dict[str, Any]:
    rates = [trial["samples_per_second"] for trial in trials]
    widths = [
        trial["samples_per_second_high"] / trial["samples_per_second"] - 1 for trial in trials
    ]
    costs = {part: [trial[f"{part}_seconds"] for trial in trials] for part in OVERHEADS}
    return {
        "trials": len(trials),
        "samples_per_second": round(statistics.mean(rates), 1),
        "cv_percent": round(100 * statistics.stdev(rates) / statistics.mean(rates), 2),
        "half_width_percent": round(100 * statistics.median(widths), 2),
        "within_percent": round(
            100 * statistics.median(trial["within_process"] for trial in trials), 3
        ),
        "covered": covered(trials, printed),
        "covered_naively": covered(trials, naive),
        "steady": sum(trial["steady"] for trial in trials),
        "warmup_steps": statistics.median(trial["warmup_steps"] for trial in trials),
        "overhead_seconds": {
            part: round(statistics.median(seconds), 3)
            for part, told in costs.items()
            if (seconds := [each for each in told if each is not None])
        },
    }


def measure(bench: Bench, trials: int, learn: int) -> dict[str, Any]:
    """Learn from repeats of all configurations, then try each in turn."""
    for words in CONFIGURATIONS.values():
        bench.trial(words, "--repeat", str(learn))
    tried: dict[str, list[Trial]] = {name: [] for name in CONFIGURATIONS}
    for _ in range(trials):
        for name, words in CONFIGURATIONS.items():
            tried[name].append(bench.trial(words))
    by_name = {name: figures_of(found) for name, found in tried.items()}
    last = tried["cnn"][-1]
    cases = sum(each["trials"] for each in by_name.values())
    hits, naive_hits = (
        sum(each[key] for each in by_name.values()) for key in ("covered", "covered_naively")
    )
    return {
        "spread": {key: last[f"between_{key}"] for key in ("processes", "dof", "source", "trials")},
        "covered_percent": round(100 * hits / cases, 1),
        "covered_naively_percent": round(100 * naive_hits / cases, 1),
        "goal_percent": 100 * GOAL,
        "configurations": by_name,
    }


def show(figures: dict[str, Any]) -> None:
    spread = figures["spread"]
    print(f"spread {spread['processes']:.1%}, {spread['source']} from {spread['trials']} trials\n")
    print(f"{'':<18}{'samples/s':>10}{'cv %':>7}{'± %':>7}{'covered':>10}{'naive':>9}")
    for name, each in figures["configurations"].items():
        hits, misled = (f"{each[key]}/{each['trials']}" for key in ("covered", "covered_naively"))
        print(
            f"{name:<18}{each['samples_per_second']:>10,.0f}{each['cv_percent']:>7.1f}"
            f"{each['half_width_percent']:>7.1f}{hits:>10}{misled:>9}"
        )
    print(
        f"\ncovered {figures['covered_percent']} % (goal {figures['goal_percent']:.0f} %), "
        f"by steps alone {figures['covered_naively_percent']} %\n"
    )
    print("median seconds beyond the measured steps")
    for name, each in figures["configurations"].items():
        parts = ", ".join(f"{part} {s:.2f}" for part, s in each["overhead_seconds"].items())
        print(f"{name:<18}{parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=12, help="of each configuration")
    parser.add_argument("--learn", type=int, default=6, help="repeats of each to learn from")
    parser.add_argument("--seconds", type=float, default=4.0, help="of training in each")
    parser.add_argument("--quick", action="store_true", help="a few short ones, for a look")
    options = parser.parse_args()
    if options.quick:
        options.trials, options.learn, options.seconds = 3, 2, 1.0
    with tempfile.TemporaryDirectory() as name:
        figures = measure(Bench(Path(name), options.seconds), options.trials, options.learn)
    show(figures)
    if not options.quick:
        print(results_file.write("trial_noise", figures))


if __name__ == "__main__":
    main()
