"""Checks of the self-test on synthetic runs, with correct and with wrong sensors."""

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
    """The tasks as the load reports them."""
    done_tasks = {
        name: Task(name, int(begin * 1e9), int(end * 1e9), AMOUNTS.get(name, 0))
        for name, (begin, end) in WHEN.items()
    }
    done_tasks[tasks.GPU_IDLE] = replace(done_tasks[tasks.GPU_IDLE], uuid=GPU)
    for name in (tasks.WRITE, tasks.READ):
        done_tasks[name] = replace(done_tasks[name], place="zfs")
    done_tasks[LOAD] = Task(LOAD, 30 * GB, 30 * GB, tasks=len(WHEN))
    return done_tasks


def counted(period: float, *amounts: tuple[str, float]) -> Series:
    """A counter as a sensor reads it: the amount in each window, as a rate."""
    t = np.arange(0.55, END, period)
    value = np.zeros(len(t))
    for task, amount in amounts:
        begin, end = WHEN[task]
        overlap = np.clip(np.minimum(t, end) - np.maximum(t - period, begin), 0, None)
        value += amount * overlap / (end - begin) / period
    return Series((t * 1e9).astype(np.int64), np.full(len(t), period), value)


def gauged(period: float, base: float, *levels: tuple[str, float]) -> Series:
    """A gauge with a base level and higher levels during some tasks."""
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


def correct() -> MeasuredLoad:
    """A run with correct sensors, including protocol overhead and other processes."""
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
        ("gpu_memory_run", GPU): gauged(1.0, 500e6, of_task(tasks.GPU_MEMORY)),
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


def with_series(observed: MeasuredLoad, **replaced: Series) -> MeasuredLoad:
    """The same run with the series of some metrics replaced."""
    keys = {
        metric: key for key in observed.series for metric in [key[0]] if key[1] != "GPU-another"
    }
    series = {**observed.series, **{keys[m]: s for m, s in replaced.items()}}
    return replace(observed, series=series)


def result(observed: MeasuredLoad, name: str) -> CheckResult:
    return next(each for each in judge(observed) if each.name == name)


def scaled(series: Series, factor: float) -> Series:
    return replace(series, value=series.value * factor)


def test_correct_sensors_pass() -> None:
    self_test = judge(correct())
    assert {each.name: each.state for each in self_test if each.state != "ok"} == {}
    assert result(correct(), "PCIe to GPU").measured == "107 GiB, 5.12 GiB in the other direction"


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("host_cpu", "Host CPU"),
        ("cgroup_cpu", "Cgroup CPU"),
        ("write", "Disk write"),
        ("read", "Disk read"),
        ("loopback", "Loopback"),
        ("gpu_pcie_received", "PCIe to GPU"),
        ("gpu_pcie_sent", "PCIe from GPU"),
    ],
)
def test_half_of_the_amount_is_wrong(metric: str, name: str) -> None:
    observed = correct()
    ((_, series),) = [(k, s) for k, s in observed.series.items() if k[0] == metric]
    found = result(with_series(observed, **{metric: scaled(series, 0.5)}), name)
    assert found.state == "wrong"
    assert "of expected" in found.detail


def test_twice_the_amount_is_wrong_unless_other_processes_count() -> None:
    observed = correct()
    doubled = {
        key: scaled(series, 2) if key[0] in ("write", "host_cpu") else series
        for key, series in observed.series.items()
    }
    wrong = replace(observed, series=doubled)
    assert result(wrong, "Disk write").detail == "200% of expected (on zfs)"
    assert result(wrong, "Host CPU").state == "ok"


def test_swapped_directions_are_wrong() -> None:
    observed = correct()
    received, sent = (observed.series[f"gpu_pcie_{way}", GPU] for way in ("received", "sent"))
    swapped = with_series(observed, gpu_pcie_received=sent, gpu_pcie_sent=received)
    for name in ("PCIe to GPU", "PCIe from GPU"):
        found = result(swapped, name)
        assert (found.state, found.detail) == ("wrong", "was counted in the other direction")


def test_worker_cpu_in_main_is_wrong() -> None:
    observed = correct()
    both = counted(0.1, of_task(tasks.BURN), of_task(tasks.WORKER))
    nowhere = scaled(observed.series["cpu", "worker"], 0)
    wrong = replace(
        observed, series={**observed.series, ("cpu", "main"): both, ("cpu", "worker"): nowhere}
    )
    found = result(wrong, "Worker CPU")
    assert (found.state, found.detail) == ("wrong", "was counted in main")
    assert result(wrong, "CPU").state == "ok"


def test_cpu_counted_twice_is_wrong() -> None:
    observed = correct()
    both = counted(0.1, of_task(tasks.BURN), (tasks.WORKER, 0.7))
    wrong = replace(observed, series={**observed.series, ("cpu", "main"): both})
    assert result(wrong, "Worker CPU").detail == "too much was counted in main"


def test_delayed_counter_is_correct() -> None:
    observed = correct()
    late = observed.series["gpu_pcie_received", GPU]
    late = replace(late, t=late.t + int(0.25e9))
    assert result(with_series(observed, gpu_pcie_received=late), "PCIe to GPU").state == "ok"


@pytest.mark.parametrize(
    ("size", "state", "detail"),
    [
        (256 * MIB, "ok", ""),
        (128 * MIB, "wrong", "50% of expected"),
        (0, "wrong", "0%"),
    ],
)
def test_memory_must_rise_by_the_allocated_amount(size: float, state: str, detail: str) -> None:
    observed = with_series(correct(), memory=gauged(0.1, 20e6, (tasks.MEMORY, size)))
    found = result(observed, "Memory")
    assert found.state == state
    assert detail in found.detail


