"""Whether the sensors saw what was done: of the right size, in the right direction and place.

Pure: from the tasks of a run and its series to verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from stepscope.analysis.series import Series, SeriesTable
from stepscope.doctor import tasks
from stepscope.doctor.tasks import Task
from stepscope.metrics import BY_KEY
from stepscope.report.format import MISSING, bytes_text, share_text

State = Literal["ok", "wrong", "not tried"]

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
_GPU = "gpu"
_NETWORK = "net:"


@dataclass(frozen=True)
class Verdict:
    """What should have been seen, what was, and what follows from it."""

    name: str
    expected: str
    seen: str
    state: State
    detail: str = ""


@dataclass(frozen=True)
class Observed:
    """A run of the load: what was done, and what the sensors saw of it."""

    tasks: Mapping[str, Task]
    series: SeriesTable
    missing: Mapping[str, str] = field(default_factory=dict)
    estimated: Mapping[str, str] = field(default_factory=dict)
    hook_loaded: bool = True

    def of(self, metric: str, place: str) -> list[Series]:
        """The series of a metric at a place: of all network namespaces, of the GPU that worked."""
        return [
            series
            for (key, entity), series in self.series.items()
            if key == metric and self._is_at(entity, place) and len(series)
        ]

    def _is_at(self, entity: str, place: str) -> bool:
        if place == _NETWORK:
            return entity.startswith(_NETWORK)
        if place == _GPU:
            idle = self.tasks.get(tasks.GPU_IDLE)
            uuid = idle.told.get(tasks.UUID) if idle else None
            return entity.partition("-")[2] == uuid
        return entity == place

    def why_not(self, task: str, *metrics: tuple[str, str]) -> str | None:
        """Why nothing can be said of a task; None where something can."""
        done = self.tasks.get(task)
        if done is None:
            return "the load did not come to it"
        if done.skipped is not None:
            return done.skipped
        for metric, place in metrics:
            found = self.of(metric, place)
            if metric in self.missing and not found:
                return self.missing[metric]
            longest = max((_longest_window(series, done) for series in found), default=0.0)
            if longest > _COARSE_S:
                return f"it was read only every {longest:.0f} s just then: too rarely to tell"
        return None


class Check(Protocol):
    """One thing that must be true of a run of the load."""

    def judge(self, observed: Observed) -> Verdict: ...


@dataclass(frozen=True)
class Amount:
    """A counter must have counted as much as was done, here and not elsewhere."""

    name: str
    task: str
    metric: str
    place: str
    least: float = 0.9
    most: float = 1.1
    slack: float = 0.0
    """In the unit, on top: what the load does besides."""
    lag_s: float = 0.0
    """How late the counter may move."""
    here: str = ""
    elsewhere: tuple[str, str] | None = None
    """A metric and place where little of it may show."""
    there: str = ""
    """The two places in words."""

    def judge(self, observed: Observed) -> Verdict:
        others = (self.elsewhere,) if self.elsewhere else ()
        reason = observed.why_not(self.task, (self.metric, self.place), *others)
        if reason is not None:
            return _not_tried(self.name, reason)
        task = observed.tasks[self.task]
        seen = _amount(observed.of(self.metric, self.place), task, self.lag_s)
        strayed = None
        if self.elsewhere:
            strayed = _amount(observed.of(*self.elsewhere), task, self.lag_s)
        estimate = observed.estimated.get(self.metric)
        if estimate:
            wrong = "" if (seen or 0.0) > 2 * (strayed or 0.0) else f"it shows {self.there}"
            detail = wrong or f"an estimate: only its direction is judged ({estimate})"
        else:
            detail = wrong = self._wrong(task, seen, strayed)
        state: State = "wrong" if wrong else "ok"
        return Verdict(self.name, *self._texts(task.amount, seen, strayed), state, detail)

    def _wrong(self, task: Task, seen: float | None, strayed: float | None) -> str:
        """What is wrong, and what it looks like; nothing if all is well."""
        where = f" (on {task.told[tasks.PLACE]})" if tasks.PLACE in task.told else ""
        if seen is None:
            return f"nothing was recorded, and no reason given{where}"
        if (strayed or 0.0) > max(seen, task.amount / 2):
            return f"it shows {self.there}"
        if not self.least * task.amount - self.slack <= seen <= self._most(task.amount):
            return f"{share_text(seen / task.amount)} of what was done{where}"
        if (strayed or 0.0) > _SMALL * task.amount + self.slack:
            return f"too much of it shows {self.there}"
        return ""

    def _most(self, done: float) -> float:
        return self.most * done + self.slack

    def _texts(self, done: float, seen: float | None, strayed: float | None) -> tuple[str, str]:
        text = _core_seconds if BY_KEY[self.metric].unit == "cores" else bytes_text
        more = "or more" if self.most == np.inf else ""
        expected = " ".join(filter(None, (text(done), self.here, more)))
        if self.elsewhere is None:
            return expected, text(seen)
        return expected, f"{text(seen)}, {text(strayed)} {self.there}"


@dataclass(frozen=True)
class Rise:
    """A gauge must have risen by as much as was taken, and fallen again."""

    name: str
    task: str
    metric: str
    place: str
    tolerance: float = 0.1

    def judge(self, observed: Observed) -> Verdict:
        reason = observed.why_not(self.task, (self.metric, self.place))
        if reason is not None:
            return _not_tried(self.name, reason)
        task = observed.tasks[self.task]
        expected = f"+{bytes_text(task.amount)}, then back"
        found = observed.of(self.metric, self.place)
        levels = _levels(found[0], task) if found else None
        if levels is None:
            return Verdict(self.name, expected, "nothing", "wrong", "nothing was recorded")
        risen, left = levels
        seen = f"+{bytes_text(risen)}" if risen >= 0 else bytes_text(risen)
        if abs(risen - task.amount) > self.tolerance * task.amount:
            detail = f"{share_text(risen / task.amount)} of what was taken"
            return Verdict(self.name, expected, seen, "wrong", detail)
        if left > _SMALL * task.amount:
            detail = f"it did not fall again: {bytes_text(left)} are left"
            return Verdict(self.name, expected, f"{seen}, not back", "wrong", detail)
        return Verdict(self.name, expected, f"{seen}, then back", "ok")


@dataclass(frozen=True)
class Bound:
    """A metric whose mean during a task must lie between two shares."""

    metric: str
    least: float = 0.0
    most: float = 1.0

    @property
    def label(self) -> str:
        return _SHORT.get(self.metric, BY_KEY[self.metric].label)

    @property
    def expected(self) -> str:
        if self.least > 0:
            return f"{self.label} over {self.least * 100:.0f} %"
        return f"{self.label} under {self.most * 100:.0f} %"


_SHORT = {"gpu_utilization": "NVML", "gpu_sm": "SM", "gpu_tensor": "tensor", "gpu_dram": "memory"}


@dataclass(frozen=True)
class Activity:
    """Units of a GPU must have been as busy as this work makes them."""

    name: str
    task: str
    bounds: tuple[Bound, ...]

    def judge(self, observed: Observed) -> Verdict:
        metrics = [(bound.metric, _GPU) for bound in self.bounds]
        reason = observed.why_not(self.task, *metrics)
        if reason is not None:
            return _not_tried(self.name, reason)
        task = observed.tasks[self.task]
        means = [_mean(observed.of(*metric), task, bound) for metric, bound in zip(
            metrics, self.bounds, strict=True)]  # fmt: skip
        expected = ", ".join(bound.expected for bound in self.bounds)
        seen = ", ".join(
            f"{bound.label} {share_text(mean)}"
            for bound, mean in zip(self.bounds, means, strict=True)
        )
        wrong = [
            bound.label
            for bound, mean in zip(self.bounds, means, strict=True)
            if mean is None or not bound.least <= mean <= bound.most
        ]
        detail = f"out of bounds: {', '.join(wrong)}" if wrong else ""
        return Verdict(self.name, expected, seen, "wrong" if wrong else "ok", detail)


class Phases:
    """Every task must be there as a phase: nothing that was reported is lost."""

    def judge(self, observed: Observed) -> Verdict:
        name = "Phases and marks"
        load = observed.tasks.get(tasks.LOAD)
        told = load.told.get(tasks.COUNT) if load else None
        phases = [
            task for task in observed.tasks.values()
            if task.name != tasks.LOAD and task.end_ns > task.begin_ns
        ]  # fmt: skip
        expected, seen = f"{told} phases", f"{len(phases)} phases"
        if told is None:
            return Verdict(name, "the load's last word", "nothing", "wrong", "it did not arrive")
        return Verdict(name, expected, seen, "ok" if told == len(phases) else "wrong")


class Hook:
    """The import hook must have been loaded into the Python that ran."""

    def judge(self, observed: Observed) -> Verdict:
        loaded = observed.hook_loaded
        return Verdict(
            "Python hook",
            "loaded",
            "loaded" if loaded else "not loaded",
            "ok" if loaded else "wrong",
            "" if loaded else "this Python does not read PYTHONPATH: epochs and steps need marks",
        )


HOST_CHECKS: tuple[Check, ...] = (
    Amount("CPU", tasks.BURN, "cpu", "main", 0.95, 1.05, 0.03),
    Amount("CPU of a worker", tasks.WORKER, "cpu", "worker", 0.95, 1.05, 0.03,
           here="in worker", elsewhere=("cpu", "main"), there="in main"),
    Amount("CPU of the machine", tasks.BURN, "host_cpu", "host", 0.9, np.inf, 0.05),
    Amount("CPU of the cgroup", tasks.BURN, "cgroup_cpu", "cgroup", 0.9, np.inf, 0.05),
    Rise("Memory", tasks.MEMORY, "memory", "tree"),
    Amount("Disk written", tasks.WRITE, "write", "tree"),
    Amount("Disk read", tasks.READ, "read", "tree"),
    # Strangers on the loopback interface count, too.
    Amount("Loopback", tasks.LOOPBACK, "loopback", _NETWORK, 0.9, 1.5),
    Rise("/dev/shm", tasks.SHM, "shm_used", "shm"),
    Phases(),
    Hook(),
)  # fmt: skip

GPU_CHECKS: tuple[Check, ...] = (
    Rise("GPU memory", tasks.GPU_MEMORY, "gpu_memory", _GPU, 0.02),
    Rise("GPU memory of run", tasks.GPU_MEMORY, "gpu_memory_tree", _GPU, 0.02),
    Amount("PCIe to GPU", tasks.GPU_COPY_IN, "gpu_pcie_received", _GPU,
           lag_s=_GPU_LAG_S, elsewhere=("gpu_pcie_sent", _GPU), there="the other way"),
    Amount("PCIe from GPU", tasks.GPU_COPY_OUT, "gpu_pcie_sent", _GPU,
           lag_s=_GPU_LAG_S, elsewhere=("gpu_pcie_received", _GPU), there="the other way"),
    Activity("Copies, not work", tasks.GPU_COPY_IN,
             (Bound("gpu_utilization", least=0.5), Bound("gpu_sm", most=0.05))),
    Activity("Memory bandwidth", tasks.GPU_COPY_INSIDE,
             (Bound("gpu_dram", least=0.5), Bound("gpu_tensor", most=0.05))),
    Activity("Tensor cores", tasks.GPU_MATRIX,
             (Bound("gpu_tensor", least=0.4), Bound("gpu_dram", most=0.2))),
    Activity("Tiny kernels", tasks.GPU_TINY, (Bound("gpu_sm", most=0.2),)),
)  # fmt: skip


def judge(observed: Observed) -> tuple[Verdict, ...]:
    """All verdicts. What a GPU that others use seems to do wrong is no proof of anything."""
    busy = _busy_before(observed)
    gpu = [check.judge(observed) for check in GPU_CHECKS]
    return (*(check.judge(observed) for check in HOST_CHECKS), *(_unless(busy, v) for v in gpu))


def _busy_before(observed: Observed) -> float:
    """How busy the GPU was while the load let it rest."""
    if observed.why_not(tasks.GPU_IDLE) is not None:
        return 0.0
    found = observed.of("gpu_utilization", _GPU)
    return _mean(found, observed.tasks[tasks.GPU_IDLE], Bound("gpu_utilization")) or 0.0


def _unless(busy: float, verdict: Verdict) -> Verdict:
    if busy <= _BUSY_BEFORE or verdict.state != "wrong":
        return verdict
    detail = f"others use this GPU: {share_text(busy)} before the test. {verdict.detail}"
    return Verdict(verdict.name, verdict.expected, verdict.seen, "not tried", detail)


def _longest_window(series: Series, task: Task) -> float:
    """The longest stretch that one reading stands for, of those that touch a task."""
    touches = (series.t >= task.begin_ns) & (series.t - series.window * 1e9 <= task.end_ns)
    return float(series.window[touches].max(initial=0.0))


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


def _levels(series: Series, task: Task) -> tuple[float, float] | None:
    """By how much a gauge rose during a task, and how much of that was left after it."""
    before = series.value[series.t <= task.begin_ns]
    during = series.between(task.begin_ns, task.end_ns)
    after = series.value[series.t > task.end_ns]
    if not len(during):
        return None
    low = float(before[-1]) if len(before) else float(during.value.min())
    left = float(after[0]) - low if len(after) else 0.0
    return float(during.value.max()) - low, left


def _mean(found: Sequence[Series], task: Task, bound: Bound) -> float | None:
    """The mean during a task: a rate's over the windows inside, a gauge's once it has arrived."""
    if not found:
        return None
    series = found[0]
    if BY_KEY[bound.metric].kind == "counter":
        inside = (series.t - series.window * 1e9 >= task.begin_ns) & (series.t <= task.end_ns)
        weights = series.window[inside]
        if weights.sum() > 0:
            return float((series.value[inside] * weights).sum() / weights.sum())
        return None
    settled = task.end_ns - int(_SETTLED * (task.end_ns - task.begin_ns))
    late = series.between(settled, task.end_ns)
    return float(late.value.mean()) if len(late) else None


def _core_seconds(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f} core-s"


def _not_tried(name: str, reason: str) -> Verdict:
    return Verdict(name, "", "", "not tried", reason)
