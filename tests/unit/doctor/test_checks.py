"""Verdicts on made-up runs: sensors that tell the truth, and each way to lie."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stepscope.analysis.run.series import Series
from stepscope.doctor import tasks
from stepscope.doctor.checks import CheckResult, MeasuredLoad, judge
from stepscope.doctor.tasks import LOAD, MarkValue, Task, tasks_of

MIB = 1 << 20
GB = 10**9
GPU = "GPU-01234567-89ab-cdef-0123-456789abcdef"

WHEN = {
    tasks.IDLE: (1.0, 2.0),
    tasks.BURN: (2.4, 3.9),
    tasks.SHM: (4.3, 5.6),
    tasks.LOOPBACK: (6.0, 6.1),
    tasks.MEMORY: (6.5, 7.8),
    tasks.WRITE: (8.2, 8.3),
    tasks.WORKER: (8.7, 10.2),
    tasks.READ: (10.6, 10.7),
    tasks.GPU_IDLE: (12.0, 14.0),
    tasks.GPU_MEMORY: (14.6, 16.6),
    tasks.GPU_COPY_IN: (17.2, 19.2),
    tasks.GPU_COPY_OUT: (19.8, 21.8),
    tasks.GPU_COPY_INSIDE: (22.4, 24.4),
    tasks.GPU_MATRIX: (25.0, 27.0),
    tasks.GPU_TINY: (27.6, 29.6),
}
AMOUNTS: dict[str, float] = {
    tasks.BURN: 1.5,
    tasks.SHM: 64 * MIB,
    tasks.LOOPBACK: 64 * MIB,
    tasks.MEMORY: 256 * MIB,
    tasks.WRITE: 64 * MIB,
    tasks.WORKER: 1.5,
    tasks.READ: 64 * MIB,
    tasks.GPU_MEMORY: 2048 * MIB,
    tasks.GPU_COPY_IN: 110 * GB,
    tasks.GPU_COPY_OUT: 112 * GB,
}
END = 31.0


def done() -> dict[str, Task]:
    """What the load says."""
    found = {
        name: Task(name, int(begin * 1e9), int(end * 1e9), AMOUNTS.get(name, 0))
        for name, (begin, end) in WHEN.items()
    }
    found[tasks.GPU_IDLE] = replace(found[tasks.GPU_IDLE], uuid=GPU)
    for name in (tasks.WRITE, tasks.READ):
        found[name] = replace(found[name], place="zfs")
    found[LOAD] = Task(LOAD, 30 * GB, 30 * GB, tasks=len(WHEN))
    return found


def counted(period: float, *amounts: tuple[str, float]) -> Series:
    """A counter as a sensor reads it: what was done in each window, as a rate."""
    t = np.arange(0.55, END, period)
    value = np.zeros(len(t))
    for task, amount in amounts:
        begin, end = WHEN[task]
        overlap = np.clip(np.minimum(t, end) - np.maximum(t - period, begin), 0, None)
        value += amount * overlap / (end - begin) / period
    return Series((t * 1e9).astype(np.int64), np.full(len(t), period), value)


def gauged(period: float, base: float, *levels: tuple[str, float]) -> Series:
    """A gauge: a level, and more during some tasks."""
    t = np.arange(0.55, END, period)
    value = np.full(len(t), base)
    for task, level in levels:
        begin, end = WHEN[task]
        value += np.where((t > begin) & (t < end), level, 0.0)
    return Series((t * 1e9).astype(np.int64), np.zeros(len(t)), value)


def of_task(task: str) -> tuple[str, float]:
    return task, AMOUNTS[task]


def share(task: str, mean: float) -> tuple[str, float]:
    begin, end = WHEN[task]
    return task, mean * (end - begin)


def truth() -> MeasuredLoad:
    """A machine whose sensors are right, protocol and strangers included."""
    to_gpu = (tasks.GPU_COPY_IN, 1.04 * AMOUNTS[tasks.GPU_COPY_IN])
    from_gpu = (tasks.GPU_COPY_OUT, 1.04 * AMOUNTS[tasks.GPU_COPY_OUT])
    requests = (tasks.GPU_COPY_IN, 0.05 * AMOUNTS[tasks.GPU_COPY_IN])
    series = {
        ("cpu", "main"): counted(0.1, of_task(tasks.BURN)),
        ("cpu", "worker"): counted(0.1, of_task(tasks.WORKER)),
        ("host_cpu", "host"): counted(1.0, of_task(tasks.BURN), (tasks.IDLE, 0.8)),
        ("cgroup_cpu", "cgroup"): counted(1.0, of_task(tasks.BURN)),
        ("memory", "tree"): gauged(0.1, 20e6, of_task(tasks.MEMORY)),
        ("write", "tree"): counted(0.5, of_task(tasks.WRITE)),
        ("read", "tree"): counted(0.5, of_task(tasks.READ)),
        ("loopback", "net:4026531840"): counted(1.0, of_task(tasks.LOOPBACK)),
        ("shm_used", "shm"): gauged(1.0, 5e6, of_task(tasks.SHM)),
        ("gpu_memory", GPU): gauged(0.2, 600e6, of_task(tasks.GPU_MEMORY)),
        ("gpu_memory", "GPU-another"): gauged(0.2, 70e9),
        ("gpu_memory_tree", GPU): gauged(1.0, 500e6, of_task(tasks.GPU_MEMORY)),
        ("gpu_pcie_received", GPU): counted(0.2, to_gpu),
        ("gpu_pcie_sent", GPU): counted(0.2, from_gpu, requests),
        ("gpu_utilization", GPU): gauged(0.5, 0.0, (tasks.GPU_COPY_IN, 0.98)),
        ("gpu_sm", GPU): counted(0.2, share(tasks.GPU_MATRIX, 0.95)),
        ("gpu_dram", GPU): counted(
            0.2, share(tasks.GPU_COPY_INSIDE, 0.87), share(tasks.GPU_MATRIX, 0.02)
        ),
        ("gpu_tensor", GPU): counted(0.2, share(tasks.GPU_MATRIX, 0.6)),
    }
    return MeasuredLoad(done(), series)


def with_series(observed: MeasuredLoad, **lies: Series) -> MeasuredLoad:
    """The same, with what some sensors say replaced wherever they say it."""
    keys = {
        metric: key for key in observed.series for metric in [key[0]] if key[1] != "GPU-another"
    }
    return replace(observed, series={**observed.series, **{keys[m]: s for m, s in lies.items()}})


def verdict(observed: MeasuredLoad, name: str) -> CheckResult:
    return next(each for each in judge(observed) if each.name == name)


def scaled(series: Series, factor: float) -> Series:
    return replace(series, value=series.value * factor)


def test_the_truth_is_believed() -> None:
    verdicts = judge(truth())
    assert {each.name: each.state for each in verdicts if each.state != "ok"} == {}
    assert verdict(truth(), "PCIe to GPU").seen == "114 GB, 5.50 GB the other way"


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("host_cpu", "CPU of the machine"),
        ("cgroup_cpu", "CPU of the cgroup"),
        ("write", "Disk written"),
        ("read", "Disk read"),
        ("loopback", "Loopback"),
        ("gpu_pcie_received", "PCIe to GPU"),
        ("gpu_pcie_sent", "PCIe from GPU"),
    ],
)
def test_half_of_what_was_done_is_wrong(metric: str, name: str) -> None:
    observed = truth()
    ((_, series),) = [(k, s) for k, s in observed.series.items() if k[0] == metric]
    found = verdict(with_series(observed, **{metric: scaled(series, 0.5)}), name)
    assert found.state == "wrong"
    assert "of what was done" in found.detail


def test_twice_as_much_is_wrong_unless_others_count() -> None:
    observed = truth()
    doubled = {
        key: scaled(series, 2) if key[0] in ("write", "host_cpu") else series
        for key, series in observed.series.items()
    }
    lying = replace(observed, series=doubled)
    assert verdict(lying, "Disk written").detail == "200 % of what was done (on zfs)"
    assert verdict(lying, "CPU of the machine").state == "ok"


def test_received_and_sent_swapped_is_wrong_in_both() -> None:
    observed = truth()
    received, sent = (observed.series[f"gpu_pcie_{way}", GPU] for way in ("received", "sent"))
    swapped = with_series(observed, gpu_pcie_received=sent, gpu_pcie_sent=received)
    for name in ("PCIe to GPU", "PCIe from GPU"):
        found = verdict(swapped, name)
        assert (found.state, found.detail) == ("wrong", "it shows the other way")


def test_work_of_a_worker_that_shows_in_main_is_wrong() -> None:
    observed = truth()
    both = counted(0.1, of_task(tasks.BURN), of_task(tasks.WORKER))
    nowhere = scaled(observed.series["cpu", "worker"], 0)
    lying = replace(
        observed, series={**observed.series, ("cpu", "main"): both, ("cpu", "worker"): nowhere}
    )
    found = verdict(lying, "CPU of a worker")
    assert (found.state, found.detail) == ("wrong", "it shows in main")
    assert verdict(lying, "CPU").state == "ok"


def test_work_that_shows_twice_is_wrong() -> None:
    observed = truth()
    both = counted(0.1, of_task(tasks.BURN), (tasks.WORKER, 0.7))
    lying = replace(observed, series={**observed.series, ("cpu", "main"): both})
    assert verdict(lying, "CPU of a worker").detail == "too much of it shows in main"


def test_a_counter_that_moves_late_is_still_believed() -> None:
    observed = truth()
    late = observed.series["gpu_pcie_received", GPU]
    late = replace(late, t=late.t + int(0.25e9))
    assert verdict(with_series(observed, gpu_pcie_received=late), "PCIe to GPU").state == "ok"


@pytest.mark.parametrize(
    ("size", "state", "detail"),
    [(256 * MIB, "ok", ""), (128 * MIB, "wrong", "50 % of what was taken"), (0, "wrong", "0 %")],
)
def test_memory_must_rise_by_what_was_taken(size: float, state: str, detail: str) -> None:
    observed = with_series(truth(), memory=gauged(0.1, 20e6, (tasks.MEMORY, size)))
    found = verdict(observed, "Memory")
    assert found.state == state
    assert detail in found.detail


def test_memory_must_fall_again() -> None:
    series = gauged(0.1, 20e6, of_task(tasks.MEMORY))
    begin = int(WHEN[tasks.MEMORY][0] * 1e9)
    stays = replace(series, value=np.where(series.t > begin, 20e6 + 256 * MIB, 20e6))
    found = verdict(with_series(truth(), memory=stays), "Memory")
    assert (found.state, found.detail) == ("wrong", "it did not fall again: 268 MB are left")


@pytest.mark.parametrize(
    ("metric", "task", "mean", "name"),
    [
        ("gpu_tensor", tasks.GPU_MATRIX, 0.0, "Tensor cores"),
        ("gpu_dram", tasks.GPU_COPY_INSIDE, 0.1, "Memory bandwidth"),
        ("gpu_sm", tasks.GPU_COPY_IN, 0.9, "Copies, not work"),
        ("gpu_sm", tasks.GPU_TINY, 0.9, "Tiny kernels"),
    ],
)
def test_a_unit_that_is_said_to_work_or_to_rest_and_did_not(
    metric: str, task: str, mean: float, name: str
) -> None:
    found = verdict(with_series(truth(), **{metric: counted(0.2, share(task, mean))}), name)
    assert found.state == "wrong"
    assert "out of bounds" in found.detail


def test_what_is_missing_with_a_reason_is_not_tried() -> None:
    observed = truth()
    kept = {key: series for key, series in observed.series.items() if key[0] != "gpu_sm"}
    without = replace(observed, series=kept, missing={"gpu_sm": "needs a Hopper GPU"})
    found = verdict(without, "Tiny kernels")
    assert (found.state, found.detail) == ("not tried", "needs a Hopper GPU")


def test_what_is_missing_without_a_reason_is_wrong() -> None:
    observed = truth()
    kept = {key: s for key, s in observed.series.items() if key[0] not in ("write", "shm_used")}
    without = replace(observed, series=kept)
    assert verdict(without, "Disk written").detail.startswith("nothing was recorded, and no reason")
    assert verdict(without, "/dev/shm").state == "wrong"


def test_what_was_skipped_is_not_tried() -> None:
    observed = truth()
    skipped = Task(tasks.READ, 1, 1, skipped="the file stays in the page cache")
    without = replace(observed, tasks={**observed.tasks, tasks.READ: skipped})
    found = verdict(without, "Disk read")
    assert (found.state, found.detail) == ("not tried", "the file stays in the page cache")


def test_a_sensor_that_was_read_too_rarely_proves_nothing() -> None:
    to_gpu = (tasks.GPU_COPY_IN, 1.04 * AMOUNTS[tasks.GPU_COPY_IN])
    rarely = with_series(truth(), gpu_pcie_received=counted(8.0, to_gpu, (tasks.GPU_IDLE, 9e11)))
    found = verdict(rarely, "PCIe to GPU")
    assert found.state == "not tried" and "only every 8 s" in found.detail


def test_no_gpu_is_no_fault() -> None:
    observed = truth()
    reason = "no NVIDIA driver"
    host = {key: series for key, series in observed.series.items() if not key[0].startswith("gpu")}
    no_gpu = {name: Task(name, 1, 1, skipped=reason) for name in tasks.GPU_TASKS}
    count = len(WHEN) - len(no_gpu)
    load = {LOAD: Task(LOAD, 1, 1, tasks=count)}
    without = MeasuredLoad({**observed.tasks, **no_gpu, **load}, host)
    states = {each.name: each.state for each in judge(without)}
    assert [name for name, state in states.items() if state == "not tried"] == [
        "GPU memory",
        "GPU memory of run",
        "PCIe to GPU",
        "PCIe from GPU",
        "Copies, not work",
        "Memory bandwidth",
        "Tensor cores",
        "Tiny kernels",
    ]
    assert "wrong" not in states.values()


def test_a_gpu_that_others_use_proves_nothing() -> None:
    observed = truth()
    busy = gauged(0.5, 0.4, (tasks.GPU_COPY_IN, 0.5))
    traffic = scaled(observed.series["gpu_pcie_received", GPU], 3)
    found = verdict(
        with_series(observed, gpu_utilization=busy, gpu_pcie_received=traffic), "PCIe to GPU"
    )
    assert found.state == "not tried"
    assert "others use this GPU: 40 %" in found.detail


def test_an_estimate_is_judged_by_its_direction_only() -> None:
    observed = truth()
    half = scaled(observed.series["gpu_pcie_received", GPU], 0.5)
    rough = replace(
        with_series(observed, gpu_pcie_received=half), estimated={"gpu_pcie_received": "by looking"}
    )
    assert verdict(rough, "PCIe to GPU").state == "ok"
    nothing = with_series(rough, gpu_pcie_received=scaled(half, 0))
    assert verdict(nothing, "PCIe to GPU").state == "wrong"


def test_a_lost_phase_and_a_lost_last_word_are_noticed() -> None:
    observed = truth()
    fewer = {name: task for name, task in observed.tasks.items() if name != tasks.IDLE}
    found = verdict(replace(observed, tasks=fewer), "Phases and marks")
    assert (found.state, found.expected, found.seen) == ("wrong", "15 phases", "14 phases")
    silent = {name: task for name, task in observed.tasks.items() if name != LOAD}
    assert verdict(replace(observed, tasks=silent), "Phases and marks").state == "wrong"


def test_a_hook_that_was_not_loaded() -> None:
    assert verdict(replace(truth(), hook_loaded=False), "Python hook").state == "wrong"


class _Mark:
    def __init__(self, t: int, name: str, value: MarkValue = None, edge: str | None = None) -> None:
        self.t, self.name, self.value, self.edge = t, name, value, edge


def test_tasks_are_read_from_marks() -> None:
    found = tasks_of(
        [
            _Mark(1, "burn", edge="begin"),
            _Mark(5, "burn", edge="end"),
            _Mark(6, "burn.amount", 1.5),
            _Mark(7, "read.skipped", "no disk"),
            _Mark(8, "write", edge="begin"),
            _Mark(9, "load.tasks", 3),
        ]
    )
    assert found["burn"] == Task("burn", 1, 5, 1.5)
    assert found["read"].skipped == "no disk"
    assert found["load"].tasks == 3
    assert "write" not in found, "it was never finished"
