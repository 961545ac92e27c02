"""Coverage of the confidence interval of a trial, and the overhead of a trial.

    python benchmarks/trial_noise.py [--trials 12] [--learn 6] [--seconds 4] [--quick]

First, the noise between processes is measured from repeats, in a separate state folder. Then every
configuration is run in turn, in fresh processes and through the command line. Each printed interval
is compared with the mean of the other trials of the same configuration, and should cover it in at
least 85% of cases. For comparison, the coverage of an interval from the steps of one process only
is printed as well.
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
    "shutdown",
    "other",
    "cleanup",
)


class Bench:
    """Runs `stepscope trial` with separate run and state folders."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder = folder
        self._seconds = seconds

    def trial(self, arguments: Sequence[str], *more: str) -> dict[str, Any]:
        """Return the JSON of one command."""
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "stepscope",
                "trial",
                *arguments,
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
        result: dict[str, Any] = json.loads(done.stdout)
        return result


def mean_of_others(rates: Sequence[float], excluded: int) -> float:
    return statistics.mean(rate for index, rate in enumerate(rates) if index != excluded)


def covered(trials: Sequence[Trial], interval: Callable[[Trial], tuple[float, float]]) -> int:
    """Return how many intervals cover the mean of the other trials."""
    rates = [trial["samples_per_second"] for trial in trials]
    means = [mean_of_others(rates, index) for index in range(len(rates))]
    pairs = zip(map(interval, trials), means, strict=True)
    return sum(low <= mean <= high for (low, high), mean in pairs)


def printed(trial: Trial) -> tuple[float, float]:
    return trial["samples_per_second_low"], trial["samples_per_second_high"]


def naive(trial: Trial) -> tuple[float, float]:
    """Return an interval from the steps of one process only."""
    rate = trial["samples_per_second"]
    half = rate * trial["step_standard_error"] * students_t(19)
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
            100 * statistics.median(trial["step_standard_error"] for trial in trials), 3
        ),
        "covered": covered(trials, printed),
        "covered_naively": covered(trials, naive),
        "steady": sum(trial["steady"] for trial in trials),
        "warmup_steps": statistics.median(trial["warmup_steps"] for trial in trials),
        "outside_steps_seconds": {
            part: round(statistics.median(seconds), 3)
            for part, values in costs.items()
            if (seconds := [each for each in values if each is not None])
        },
    }


def measure(bench: Bench, trials: int, learn: int) -> dict[str, Any]:
    """Measure the noise from repeats of all configurations, then run each configuration in turn."""
    for arguments in CONFIGURATIONS.values():
        bench.trial(arguments, "--repeat", str(learn))
    results: dict[str, list[Trial]] = {name: [] for name in CONFIGURATIONS}
    for _ in range(trials):
        for name, arguments in CONFIGURATIONS.items():
            results[name].append(bench.trial(arguments))
    by_name = {name: figures_of(trials_of) for name, trials_of in results.items()}
    last = results["cnn"][-1]
    cases = sum(each["trials"] for each in by_name.values())
    hits, naive_hits = (
        sum(each[key] for each in by_name.values()) for key in ("covered", "covered_naively")
    )
    return {
        "noise": {key: last[f"noise_{key}"] for key in ("cv", "dof", "source", "trials")},
        "covered_percent": round(100 * hits / cases, 1),
        "covered_naively_percent": round(100 * naive_hits / cases, 1),
        "goal_percent": 100 * GOAL,
        "configurations": by_name,
    }


def show(figures: dict[str, Any]) -> None:
    noise = figures["noise"]
    print(f"noise {noise['cv']:.1%}, {noise['source']} from {noise['trials']} trials\n")
    print(f"{'':<18}{'samples/s':>10}{'cv %':>7}{'± %':>7}{'covered':>10}{'naive':>9}")
    for name, each in figures["configurations"].items():
        hits, naive_hits = (
            f"{each[key]}/{each['trials']}" for key in ("covered", "covered_naively")
        )
        print(
            f"{name:<18}{each['samples_per_second']:>10,.0f}{each['cv_percent']:>7.1f}"
            f"{each['half_width_percent']:>7.1f}{hits:>10}{naive_hits:>9}"
        )
    print(
        f"\ncovered {figures['covered_percent']}% (goal {figures['goal_percent']:.0f}%), "
        f"from steps only {figures['covered_naively_percent']}%\n"
    )
    print("median seconds outside the measured steps")
    for name, each in figures["configurations"].items():
        parts = ", ".join(f"{part} {s:.2f}" for part, s in each["outside_steps_seconds"].items())
        print(f"{name:<18}{parts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=12, help="trials per configuration")
    parser.add_argument("--learn", type=int, default=6, help="repeats to measure the noise")
    parser.add_argument("--seconds", type=float, default=4.0, help="training time per trial")
    parser.add_argument("--quick", action="store_true", help="few short trials, result not stored")
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
