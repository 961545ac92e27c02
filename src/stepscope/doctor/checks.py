"""Whether the sensors saw what was done: of the right size, in the right direction and place.

Pure: from the tasks of a run and its series to the results.
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

State = Literal["ok", "wrong", "not tried"]
NOT_TRIED: State = "not tried"

_SMALL = 0.2
"""What may show in the wrong place: protocol, requests and the work of telling, as a share."""
_BUSY_BEFORE = 0.1
"""A GPU that is used more than this before the test is used by others."""
_SETTLED = 0.6
"""The share of a task, from its end, in which a gauge that averages over a second has arrived."""
_GPU_LAG_S = 0.3
"""A GPU's counters move about ten times a second; the load rests longer than this and a window."""
_COARSE_S = 2.5
"""A sensor that was read so rarely during a task cannot tell it from what was before and after."""
_SHORT = {"gpu_utilization": "NVML", "gpu_sm": "SM", "gpu_tensor": "tensor", "gpu_dram": "memory"}
_GPU = "gpu"
_NETWORK = "net:"


@dataclass(frozen=True)
class CheckResult:
    """What should have been seen, what was, and what follows from it."""

    name: str
    expected: str
    seen: str
    state: State
    detail: str = ""


class NotTried(Exception):
    """Nothing can be said of a task; the text says why."""


@dataclass(frozen=True)
class MeasuredLoad:
    """A run of the load: what was done, and what the sensors saw of it."""

    tasks: Mapping[str, Task]
    series: SeriesTable
    missing: Mapping[str, str] = field(default_factory=dict)
    estimated: Mapping[str, str] = field(default_factory=dict)
    hook_loaded: bool = True

    def of(self, metric: str, place: str) -> list[Series]:
        """The series of a metric at a place: of all network namespaces, of the GPU that worked."""
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
        """A task of which these metrics can tell something, each at its place; else NotTried."""
        done = self.tasks.get(name)
        if done is None:
            raise NotTried("the load did not come to it")
        if done.skipped is not None:
            raise NotTried(done.skipped)
        for metric, place in metrics:
            found = self.of(metric, place)
            if metric in self.missing and not found:
                raise NotTried(self.missing[metric])
            longest = 0.0  # the longest stretch that one reading of the task stands for
            for series in found:
                begins = series.t - series.window * 1e9
                touches = (series.t >= done.begin_ns) & (begins <= done.end_ns)
                longest = max(longest, float(series.window[touches].max(initial=0.0)))
            if longest > _COARSE_S:
                raise NotTried(
                    f"it was read only every {longest:.0f} s just then: too rarely to tell"
                )
        return done


@dataclass(frozen=True)
class AmountCheck:
    """A counter must have counted as much as was done, here and not elsewhere."""

    name: str
    task: str
    metric: str
    place: str
    least: float = 0.9
    most: float = 1.1
    slack: float = 0.0  # in the unit, on top: what the load does besides
    lag_s: float = 0.0  # how late the counter may move
    here: str = ""
    elsewhere: tuple[str, str] | None = None  # a metric and place where little of it may show
    there: str = ""  # the two places in words

    def judge(self, observed: MeasuredLoad) -> CheckResult:
        others = (self.elsewhere,) if self.elsewhere else ()
        task = observed.task(self.task, (self.metric, self.place), *others)
        seen, *strays = (
            _amount(observed.of(*source), task, self.lag_s)
            for source in ((self.metric, self.place), *others)
        )
        stray = next(iter(strays), None)
        estimate = observed.estimated.get(self.metric)
        if estimate:
            wrong = "" if (seen or 0.0) > 2 * (stray or 0.0) else f"it shows {self.there}"
            detail = wrong or f"an estimate: only its direction is judged ({estimate})"
        else:
            detail = wrong = self._wrong(task, seen, stray or 0.0)

        def text(value: float | None) -> str:
            if BY_KEY[self.metric].unit != "cores":
                return bytes_text(value)
            return MISSING if value is None else f"{value:.2f} core-s"

        more = "or more" if self.most == np.inf else ""
        expected = " ".join(filter(None, (text(task.amount), self.here, more)))
        shown = f"{text(seen)}, {text(stray)} {self.there}" if self.elsewhere else text(seen)
        return CheckResult(self.name, expected, shown, "wrong" if wrong else "ok", detail)

    def _wrong(self, task: Task, seen: float | None, stray: float) -> str:
        """What is wrong, and what it looks like; nothing if all is well."""
        where = f" (on {task.place})" if task.place else ""
        if seen is None:
            return f"nothing was recorded, and no reason given{where}"
        if stray > max(seen, task.amount / 2):
            return f"it shows {self.there}"
        least, most = self.least * task.amount - self.slack, self.most * task.amount + self.slack
        if not least <= seen <= most:
            return f"{share_text(seen / task.amount)} of what was done{where}"
        if stray > _SMALL * task.amount + self.slack:
            return f"too much of it shows {self.there}"
        return ""