def test_memory_must_be_released() -> None:
    series = gauged(0.1, 20e6, of_task(tasks.MEMORY))
    begin = int(WHEN[tasks.MEMORY][0] * 1e9)
    stays = replace(series, value=np.where(series.t > begin, 20e6 + 256 * MIB, 20e6))
    found = result(with_series(correct(), memory=stays), "Memory")
    assert (found.state, found.detail) == ("wrong", "256 MiB remains after the release")


@pytest.mark.parametrize(
    ("metric", "task", "mean", "name"),
    [
        ("gpu_tensor", tasks.GPU_MATRIX, 0.0, "Tensor cores"),
        ("gpu_dram", tasks.GPU_COPY_INSIDE, 0.1, "Memory bandwidth"),
        ("gpu_sm", tasks.GPU_COPY_IN, 0.9, "Copies without compute"),
        ("gpu_sm", tasks.GPU_TINY, 0.9, "Tiny kernels"),
    ],
)
def test_gpu_unit_activity_out_of_range_is_wrong(
    metric: str, task: str, mean: float, name: str
) -> None:
    found = result(with_series(correct(), **{metric: counted(0.2, share(task, mean))}), name)
    assert found.state == "wrong"
    assert "out of range" in found.detail


def test_missing_metric_with_a_reason_is_not_tested() -> None:
    observed = correct()
    kept = {key: series for key, series in observed.series.items() if key[0] != "gpu_sm"}
    without = replace(observed, series=kept, missing={"gpu_sm": "needs a Hopper GPU"})
    found = result(without, "Tiny kernels")
    assert (found.state, found.detail) == ("not tested", "needs a Hopper GPU")


def test_missing_metric_without_a_reason_is_wrong() -> None:
    observed = correct()
    kept = {key: s for key, s in observed.series.items() if key[0] not in ("write", "shm_used")}
    without = replace(observed, series=kept)
    assert result(without, "Disk write").detail.startswith(
        "no values were recorded, for an unknown reason"
    )
    assert result(without, "/dev/shm").state == "wrong"


def test_skipped_task_is_not_tested() -> None:
    observed = correct()
    skipped = Task(tasks.READ, 1, 1, skipped="the file stays in the page cache")
    without = replace(observed, tasks={**observed.tasks, tasks.READ: skipped})
    found = result(without, "Disk read")
    assert (found.state, found.detail) == ("not tested", "the file stays in the page cache")


def test_sensor_with_a_long_period_is_not_tested() -> None:
    to_gpu = (tasks.GPU_COPY_IN, 1.04 * AMOUNTS[tasks.GPU_COPY_IN])
    rarely = with_series(correct(), gpu_pcie_received=counted(8.0, to_gpu, (tasks.GPU_IDLE, 9e11)))
    found = result(rarely, "PCIe to GPU")
    assert found.state == "not tested" and "gaps of up to 8 s" in found.detail


def test_missing_gpu_is_not_an_error() -> None:
    observed = correct()
    reason = "no NVIDIA driver"
    host = {key: series for key, series in observed.series.items() if not key[0].startswith("gpu")}
    no_gpu = {name: Task(name, 1, 1, skipped=reason) for name in tasks.GPU_TASKS}
    count = len(WHEN) - len(no_gpu)
    load = {LOAD: Task(LOAD, 1, 1, tasks=count)}
    without = MeasuredLoad({**observed.tasks, **no_gpu, **load}, host)
    states = {each.name: each.state for each in judge(without)}
    assert [name for name, state in states.items() if state == "not tested"] == [
        "GPU memory",
        "GPU memory of the run",
        "PCIe to GPU",
        "PCIe from GPU",
        "Copies without compute",
        "Memory bandwidth",
        "Tensor cores",
        "Tiny kernels",
    ]
    assert "wrong" not in states.values()


def test_gpu_in_use_by_other_processes_is_not_tested() -> None:
    observed = correct()
    busy = gauged(0.5, 0.4, (tasks.GPU_COPY_IN, 0.5))
    traffic = scaled(observed.series["gpu_pcie_received", GPU], 3)
    found = result(
        with_series(observed, gpu_utilization=busy, gpu_pcie_received=traffic), "PCIe to GPU"
    )
    assert found.state == "not tested"
    assert "other processes use this GPU (40% utilization" in found.detail


def test_estimate_is_checked_by_direction_only() -> None:
    observed = correct()
    half = scaled(observed.series["gpu_pcie_received", GPU], 0.5)
    rough = replace(
        with_series(observed, gpu_pcie_received=half), estimated={"gpu_pcie_received": "sampled"}
    )
    assert result(rough, "PCIe to GPU").state == "ok"
    nothing = with_series(rough, gpu_pcie_received=scaled(half, 0))
    assert result(nothing, "PCIe to GPU").state == "wrong"


def test_lost_phase_and_lost_final_mark_are_wrong() -> None:
    observed = correct()
    fewer = {name: task for name, task in observed.tasks.items() if name != tasks.IDLE}
    found = result(replace(observed, tasks=fewer), "Phases and marks")
    assert (found.state, found.expected, found.measured) == ("wrong", "15 phases", "14 phases")
    silent = {name: task for name, task in observed.tasks.items() if name != LOAD}
    assert result(replace(observed, tasks=silent), "Phases and marks").state == "wrong"


def test_unloaded_hook_is_wrong() -> None:
    assert result(replace(correct(), hook_loaded=False), "Python hook").state == "wrong"


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
    assert "write" not in found, "unfinished"
