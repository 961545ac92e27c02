"""Measures the overhead of a study per trial, and the speed of commands with 10,000 trials.

    python benchmarks/study_overhead.py [--trials 60] [--rounds 3] [--finished 10000] [--repeats 7]

First, a study of trials that train nothing runs several times through the command line. Its wall
time minus the run time of the trials' processes is the overhead: start of the command, preparation,
monitoring, cleanup, measurement, planning, and the report at the end.

Then a study with ten thousand finished trials is written, and `plan`, `show` and `run` (which has
nothing to do) are timed in turn, each in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results_file
from stepscope.records import Outcome
from stepscope.studies.folder import Ledger, claim
from stepscope.studies.results import Attempt, Result
from stepscope.studies.run import write_study_files
from stepscope.studies.study import Study
from stepscope.studies.trial_spec import TrialSpec

PLANTED = Path(__file__).parents[1] / "tests" / "data" / "studies"
STUDY = [sys.executable, "-m", "stepscope", "study"]
GOAL_S, GOAL_LARGE_S = 0.3, 2.0

SMALL = """
workload: cnn
fixed: {{framework: made_up.loop, data: random}}
factors:
  batch_size: [{levels}]
blocks: {{reruns: 0}}
"""
LARGE = """
workload: cnn
fixed: {{framework: made_up.loop, data: random}}
factors:
  batch_size: [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
  workers: [0, 1, 2, 3, 4, 5, 6, 8, 12, 16]
  prefetch: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
  momentum: [0.5, 0.7, 0.8, 0.9, 0.99]
repeats: {repeats}
"""


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ.update(_environment(folder))
        rounds = [_round(folder / f"round{n}", options.trials) for n in range(options.rounds)]
        figures: dict[str, Any] = {"overhead": _summed(rounds, options.trials)}
        figures["large"] = _large(folder / "large", options.finished, options.repeats)
    _show(figures)
    print(f"written: {results_file.write('study_overhead', figures)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--finished", type=int, default=10_000, help="multiple of 5000")
    parser.add_argument("--repeats", type=int, default=7)
    return parser.parse_args()


def _environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(PLANTED), os.environ.get("PYTHONPATH")]))
    state = {"STEPSCOPE_STATE": str(folder / "state"), "STEPSCOPE_DATA": str(folder / "data")}
    return {**state, "PYTHONPATH": path, "PLANTED_REAL_S": "0.2"}


def _round(folder: Path, trials: int) -> dict[str, float]:
    """Run one study; return its seconds per trial outside of the processes and of the trials."""
    folder.mkdir()
    design = folder / "small.yaml"
    design.write_text(SMALL.format(levels=", ".join(map(str, range(1, trials + 1)))))
    started = time.monotonic()
    subprocess.run([*STUDY, "run", str(design), "--out", str(folder), "-q"], check=True)
    wall = time.monotonic() - started
    facts = [json.loads(p.read_text())["trial"] for p in folder.glob("small/*/*/run.json")]
    processes = sum(t["ended_ns"] - t["spawned_ns"] for t in facts) / 1e9
    whole = sum(t["cleaned_ns"] - t["started_ns"] for t in facts) / 1e9
    return {
        "trials": len(facts),
        "wall_s": wall,
        "life_s_per_trial": processes / len(facts),
        "beyond_processes_s_per_trial": (wall - processes) / len(facts),
        "beyond_trial_s_per_trial": (wall - whole) / len(facts),
    }


def _summed(rounds: list[dict[str, float]], trials: int) -> dict[str, Any]:
    worst = max(r["beyond_processes_s_per_trial"] for r in rounds)
    return {
        "trials": trials,
        "rounds": rounds,
        "worst_s_per_trial": worst,
        "goal_s_per_trial": GOAL_S,
        "reached": worst < GOAL_S,
    }


def _large(folder: Path, finished: int, repeats: int) -> dict[str, Any]:
    design = folder / "large.yaml"
    folder.mkdir()
    design.write_text(LARGE.format(repeats=max(1, finished // 5000)))
    trials = _finish(Study.of(design, folder))
    commands = {
        "plan": ["plan", str(design), "--out", str(folder)],
        "show": ["show", str(folder / "large")],
        "resume": ["run", str(design), "--out", str(folder), "-q"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, words in commands.items():
            started = time.monotonic()
            subprocess.run([*STUDY, *words], check=True, stdout=subprocess.DEVNULL)
            seconds[name].append(time.monotonic() - started)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "trials": trials,
        "seconds": seconds,
        "median_s": medians,
        "goal_s": GOAL_LARGE_S,
        "reached": all(median < GOAL_LARGE_S for median in medians.values()),
    }


def _finish(study: Study) -> int:
    """Write a study as if all trials, including reference trials, had finished."""
    study.paths.folder.mkdir(parents=True)
    write_study_files(study, [])
    ledger, generator = Ledger(study.paths), random.Random(6)
    reference = study.scan().reference
    assert reference is not None
    facts = _facts()
    for number, (spec, repeat) in enumerate(study.grid.order):
        block, place = divmod(number, study.design.block)
        if not place:
            _write(study, ledger, reference, "s", block + 1, block + 1, 0.0, facts, number)
        noise = 0.03 * generator.gauss(0, 1)
        _write(study, ledger, spec, "r", repeat, block + 1, noise, facts, number)
    return study.grid.planned


def _facts() -> str:
    """Return the run.json of a real trial, because its size affects the reading time."""
    with tempfile.TemporaryDirectory() as name:
        words = ["trial", "cnn", "--framework", "made_up.loop", "--data", "random", "-q"]
        subprocess.run(
            [sys.executable, "-m", "stepscope", *words, "--out", name], check=True, timeout=60
        )
        return next(Path(name).glob("*/run.json")).read_text()


def _write(
    study: Study,
    ledger: Ledger,
    spec: TrialSpec,
    letter: str,
    repeat: int,
    block: int,
    noise: float,
    facts: str,
    number: int,
) -> None:
    attempt = Attempt(spec.key, "reference" if letter == "s" else "trial", repeat, 1)
    claim(study.paths, attempt, spec.settings)
    folder = study.paths.run(attempt.place)
    folder.mkdir()
    (folder / "run.json").write_text(facts)
    workload = spec.workload
    rate = 1000 * math.log2(workload.batch_size) * (1 + 0.3 * min(workload.workers, 4))
    rate *= math.exp(noise)
    values = {
        "samples_per_second": rate,
        "step_seconds": workload.batch_size / rate,
        "data_wait_share": 0.1 + abs(noise),
        "cpu_cores": 1.2,
        "cpu_share": 0.6 + noise,
        "host_memory_peak": 1e9 + 1e6 * workload.batch_size,
        "gpu_memory_peak": 2e9 + 1e6 * workload.batch_size,
        "joules_per_sample": 0.1 * math.exp(noise),
        "noise_cv": 0.03,
        "noise_dof": 10.0,
    }
    ledger.add(
        Result(
            spec.key,
            spec.settings,
            attempt.role,
            repeat,
            1,
            block,
            Outcome.OK,
            started=1e9 + 10 * number,
            seconds=9.0,
            values=values,
            low=0.95 * rate,
            high=1.05 * rate,
            cause="the CPU computes",
        )
    )


def _show(figures: dict[str, Any]) -> None:
    over, large = figures["overhead"], figures["large"]
    for each in over["rounds"]:
        beyond_processes = each["beyond_processes_s_per_trial"]
        beyond_trial = each["beyond_trial_s_per_trial"]
        print(
            f"{each['trials']:.0f} trials: {beyond_processes:.3f} s per trial outside of its "
            f"processes, {beyond_trial:.3f} s outside of the trial"
        )
    print(f"goal: below {over['goal_s_per_trial']} s: {'reached' if over['reached'] else 'MISSED'}")
    for name, median in large["median_s"].items():
        print(f"{name} of {large['trials']} finished trials: {median:.2f} s (median)")
    print(f"goal: below {large['goal_s']} s each: {'reached' if large['reached'] else 'MISSED'}")


if __name__ == "__main__":
    main()