@dataclass(frozen=True)
class RiseCheck:
    """A gauge must have risen by as much as was taken, and fallen again."""

    name: str
    task: str
    metric: str
    place: str
    tolerance: float = 0.1

    def judge(self, observed: MeasuredLoad) -> CheckResult:
        task = observed.task(self.task, (self.metric, self.place))
        expected = f"+{bytes_text(task.amount)}, then back"
        series = next(iter(observed.of(self.metric, self.place)), None)
        if series is None or not len(during := series.between(task.begin_ns, task.end_ns)):
            return CheckResult(self.name, expected, "nothing", "wrong", "nothing was recorded")
        before = series.value[series.t <= task.begin_ns]
        after = series.value[series.t > task.end_ns]
        low = float(before[-1] if len(before) else during.value.min())
        risen = float(during.value.max()) - low
        left = float(after[0]) - low if len(after) else 0.0
        seen = f"+{bytes_text(risen)}" if risen >= 0 else bytes_text(risen)
        if abs(risen - task.amount) > self.tolerance * task.amount:
            detail = f"{share_text(risen / task.amount)} of what was taken"
            return CheckResult(self.name, expected, seen, "wrong", detail)
        if left > _SMALL * task.amount:
            detail = f"it did not fall again: {bytes_text(left)} are left"
            return CheckResult(self.name, expected, f"{seen}, not back", "wrong", detail)
        return CheckResult(self.name, expected, f"{seen}, then back", "ok")


class Bound(NamedTuple):
    """A share that a metric's mean during a task must be over, or under."""

    metric: str
    side: Literal["over", "under"]
    share: float

    def holds(self, mean: float | None) -> bool:
        if mean is None:
            return False
        return mean >= self.share if self.side == "over" else mean <= self.share


@dataclass(frozen=True)
class ActivityCheck:
    """Units of a GPU must have been as busy as this work makes them."""

    name: str
    task: str
    bounds: tuple[Bound, ...]

    def judge(self, observed: MeasuredLoad) -> CheckResult:
        task = observed.task(self.task, *((bound.metric, _GPU) for bound in self.bounds))
        expected, seen, wrong = [], [], []
        for bound in self.bounds:
            label, mean = _SHORT[bound.metric], _mean(observed, bound.metric, task)
            expected.append(f"{label} {bound.side} {bound.share * 100:.0f} %")
            seen.append(f"{label} {share_text(mean)}")
            if not bound.holds(mean):
                wrong.append(label)
        detail = f"out of bounds: {', '.join(wrong)}" if wrong else ""
        state: State = "wrong" if wrong else "ok"
        return CheckResult(self.name, ", ".join(expected), ", ".join(seen), state, detail)


Check = AmountCheck | RiseCheck | ActivityCheck

