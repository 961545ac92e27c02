"""Accuracy and cost of the GPU sensors, and slowdown of a monitored training.

    python benchmarks/gpu_sensors.py [--quick] [--out DIR]        requires an NVIDIA GPU and PyTorch

Known loads run under `stepscope run`, and its samples are compared with the work: bytes copied in
each direction, memory allocated, joules. The slowdown is measured with a ResNet50 training that
stops and continues its own monitor from block to block, so that both are measured in one process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import results_file
import stepscope
from stepscope.analysis.run.epochs import phase_spans
from stepscope.analysis.run.series import Series, integrate
from stepscope.opened_run import open_run
from stepscope.runs.reader import latest_run
from stepscope.sensors.gpu.nvml import open_nvml
from stepscope.sensors.gpu.pcie import PcieSensor
from stepscope.sensors.gpu.registry import gpu_sensors
from stepscope.sensors.gpu.sensors import GpuSensor, MonitoredGpu

GIB = 1 << 30
BLOCK_S = 3.0
COLUMNS = {
    "utilization": "gpu_utilization",
    "sm": "gpu_sm",
    "occupancy": "gpu_occupancy",
    "tensor": "gpu_tensor",
    "dram": "gpu_dram",
    "to_gpu_gb_per_s": "gpu_pcie_received",
    "from_gpu_gb_per_s": "gpu_pcie_sent",
    "watts": "gpu_power",
}


# --- the loads, in the monitored process --------------------------------------------------------


def do_loads(seconds: float) -> None:
    """Run each load for some seconds as a phase, and print its amount of work."""
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    loads: dict[str, Callable[[float], int]] = {
        "idle": _idle,
        "matrix": _matrix,
        "copy_inside": _copy_inside,
        "copy_in": _copy_in,
        "copy_out": _copy_out,
        "tiny_kernels": _tiny_kernels,
        "bursts_in": _bursts_in,
        "allocation": _allocation,
        "mixed": lambda s: _mixed(max(20.0, s)),
    }
    for name, load in loads.items():
        time.sleep(2.0)  # until the memory of the previous load is released and sampled
        with stepscope.phase(name):
            done = load(seconds)
        print(f"DONE {name} {done}", flush=True)
        torch.cuda.empty_cache()


def _until(seconds: float) -> Iterator[None]:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield


def _idle(seconds: float) -> int:
    time.sleep(seconds)
    return 0


def _matrix(seconds: float) -> int:
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in _until(seconds):
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()
    return 0


def _copy_inside(seconds: float) -> int:
    import torch

    a = torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    for _ in _until(seconds):
        for _ in range(5):
            b.copy_(a)
        torch.cuda.synchronize()
    return 0


def _host_and_device() -> tuple[Any, Any]:
    import torch

    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    return host, torch.empty(GIB, dtype=torch.uint8, device="cuda")


def _copy_in(seconds: float) -> int:
    host, device = _host_and_device()
    return sum(_copied(device, host) for _ in _until(seconds))


def _copy_out(seconds: float) -> int:
    host, device = _host_and_device()
    return sum(_copied(host, device) for _ in _until(seconds))


def _copied(target: Any, source: Any) -> int:
    import torch

    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return int(source.numel())


def _tiny_kernels(seconds: float) -> int:
    import torch

    a = torch.zeros(16, device="cuda")
    for _ in _until(seconds):
        for _ in range(100):
            a.add_(1)
    torch.cuda.synchronize()
    return 0


def _bursts_in(seconds: float) -> int:
    """Copy 1 GiB (about 20 ms) at intervals that are not aligned with the samples."""
    host, device = _host_and_device()
    done = 0
    for _ in _until(max(seconds, 6.0)):
        done += _copied(device, host)
        time.sleep(0.37)
    return done


def _allocation(seconds: float) -> int:
    import torch

    held = torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
    time.sleep(max(2.0, seconds))
    return int(held.numel())


def _mixed(seconds: float) -> int:
    """Alternate between heavy and light load, so that the power varies."""
    for _ in _until(seconds):
        _matrix(0.7)
        _copy_inside(0.5)
        time.sleep(0.6)
    return 0


# --- comparison with the samples -----------------------------------------------------------------


def measure_loads(folder: Path, seconds: float) -> dict[str, Any]:
    """Run and monitor the loads; return a table and the comparisons."""
    done = _monitored(folder, "--loads", str(seconds))
    amounts = {name: int(count) for name, count in re.findall(r"DONE (\w+) (\d+)", done)}
    data = open_run(latest_run(folder)).data
    (gpu,) = {entity for metric, entity in data.series if metric == "gpu_memory"}
    spans = {
        span.name: (span.begin_ns, span.end_ns)
        for timeline in data.timelines
        for span in phase_spans(timeline, data.end_ns)
    }
    series = {metric: found for (metric, entity), found in data.series.items() if entity == gpu}
    table = {
        name: {column: _level(series[key], spans[name]) for column, key in COLUMNS.items()}
        for name in amounts
    }
    for row in table.values():
        for column in ("to_gpu_gb_per_s", "from_gpu_gb_per_s"):
            row[column] = round(row[column] / 1e9, 2)
    received, sent = series["gpu_pcie_received"], series["gpu_pcie_sent"]
    return {
        "table": table,
        "copies": {
            name: {
                "done_gb": round(amounts[name] / 1e9, 2),
                "measured_to_gpu": _part(received, spans[name], amounts[name]),
                "measured_from_gpu": _part(sent, spans[name], amounts[name]),
            }
            for name in ("copy_in", "copy_out", "bursts_in")
        },
        "allocation": _allocation_measured(series, spans, amounts["allocation"]),
        "energy": _energy(series),
    }


def _level(series: Series, span: tuple[int, int]) -> float:
    """Return the mean inside a phase, without its start: NVML averages over up to a second."""
    inside = series.between(span[0] + int(1.2e9), span[1])
    return round(float(inside.value.mean()), 4) if len(inside) else float("nan")


def _part(rate: Series, span: tuple[int, int], amount: int) -> float:
    measured = integrate(rate, span[0] - int(0.2e9), span[1] + int(0.2e9)) or 0.0
    return round(measured / amount, 4)


def _allocation_measured(
    series: dict[str, Series], spans: dict[str, tuple[int, int]], amount: int
) -> dict[str, Any]:
    begin, end = spans["allocation"]
    rise = {}
    for key in ("gpu_memory", "gpu_memory_run"):
        before = series[key].between(spans["bursts_in"][1], begin)
        during = series[key].between(begin, end)
        if len(before) and len(during):
            rise[key] = round(float(during.value[-1] - before.value[-1]) / amount, 4)
    return {"done_gb": round(amount / 1e9, 3), "rise": rise}


def _energy(series: dict[str, Series]) -> dict[str, Any]:
    """Compare the energy counter with the integrated power, over the windows of the counter."""
    counter, power = series["gpu_energy"], series["gpu_power"]
    by_counter = by_power = seconds = 0.0
    for t, window, watts in zip(counter.t, counter.window, counter.value, strict=True):
        begin = t - int(window * 1e9)
        if window < 1.0:
            continue
        inside = power.between(begin, t)
        if len(inside) < 3:
            continue
        by_counter += watts * window
        mean = np.trapezoid(inside.value, inside.t) / (inside.t[-1] - inside.t[0])
        by_power += float(mean) * window
        seconds += window
    return {
        "seconds": round(seconds, 1),
        "joules_by_counter": round(by_counter, 1),
        "joules_by_power": round(by_power, 1),
        "power_over_counter": round(by_power / by_counter, 4),
    }


def _monitored(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "stepscope",
            "run",
            "-q",
            "--out",
            str(folder),
            "--",
            sys.executable,
            __file__,
            *arguments,
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout


# --- cost of a reading ---------------------------------------------------------------------------


def measure_costs(repeats: int) -> dict[str, Any]:
    """Measure CPU and wall time per reading of each sensor, at the pace of the monitor, on an idle
    and on a busy GPU.

    Includes PCIe counters and the blocking PCIe sample, which this GPU does not need.
    """
    nvml = open_nvml()
    gpu = nvml.gpus[0]
    sensors: dict[str, Callable[[], Any]] = {
        sensor.name: sensor.read for sensor in gpu_sensors([gpu])
    }
    sensors["(PCIe byte counters)"] = gpu.pcie_count
    sensors["(PCIe sample, blocking)"] = gpu.pcie_sample
    with _busy():
        busy = {name: _paced(read, repeats) for name, read in sensors.items()}
    idle = {name: _paced(read, repeats) for name, read in sensors.items()}
    nvml.close()
    return {
        name: {
            **idle[name],
            "busy_cpu_ms": busy[name]["cpu_ms"],
            "busy_max_cpu_ms": busy[name]["max_cpu_ms"],
            **_share(name, idle[name]),
        }
        for name in sensors
    }


def _share(name: str, cost: dict[str, float]) -> dict[str, float]:
    periods = {each.name: each.period for each in _all_sensors()}
    if name not in periods:
        return {}
    return {
        "period_s": periods[name],
        "percent_of_a_core": round(cost["cpu_ms"] / periods[name] / 10, 4),
    }


def _all_sensors() -> list[type[GpuSensor]]:
    return GpuSensor.__subclasses__()


def _paced(read: Callable[[], Any], repeats: int) -> dict[str, float]:
    cpu, wall = [], []
    for _ in range(repeats):
        time.sleep(0.25)  # performance counters are not read more often
        a, b = time.thread_time(), time.perf_counter()
        read()
        cpu.append(time.thread_time() - a)
        wall.append(time.perf_counter() - b)
    return {
        "cpu_ms": round(1e3 * statistics.mean(cpu), 3),
        "max_cpu_ms": round(1e3 * max(cpu), 3),
        "wall_ms": round(1e3 * statistics.median(wall), 3),
        "max_wall_ms": round(1e3 * max(wall), 3),
    }


@contextlib.contextmanager
def _busy() -> Iterator[None]:
    """Keep the GPU busy with another process."""
    load = subprocess.Popen([sys.executable, __file__, "--matrix"], stdout=subprocess.PIPE)
    assert load.stdout is not None
    load.stdout.readline()
    try:
        yield
    finally:
        load.kill()
        load.wait()


def measure_pcie_methods(seconds: float) -> dict[str, Any]:
    """Measure a steady copy with the PCIe method for GPUs without GPM."""
    nvml = open_nvml()
    monitored = MonitoredGpu(nvml.gpus[0])
    sampled = PcieSensor([monitored], sample_only=True)
    stop, done = threading.Event(), [0]

    def copy() -> None:
        host, device = _host_and_device()
        while not stop.is_set():
            done[0] += _copied(device, host)

    thread = threading.Thread(target=copy)
    thread.start()
    while not done[0]:
        time.sleep(0.1)
    time.sleep(2.5)
    first, at = sampled.read()[0].values, done[0]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.2)
        last, now = sampled.read()[0].values, done[0]
    stop.set()
    thread.join()
    sampled.close()
    nvml.close()
    measured = {key: (last[key] or 0.0) - (first[key] or 0.0) for key in last}
    return {
        "done_gb": round((now - at) / 1e9, 2),
        "sampled_to_gpu": round(measured["gpu_pcie_received"] / (now - at), 4),
        "sampled_from_gpu": round(measured["gpu_pcie_sent"] / (now - at), 4),
    }


# --- slowdown of a monitored training ------------------------------------------------------------


def train_in_blocks(seconds: float) -> None:
    """Train ResNet50 in bf16 with batch 256 and 8 workers, with and without the monitor in turn."""
    import torch
    from torchvision.models import resnet50

    monitor, events = os.getppid(), os.environ["STEPSCOPE_EVENTS"]
    hook: Any = sys.modules["_stepscope_events"]
    model = resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loss = torch.nn.CrossEntropyLoss()
    labels = torch.randint(0, 1000, (256,), device="cuda")
    dataset: Any = _Images()
    loader: Any = torch.utils.data.DataLoader(
        dataset, 256, num_workers=8, pin_memory=True, persistent_workers=True
    )

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    source = batches()

    def block(length: float) -> float:
        steps, started = 0, time.perf_counter()
        while time.perf_counter() - started < length:
            images = next(source).cuda(non_blocking=True).to(memory_format=torch.channels_last)
            with torch.autocast("cuda", torch.bfloat16):
                batch_loss = loss(model(images.float() / 255), labels)
            optimizer.zero_grad(set_to_none=True)
            batch_loss.backward()
            optimizer.step()
            steps += 1
            if steps % 8 == 0:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        return steps / (time.perf_counter() - started)

    block(12.0)
    rates: dict[bool, list[float]] = {True: [], False: []}
    cpu = {True: 0.0, False: 0.0}
    started = time.monotonic()
    while time.monotonic() < started + seconds:
        for monitored in (True, False) if len(rates[True]) % 2 else (False, True):
            hook.report_to(events if monitored else None)
            os.kill(monitor, signal.SIGCONT if monitored else signal.SIGSTOP)
            before = _cpu_of(monitor)
            rates[monitored].append(block(BLOCK_S))
            cpu[monitored] += _cpu_of(monitor) - before
    os.kill(monitor, signal.SIGCONT)
    hook.report_to(events)
    before, at = _cpu_of(monitor), time.monotonic()
    block(20.0)  # without stopping the monitor: its CPU usage
    share = (_cpu_of(monitor) - before) / (time.monotonic() - at)
    print("RATES " + json.dumps([rates[True], rates[False], share]), flush=True)


class _Images:
    """Images of 3 × 224 × 224 bytes that cost a worker little: always the same one."""

    def __init__(self) -> None:
        import torch

        self._image = torch.randint(0, 256, (3, 224, 224), dtype=torch.uint8)

    def __len__(self) -> int:
        return 256 * 400

    def __getitem__(self, index: int) -> Any:
        return self._image


def _cpu_of(pid: int) -> float:
    return time.clock_gettime(((~pid) << 3) | 2)


def measure_slowdown(folder: Path, seconds: float) -> dict[str, Any]:
    done = _monitored(folder, "--train", str(seconds))
    match = re.search(r"RATES (.*)", done)
    assert match
    monitored, alone, share = json.loads(match[1])
    slower = [100 * (1 - m / a) for m, a in zip(monitored, alone, strict=True)]
    run = open_run(latest_run(folder))
    return {
        "pairs": len(slower),
        "block_s": BLOCK_S,
        "images_per_second_alone": round(256 * statistics.mean(alone), 1),
        "slowdown_percent": round(statistics.mean(slower), 3),
        "standard_error_percent": round(statistics.stdev(slower) / len(slower) ** 0.5, 3),
        "median_percent": round(statistics.median(slower), 3),
        "monitor_percent_of_a_core": round(100 * share, 3),
        "monitor_rss_mb": round(run.summary().monitor["rss_bytes"] / 1e6, 1),
        "sensor_costs": run.json["sensors"]["costs"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="run a third of the time and do not save"
    )
    parser.add_argument(
        "--out", type=Path, default=results_file.RESULTS, help="folder for the result"
    )
    parser.add_argument("--only", choices=("loads", "costs", "training", "pcie"))
    parser.add_argument("--loads", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--train", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--matrix", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.loads:
        return do_loads(options.loads)
    if options.train:
        return train_in_blocks(options.train)
    if options.matrix:
        print("ready", flush=True)
        _matrix(3600.0)
    length = 0.3 if options.quick else 1.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "loads": lambda: measure_loads(folder / "loads", 4.0),
            "costs": lambda: measure_costs(max(8, int(15 * length))),
            "pcie": lambda: measure_pcie_methods(5.0),
            "training": lambda: measure_slowdown(folder / "train", 60 * length),
        }
        chosen = [options.only] if options.only else list(parts)
        figures = {part: parts[part]() for part in chosen}
    print(json.dumps(figures, indent=1))
    if not options.quick:
        part = f"_{options.only}" if options.only else ""
        print(results_file.write(f"gpu_sensors{part}", figures, options.out))


if __name__ == "__main__":
    main()
