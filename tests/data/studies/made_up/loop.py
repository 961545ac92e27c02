"""An adapter that trains nothing: a formula sets the exact duration of its steps.

The steps have their own clock, so that trials give the same results on any machine, however busy.
A trial really takes only `PLANTED_REAL_S` seconds. The environment contains the formulas:

    PLANTED_FORMULA   a Python expression for the samples per second. Its names are the settings,
                      `cpus`, min, max, exp, log and `noise`, a standard normal number that depends
                      on the settings and the repeat
    PLANTED_OOM       an expression: whether the GPU runs out of memory
    PLANTED_MEMORY    an expression: peak bytes of device memory

If `PLANTED_DIARY` names a file, each trial appends lines to it: its pid, the time, and `begin` or
`done`.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import time
import zlib
from pathlib import Path
from typing import Any

from stepscope.records.codec import to_json
from stepscope.steplog import Step, StepLog
from stepscope.workloads.frameworks.contract import Capabilities, Framework, Memory
from stepscope.workloads.reporting import RankPlacement, RankReport
from stepscope.workloads.spec import PRECISIONS, Workload

_STEPS = 40


class OutOfMemoryError(RuntimeError):
    """Has the same name as PyTorch's error."""


class MadeUp(Framework):
    name = "made up"
    capabilities = Capabilities(
        devices=("cpu", "cuda"), precisions=PRECISIONS, custom_files=True, memory_cap=True
    )

    def train(self, workload: Workload, placement: RankPlacement, report: RankReport) -> None:
        train(workload, placement, report)

    def is_out_of_memory(self, error: BaseException, memory: Memory) -> bool:
        return memory == "gpu" and isinstance(error, OutOfMemoryError)


FRAMEWORK = MadeUp()


def train(workload: Any, place: Any, report: Any) -> None:
    names = {**to_json(workload), "cpus": len(os.sched_getaffinity(0)), **_noise(workload, place)}
    write("begin")
    with report.phase("build"):
        report.update(
            device="cpu",
            batch={"global": workload.global_batch},
            samples_per_epoch=10_000,
            device_memory={"reserved_peak": _formula("PLANTED_MEMORY", names, 0.0)},
        )
    time.sleep(float(os.environ.get("PLANTED_REAL_S", "0.05")))
    if _formula("PLANTED_OOM", names, False):
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    rate = float(_formula("PLANTED_FORMULA", names, 100.0))
    log, now = StepLog(place.steps), time.monotonic_ns()
    for step in range(_STEPS):
        now += round(1e9 * workload.global_batch / rate)
        log.add(Step(now, step, 0, 0, 0, 0))
    log.close()
    report.update(done=True, phase="closing")
    write("done")


def _noise(workload: Any, place: Any) -> dict[str, Any]:
    """Return noise that depends only on the settings and the repeat in the folder's name."""
    repeat = place.facts.parent.parent.name.partition("a")[0]
    seed = zlib.crc32(json.dumps([to_json(workload), repeat], sort_keys=True).encode())
    return {"noise": random.Random(seed).gauss(0, 1), "repeat": repeat}


def _formula(variable: str, names: dict[str, Any], default: Any) -> Any:
    functions = {name: getattr(math, name) for name in ("exp", "log", "sqrt")}
    functions |= {"min": min, "max": max}
    text = os.environ.get(variable)
    return eval(text, {"__builtins__": {}}, {**functions, **names}) if text else default


def write(word: str) -> None:
    """Append a line to the diary of the test."""
    diary = os.environ.get("PLANTED_DIARY")
    if diary:
        line = f"{os.getpid()} {time.monotonic():.3f} {word} {Path(sys.argv[-1]).parent.parent}\n"
        with open(diary, "a") as file:
            file.write(line)