# fmt: off
HOST_CHECKS: tuple[Check, ...] = (
    AmountCheck("CPU", tasks.BURN, "cpu", "main", 0.95, 1.05, slack=0.03),
    AmountCheck("CPU of a worker", tasks.WORKER, "cpu", "worker", 0.95, 1.05, slack=0.03,
                here="in worker", elsewhere=("cpu", "main"), there="in main"),
    AmountCheck("CPU of the machine", tasks.BURN, "host_cpu", "host", 0.9, np.inf, slack=0.05),
    AmountCheck("CPU of the cgroup", tasks.BURN, "cgroup_cpu", "cgroup", 0.9, np.inf, slack=0.05),
    RiseCheck("Memory", tasks.MEMORY, "memory", "tree"),
    AmountCheck("Disk written", tasks.WRITE, "write", "tree"),
    AmountCheck("Disk read", tasks.READ, "read", "tree"),
    # Strangers on the loopback interface count, too.
    AmountCheck("Loopback", tasks.LOOPBACK, "loopback", _NETWORK, 0.9, 1.5),
    RiseCheck("/dev/shm", tasks.SHM, "shm_used", "shm"),
)
GPU_CHECKS: tuple[Check, ...] = (
    RiseCheck("GPU memory", tasks.GPU_MEMORY, "gpu_memory", _GPU, 0.02),
    RiseCheck("GPU memory of run", tasks.GPU_MEMORY, "gpu_memory_tree", _GPU, 0.02),
    AmountCheck("PCIe to GPU", tasks.GPU_COPY_IN, "gpu_pcie_received", _GPU, lag_s=_GPU_LAG_S,
                elsewhere=("gpu_pcie_sent", _GPU), there="the other way"),
    AmountCheck("PCIe from GPU", tasks.GPU_COPY_OUT, "gpu_pcie_sent", _GPU, lag_s=_GPU_LAG_S,
                elsewhere=("gpu_pcie_received", _GPU), there="the other way"),
    ActivityCheck("Copies, not work", tasks.GPU_COPY_IN,
                  (Bound("gpu_utilization", "over", 0.5), Bound("gpu_sm", "under", 0.05))),
    ActivityCheck("Memory bandwidth", tasks.GPU_COPY_INSIDE,
                  (Bound("gpu_dram", "over", 0.5), Bound("gpu_tensor", "under", 0.05))),
    ActivityCheck("Tensor cores", tasks.GPU_MATRIX,
                  (Bound("gpu_tensor", "over", 0.4), Bound("gpu_dram", "under", 0.2))),
    ActivityCheck("Tiny kernels", tasks.GPU_TINY, (Bound("gpu_sm", "under", 0.2),)),
)
# fmt: on


def judge(observed: MeasuredLoad) -> tuple[CheckResult, ...]:
    """All results. What a GPU that others use seems to do wrong is no proof of anything."""

    def results(checks: Sequence[Check]) -> Iterator[CheckResult]:
        for check in checks:
            try:
                yield check.judge(observed)
            except NotTried as reason:
                yield CheckResult(check.name, "", "", NOT_TRIED, str(reason))

    busy = 0.0
    with contextlib.suppress(NotTried):
        busy = _mean(observed, "gpu_utilization", observed.task(tasks.GPU_IDLE)) or 0.0
    others = f"others use this GPU: {share_text(busy)} before the test"
    of_gpu = [
        replace(result, state=NOT_TRIED, detail=f"{others}. {result.detail}")
        if result.state == "wrong" and busy > _BUSY_BEFORE
        else result
        for result in results(GPU_CHECKS)
    ]
    hook = CheckResult("Python hook", "loaded", "loaded", "ok")
    if not observed.hook_loaded:
        detail = "this Python does not read PYTHONPATH: epochs and steps need marks"
        hook = replace(hook, seen="not loaded", state="wrong", detail=detail)
    return (*results(HOST_CHECKS), _check_phases(observed), hook, *of_gpu)


def _check_phases(observed: MeasuredLoad) -> CheckResult:
    """Every task must be there as a phase: nothing that was reported is lost."""
    name = "Phases and marks"
    load = observed.tasks.get(tasks.LOAD)
    if load is None or load.tasks is None:
        return CheckResult(name, "the load's last word", "nothing", "wrong", "it did not arrive")
    count = sum(task.name != tasks.LOAD and task.was_done for task in observed.tasks.values())
    state: State = "ok" if load.tasks == count else "wrong"
    return CheckResult(name, f"{load.tasks} phases", f"{count} phases", state)


def _amount(found: Sequence[Series], task: Task, lag_s: float) -> float | None:
    """What a rate adds up to in the windows that touch a task, each of them whole: what was done
    in a part of a window is spread over all of it."""
    end_ns = task.end_ns + lag_s * 1e9
    total, touched = 0.0, False
    for series in found:
        begins = series.t - series.window * 1e9
        near = (series.t > task.begin_ns) & (begins < end_ns) & (series.window > 0)
        total += float((series.value[near] * series.window[near]).sum())
        touched = touched or bool(near.any())
    return total if touched else None


def _mean(observed: MeasuredLoad, metric: str, task: Task) -> float | None:
    """The mean during a task: a rate's over the windows inside, a gauge's once it has arrived."""
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
