"""An adapter that trains nothing: its steps take as long as a formula says, to the nanosecond.

The clock of its steps is its own, so that trials tell the same on any machine, however busy. Only
`PLANTED_REAL_S` seconds pass in truth. Which formula it is, is in the environment:

    PLANTED_FORMULA   a Python expression for the samples per second. Its names are the knobs,
                      `cpus`, min, max, exp, log and `noise`, which is standard normal, by the
                      settings and the repeat
    PLANTED_OOM       likewise: whether the GPU has no memory left
    PLANTED_MEMORY    likewise: bytes of device memory at the peak

Each trial that trains appends a line to the file `PLANTED_DIARY`, if it is named: its pid, when it
began, and that it is done.
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
    """As PyTorch's is called."""


class MadeUp(Framework):
    name = "made up"
    capabilities = Capabilities(
        devices=("cpu", "cuda"), precisions=PRECISIONS, own_files=True, memory_cap=True
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
        report.tell(
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
    report.tell(done=True, phase="closing")
    write("done")


def _noise(workload: Any, place: Any) -> dict[str, Any]:
    """The same for the same settings and repeat; the run folder is named after the repeat."""
    repeat = place.facts.parent.parent.name.partition("a")[0]
    seed = zlib.crc32(json.dumps([to_json(workload), repeat], sort_keys=True).encode())
    return {"noise": random.Random(seed).gauss(0, 1), "repeat": repeat}


def _formula(variable: str, names: dict[str, Any], default: Any) -> Any:
    functions = {name: getattr(math, name) for name in ("exp", "log", "sqrt")}
    functions |= {"min": min, "max": max}
    text = os.environ.get(variable)
    return eval(text, {"__builtins__": {}}, {**functions, **names}) if text else default


def write(word: str) -> None:
    """A line in the diary of the test."""
    diary = os.environ.get("PLANTED_DIARY")
    if diary:
        line = f"{os.getpid()} {time.monotonic():.3f} {word} {Path(sys.argv[-1]).parent.parent}\n"
        with open(diary, "a") as file:
            file.write(line)
