"""Writes run folders of synthetic trials, like the runner and its processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import synthetic
from stepscope.records.codec import to_json
from stepscope.runs.paths import RunPaths
from stepscope.steplog import Step, StepLog
from stepscope.workloads.spec import Workload
from synthetic import BEGIN_NS, OK, RUNNING

S = 1_000_000_000
IMPORT_S, DATA_S, BUILD_S, FIRST_STEP_S, CLOSING_S = 1.5, 0.3, 0.2, 0.8, 0.1
START_S, OTHER_S, CLEANUP_S = 0.2, 0.05, 0.15
BEFORE_STEPS_S = START_S + IMPORT_S + DATA_S + BUILD_S
ASSUMED = {"cv": 0.08, "dof": 4, "source": "assumed", "trials": 0}


CNN = Workload("cnn", data="jpeg", batch_size=32, workers=2)


def even_steps(count: int, seconds: float = 0.05, noise: float = 0.01) -> list[float]:
    """Return lengths of steps with a little noise."""
    random = np.random.default_rng(count)
    return [float(seconds * np.exp(noise * each)) for each in random.normal(size=count)]


@dataclass(frozen=True)
class Trial:
    """A synthetic trial. `steps` are the lengths of all steps but the first."""

    workload: Workload = CNN
    steps: Sequence[float] = field(default_factory=lambda: even_steps(200))
    wait: float = 0.2  # share of a step that the host waits for data
    gpus: int = 0
    cpus: float = 4.0  # of the machine; with 2, there is interference
    exit_status: dict[str, Any] = field(default_factory=lambda: OK)
    noise: dict[str, Any] | None = field(default_factory=lambda: dict(ASSUMED))
    limits: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # overrides for `trial` in run.json
    steps_per_epoch: int = 1875
    rank_facts: Callable[[int], dict[str, Any]] = lambda rank: {}  # overrides for `rank*.json`

    @property
    def seconds(self) -> float:
        """Time from the start of the runner to the end of the processes."""
        return BEFORE_STEPS_S + FIRST_STEP_S + sum(self.steps) + CLOSING_S + OTHER_S


def write_trial(folder: Path, trial: Trial | None = None) -> RunPaths:
    """Write a trial with samples of its monitor, steps and facts of its ranks."""
    trial = trial or Trial()
    plan = synthetic.Plan(
        name=trial.workload.short_name,
        command=("python", "-m", "stepscope.trials.child", "spec.json"),
        seconds=trial.seconds,
        hertz=5,
        epochs=1,
        workers=trial.workload.workers,
        gpus=trial.gpus,
        allowed=trial.cpus,
        exit_status=trial.exit_status,
        facts=_facts(trial),
    )
    paths = synthetic.write_run(folder, plan)
    paths.trial.mkdir()
    for rank in range(trial.workload.ranks):
        _write_steps(paths.trial_steps(rank), trial, late_ns=rank * 1000)
        facts = {**_rank_facts(trial, rank), **trial.rank_facts(rank)}
        paths.trial_rank(rank).write_text(json.dumps(facts))
    return paths


def write_lost_trial(folder: Path, trial: Trial | None = None) -> RunPaths:
    """Write a trial whose runner was killed long ago."""
    paths = write_trial(folder, replace(trial or Trial(), exit_status=RUNNING))
    for stream in folder.glob("*.arrows"):
        os.utime(stream, (0, 0))
    return paths


def write_repeats(parent: Path, trial: Trial, rates: Sequence[float]) -> list[Path]:
    """Write repeats with these rates relative to the trial."""
    folders = []
    for number, rate in enumerate(rates, 1):
        facts = {"repeat": number, "repeats": len(rates)}
        steps = [seconds / rate for seconds in trial.steps]
        paths = write_trial(parent / f"r{number}", replace(trial, steps=steps, facts=facts))
        folders.append(paths.folder)
    return folders


def _facts(trial: Trial) -> dict[str, Any]:
    ended = BEGIN_NS + int(trial.seconds * S)
    return {
        "workload": to_json(trial.workload),
        "limits": trial.limits,
        "trial": {
            "repeat": 1,
            "repeats": 1,
            "noise": trial.noise,
            "command": ["stepscope", "trial", trial.workload.model, "--workers", "2"],
            "started_ns": BEGIN_NS,
            "spawned_ns": BEGIN_NS + int(START_S * S),
            "ended_ns": ended,
            "cleaned_ns": ended + int(CLEANUP_S * S),
            "leftovers": [],
            **trial.facts,
        },
    }


def _write_steps(path: Path, trial: Trial, late_ns: int) -> None:
    log = StepLog(path)
    end = BEGIN_NS + int((BEFORE_STEPS_S + FIRST_STEP_S) * S) + late_ns
    for number, seconds in enumerate([FIRST_STEP_S, *trial.steps]):
        end += int(seconds * S) if number else 0
        wait, copy = int(seconds * trial.wait * S), int(seconds * 0.05 * S)
        log.add(Step(end, number, wait, copy, int(seconds * S) - wait - copy, wait))
    log.close()


def _rank_facts(trial: Trial, rank: int) -> dict[str, Any]:
    workload = trial.workload
    steps = len(trial.steps) + 1
    cuda = {"allocated_peak": 2.1e9, "reserved_peak": 2.6e9, "retries": 0, "cap": None}
    return {
        "rank": rank,
        "pid": 4100 + rank,
        "device": f"cuda:{rank}" if trial.gpus else "cpu",
        "device_name": "NVIDIA H200" if trial.gpus else "Intel Xeon Platinum 8480+",
        "versions": {"torch": "2.14.1"},
        "model": {"name": workload.model, "parameters": 89_450},
        "data": {
            "name": "jpeg",
            "samples": 60_000,
            "available_samples": 60_000,
            "source": "generated",
        },
        "settings": {**to_json(workload), "pin": bool(trial.gpus), "classes": 10},
        "threads": 2,
        "cpus": [0, 1],
        "batch": {
            "per_rank": workload.batch_size,
            "accumulate": workload.accumulate,
            "ranks": workload.ranks,
            "global": workload.global_batch,
        },
        "steps_per_epoch": trial.steps_per_epoch,
        "samples_per_epoch": trial.steps_per_epoch * workload.global_batch,
        "phases": {
            "import": IMPORT_S,
            "data": DATA_S,
            "build": BUILD_S,
            "first_step": FIRST_STEP_S,
            "training": sum(trial.steps),
            "closing": CLOSING_S,
        },
        "steps": steps,
        "samples": steps * workload.step_samples,
        "device_memory": cuda if trial.gpus else None,
        "error": None,
        "done": True,
    }
