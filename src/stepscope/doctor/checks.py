"""Checks of the self-test: do the sensors report the correct amount, direction and process?

Pure functions: from the tasks and series of a run to the results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np

from stepscope.analysis.run.series import Series, SeriesTable
from stepscope.doctor import tasks
from stepscope.doctor.tasks import Task
from stepscope.metrics import BY_KEY
from stepscope.report.kit.format import MISSING, bytes_text, share_text

State = Literal["ok", "wrong", "not tested"]
NOT_TESTED: State = "not tested"

_SMALL = 0.2
"""The share that may appear in the wrong place: protocol overhead, requests and reporting."""
_BUSY_BEFORE = 0.1
"""Above this utilization before the test, other processes use the GPU."""
_SETTLED = 0.6
"""The final share of a task in which a gauge that averages over a second has settled."""
_GPU_LAG_S = 0.3
"""GPU counters are updated about ten times a second; the pauses of the load are longer than this
plus a window."""
_COARSE_S = 2.5
"""A sensor with a longer period cannot separate a task from the time before and after it."""
_SHORT = {"gpu_utilization": "NVML", "gpu_sm": "SM", "gpu_tensor": "tensor", "gpu_dram": "memory"}
_GPU = "gpu"
_NETWORK = "net:"


@dataclass(frozen=True)
class CheckResult:
    """The expected and the measured value of a check, and the verdict."""

    name: str  # name of the check
    expected: str  # expected value, as text
    measured: str  # measured value, as text
    state: State  # `ok`, `wrong` or `not tested`
    detail: str = ""  # what is wrong, or why the check was not possible


class NotTested(Exception):
    """A check is not possible. The text is the reason."""


@dataclass(frozen=True)
class MeasuredLoad:
    """A run of the load: the tasks and the recorded series."""

    tasks: Mapping[str, Task]
    series: SeriesTable
    missing: Mapping[str, str] = field(default_factory=dict)
    estimated: Mapping[str, str] = field(default_factory=dict)
    hook_loaded: bool = True

    def of(self, metric: str, place: str) -> list[Series]:
        """Return the series of a metric at a place: an entity, all networks or the tested GPU."""
        if place == _GPU:
            idle = self.tasks.get(tasks.GPU_IDLE)
            place = str(idle.uuid) if idle else ""
        return [
            series
            for (key, entity), series in self.series.items()
            if key == metric
            and (entity == place or (place == _NETWORK and entity.startswith(_NETWORK)))
            and len(series)
        ]

    def task(self, name: str, *metrics: tuple[str, str]) -> Task:
        """Return a task that these metrics (with their places) cover; raises NotTested."""
        done = self.tasks.get(name)
        if done is None:
            raise NotTested("the self-test did not get to this task")
        if done.skipped is not None:
            raise NotTested(done.skipped)
        for metric, place in metrics:
            recorded = self.of(metric, place)
            if metric in self.missing and not recorded:
                raise NotTested(self.missing[metric])
            longest = 0.0  # the longest window of a reading during the task
            for series in recorded:
                begins = series.t - series.window * 1e9
                touches = (series.t >= done.begin_ns) & (begins <= done.end_ns)
                longest = max(longest, float(series.window[touches].max(initial=0.0)))
            if longest > _COARSE_S:
                raise NotTested(f"gaps of up to {longest:.0f} s between readings")
        return done


@dataclass(frozen=True)
class AmountCheck:
    """A counter must increase by the amount of work, here and not elsewhere."""

    name: str
    task: str
    metric: str
    place: str
    min_share: float = 0.9
    max_share: float = 1.1
    slack: float = 0.0  # absolute tolerance in the unit, for other work of the load
    lag_s: float = 0.0  # delay of the counter
    here: str = ""
    elsewhere: tuple[str, str] | None = None  # metric and place that must stay low
    there: str = ""  # the two places as text

    def judge(self, observed: MeasuredLoad) -> CheckResult:
        others = (self.elsewhere,) if self.elsewhere else ()
        task = observed.task(self.task, (self.metric, self.place), *others)
        measured, *strays = (
            _amount(observed.of(*source), task, self.lag_s)
            for source in ((self.metric, self.place), *others)
        )
        stray = next(iter(strays), None)
        estimate = observed.estimated.get(self.metric)
        if estimate:
            correct = (measured or 0.0) > 2 * (stray or 0.0)
            wrong = "" if correct else f"was counted {self.there}"
            detail = wrong or f"estimated; only the direction is checked ({estimate})"
        else:
            detail = wrong = self._wrong(task, measured, stray or 0.0)

        def text(value: float | None) -> str:
            if BY_KEY[self.metric].unit != "cores":
                return bytes_text(value)
            return MISSING if value is None else f"{value:.2f} core-s"

        more = "or more" if self.max_share == np.inf else ""
        expected = " ".join(filter(None, (text(task.amount), self.here, more)))
        shown = (
            f"{text(measured)}, {text(stray)} {self.there}" if self.elsewhere else text(measured)
        )
        return CheckResult(self.name, expected, shown, "wrong" if wrong else "ok", detail)

    def _wrong(self, task: Task, measured: float | None, stray: float) -> str:
        """Return what is wrong; empty if the check passes."""
        where = f" (on {task.place})" if task.place else ""
        if measured is None:
            return f"no values were recorded, for an unknown reason{where}"
        if stray > max(measured, task.amount / 2):
            return f"was counted {self.there}"
        low = self.min_share * task.amount - self.slack
        high = self.max_share * task.amount + self.slack
        if not low <= measured <= high:
            return f"{share_text(measured / task.amount)} of expected{where}"
        if stray > _SMALL * task.amount + self.slack:
            return f"too much was counted {self.there}"
        return ""


@dataclass(frozen=True)
class RiseCheck:
    """A gauge must rise by the allocated amount and fall again."""

    name: str
    task: str
    metric: str
    place: str
    tolerance: float = 0.1

    def judge(self, observed: MeasuredLoad) -> CheckResult:
        task = observed.task(self.task, (self.metric, self.place))
        expected = f"+{bytes_text(task.amount)}, then released"
        series = next(iter(observed.of(self.metric, self.place)), None)
        if series is None or not len(during := series.between(task.begin_ns, task.end_ns)):
            return CheckResult(self.name, expected, "nothing", "wrong", "no values recorded")
        before = series.value[series.t <= task.begin_ns]
        after = series.value[series.t > task.end_ns]
        low = float(before[-1] if len(before) else during.value.min())
        rise = float(during.value.max()) - low
        remaining = float(after[0]) - low if len(after) else 0.0
        measured = f"+{bytes_text(rise)}" if rise >= 0 else bytes_text(rise)
        if abs(rise - task.amount) > self.tolerance * task.amount:
            detail = f"{share_text(rise / task.amount)} of expected"
            return CheckResult(self.name, expected, measured, "wrong", detail)
        if remaining > _SMALL * task.amount:
            detail = f"{bytes_text(remaining)} remains after the release"
            return CheckResult(self.name, expected, f"{measured}, not released", "wrong", detail)
        return CheckResult(self.name, expected, f"{measured}, then released", "ok")


class Bound(NamedTuple):
    """A lower or upper bound for the mean of a metric during a task."""

    metric: str
    side: Literal["over", "under"]
    share: float

    def holds(self, mean: float | None) -> bool:
        if mean is None:
            return False
        return mean >= self.share if self.side == "over" else mean <= self.share


@dataclass(frozen=True)
class ActivityCheck:
    """The units of a GPU must be as busy as the task makes them."""

    name: str
    task: str
    bounds: tuple[Bound, ...]

    def judge(self, observed: MeasuredLoad) -> CheckResult:
        task = observed.task(self.task, *((bound.metric, _GPU) for bound in self.bounds))
        expected, measured, wrong = [], [], []
        for bound in self.bounds:
            label, mean = _SHORT[bound.metric], _mean(observed, bound.metric, task)
            expected.append(f"{label} {bound.side} {bound.share * 100:.0f}%")
            measured.append(f"{label} {share_text(mean)}")
            if not bound.holds(mean):
                wrong.append(label)
        detail = f"out of range: {', '.join(wrong)}" if wrong else ""
        state: State = "wrong" if wrong else "ok"
        return CheckResult(self.name, ", ".join(expected), ", ".join(measured), state, detail)


Check = AmountCheck | RiseCheck | ActivityCheck

# fmt: off
HOST_CHECKS: tuple[Check, ...] = (
    AmountCheck("CPU", tasks.BURN, "cpu", "main", 0.95, 1.05, slack=0.03),
    AmountCheck("Worker CPU", tasks.WORKER, "cpu", "worker", 0.95, 1.05, slack=0.03,
                here="in worker", elsewhere=("cpu", "main"), there="in main"),
    AmountCheck("Host CPU", tasks.BURN, "host_cpu", "host", 0.9, np.inf, slack=0.05),
    AmountCheck("Cgroup CPU", tasks.BURN, "cgroup_cpu", "cgroup", 0.9, np.inf, slack=0.05),
    RiseCheck("Memory", tasks.MEMORY, "memory", "tree"),
    AmountCheck("Disk write", tasks.WRITE, "write", "tree"),
    AmountCheck("Disk read", tasks.READ, "read", "tree"),
    # Includes loopback traffic of other processes.
    AmountCheck("Loopback", tasks.LOOPBACK, "loopback", _NETWORK, 0.9, 1.5),
    RiseCheck("/dev/shm", tasks.SHM, "shm_used", "shm"),
)
GPU_CHECKS: tuple[Check, ...] = (
    RiseCheck("GPU memory", tasks.GPU_MEMORY, "gpu_memory", _GPU, 0.02),
    RiseCheck("GPU memory of the run", tasks.GPU_MEMORY, "gpu_memory_run", _GPU, 0.02),
    AmountCheck("PCIe to GPU", tasks.GPU_COPY_IN, "gpu_pcie_received", _GPU, lag_s=_GPU_LAG_S,
                elsewhere=("gpu_pcie_sent", _GPU), there="in the other direction"),
    AmountCheck("PCIe from GPU", tasks.GPU_COPY_OUT, "gpu_pcie_sent", _GPU, lag_s=_GPU_LAG_S,
                elsewhere=("gpu_pcie_received", _GPU), there="in the other direction"),
    ActivityCheck("Copies without compute", tasks.GPU_COPY_IN,
                  (Bound("gpu_utilization", "over", 0.5), Bound("gpu_sm", "under", 0.05))),
    ActivityCheck("Memory bandwidth", tasks.GPU_COPY_INSIDE,
                  (Bound("gpu_dram", "over", 0.5), Bound("gpu_tensor", "under", 0.05))),
    ActivityCheck("Tensor cores", tasks.GPU_MATRIX,
                  (Bound("gpu_tensor", "over", 0.4), Bound("gpu_dram", "under", 0.2))),
    ActivityCheck("Tiny kernels", tasks.GPU_TINY, (Bound("gpu_sm", "under", 0.2),)),
)
# fmt: on


def judge(observed: MeasuredLoad) -> tuple[CheckResult, ...]:
    """Return all results. Failed checks of a GPU that other processes use count as not tested."""

    def results(checks: Sequence[Check]) -> Iterator[CheckResult]:
        for check in checks:
            try:
                yield check.judge(observed)
            except NotTested as reason:
                yield CheckResult(check.name, "", "", NOT_TESTED, str(reason))

    busy = 0.0
    with contextlib.suppress(NotTested):
        busy = _mean(observed, "gpu_utilization", observed.task(tasks.GPU_IDLE)) or 0.0
    others = f"other processes use this GPU ({share_text(busy)} utilization before the test)"
    gpu_results = [
        replace(result, state=NOT_TESTED, detail=f"{others}: {result.detail}")
        if result.state == "wrong" and busy > _BUSY_BEFORE
        else result
        for result in results(GPU_CHECKS)
    ]
    hook = CheckResult("Python hook", "loaded", "loaded", "ok")
    if not observed.hook_loaded:
        detail = "this Python ignores PYTHONPATH; use marks to report epochs and steps"
        hook = replace(hook, measured="not loaded", state="wrong", detail=detail)
    return (*results(HOST_CHECKS), _check_phases(observed), hook, *gpu_results)


def _check_phases(observed: MeasuredLoad) -> CheckResult:
    """Check that every task was recorded as a phase."""
    name = "Phases and marks"
    load = observed.tasks.get(tasks.LOAD)
    if load is None or load.tasks is None:
        return CheckResult(name, "final mark", "nothing", "wrong", "the final mark is missing")
    count = sum(task.name != tasks.LOAD and task.was_done for task in observed.tasks.values())
    state: State = "ok" if load.tasks == count else "wrong"
    return CheckResult(name, f"{load.tasks} phases", f"{count} phases", state)


def _amount(recorded: Sequence[Series], task: Task, lag_s: float) -> float | None:
    """Integrate a rate over the windows that overlap a task. Whole windows count, because the
    amount of work within a window is averaged over it."""
    end_ns = task.end_ns + lag_s * 1e9
    total, touched = 0.0, False
    for series in recorded:
        begins = series.t - series.window * 1e9
        near = (series.t > task.begin_ns) & (begins < end_ns) & (series.window > 0)
        total += float((series.value[near] * series.window[near]).sum())
        touched = touched or bool(near.any())
    return total if touched else None


def _mean(observed: MeasuredLoad, metric: str, task: Task) -> float | None:
    """Return the mean during a task: of a rate over the windows inside, of a settled gauge."""
    series = next(iter(observed.of(metric, _GPU)), None)
    if series is None:
        return None
    if BY_KEY[metric].kind == "counter":
        inside = (series.t - series.window * 1e9 >= task.begin_ns) & (series.t <= task.end_ns)
        weights = series.window[inside]
        if weights.sum() > 0:
            return float((series.value[inside] * weights).sum() / weights.sum())
        return None
    settled = task.end_ns - int(_SETTLED * (task.end_ns - task.begin_ns))
    late = series.between(settled, task.end_ns)
    return float(late.value.mean()) if len(late) else None
