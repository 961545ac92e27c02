"""Measure the overhead of monitoring: CPU time per sample, CPU time of the monitor, slowdown, gaps.

    python benchmarks/monitor_cost.py [--quick]

Everything is compared in one run: psrecord and the process-tree sensor of stepscope follow the same
nine processes at the same time; the training loop runs with and without monitoring in alternating
blocks of one process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import results_file
from stepscope.opened_run import open_run
from stepscope.runs.reader import latest_run
from stepscope.sensors.process import UsageSensor
from stepscope.sensors.tree import ProcessTree

INTERVAL = 0.1
BLOCK = 2.0
"""Seconds. A monitor that was stopped catches up with its readings: short blocks overstate it."""
HERE = Path(__file__).parent
STEPSCOPE = [sys.executable, "-m", "stepscope", "run", "-q", "--no-hook"]

TREE = """
import multiprocessing as mp, sys, time
def child(seconds, busy):
    data = bytearray(30_000_000)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not busy: time.sleep(0.005)
if __name__ == "__main__":
    seconds, busy = float(sys.argv[1]), sys.argv[2] == "busy"
    children = [mp.Process(target=child, args=(seconds, busy)) for _ in range(8)]
    for each in children: each.start()
    for each in children: each.join()
"""


def cpu_of(pid: int) -> float:
    return time.clock_gettime(((~pid) << 3) | 2)


def start_tree(folder: Path, seconds: float, busy: bool = False) -> subprocess.Popen[bytes]:
    script = folder / "tree.py"
    script.write_text(TREE)
    kind = "busy" if busy else "idle"
    return subprocess.Popen([sys.executable, str(script), str(seconds), kind])


def sample_process_tree(pid: int, seconds: float) -> None:
    """Run only the process-tree sensor, as in the monitor; print its CPU seconds and samples."""
    tree = ProcessTree(pid)
    sensor = UsageSensor(tree, started_here=False)
    time.sleep(1.0)
    samples, started = 0, time.process_time()
    planned = time.monotonic()
    end = planned + seconds
    while planned < end:
        sensor.read()
        samples += 1
        planned += INTERVAL
        time.sleep(max(0.0, planned - time.monotonic()))
    print(json.dumps([time.process_time() - started, samples, len(tree.processes)]))


def tree_part(folder: Path, seconds: float) -> dict[str, Any]:
    """Compare psrecord --include-children with the sensor, on the same tree, at the same time."""
    tree = start_tree(folder, seconds + 6)
    time.sleep(1.5)
    log = folder / "psrecord.txt"
    psrecord = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from psrecord.main import main; main()",
            str(tree.pid),
            "--include-children",
            "--interval",
            str(INTERVAL),
            "--duration",
            str(seconds + 3),
            "--log",
            str(log),
        ],
        stdout=subprocess.DEVNULL,
    )
    sensor = subprocess.Popen(
        [sys.executable, __file__, "--sample", str(tree.pid), str(seconds)], stdout=subprocess.PIPE
    )
    time.sleep(2.0)
    lines, cpu = len(log.read_text().splitlines()), cpu_of(psrecord.pid)
    time.sleep(seconds - 1.5)
    lines = len(log.read_text().splitlines()) - lines
    cpu = cpu_of(psrecord.pid) - cpu
    sensor_cpu, samples, processes = json.loads(sensor.communicate()[0])
    psrecord.wait()
    tree.wait()
    psrecord_ms, sensor_ms = 1e3 * cpu / lines, 1e3 * sensor_cpu / samples
    return {
        "processes": processes,
        "psrecord_ms_per_sample": round(psrecord_ms, 3),
        "stepscope_ms_per_sample": round(sensor_ms, 3),
        "times_less": round(psrecord_ms / sensor_ms, 1),
    }


def monitor_tree(folder: Path, seconds: float, busy: bool, interval: float) -> dict[str, Any]:
    """Measure the monitor of nine processes: share of one core, and gaps between samples."""
    script = folder / "tree.py"
    script.write_text(TREE)
    runs = folder / f"runs{time.monotonic_ns()}"
    monitor = subprocess.Popen(
        [
            *STEPSCOPE,
            "--interval",
            str(interval),
            "--out",
            str(runs),
            "--",
            sys.executable,
            str(script),
            str(seconds + 2),
            "busy" if busy else "idle",
        ]
    )
    time.sleep(2.0)
    cpu, started = cpu_of(monitor.pid), time.monotonic()
    time.sleep(seconds - 1.5)
    cpu, seconds = cpu_of(monitor.pid) - cpu, time.monotonic() - started
    monitor.wait()
    run = open_run(latest_run(runs))
    times = run.data.of("rss").t
    gaps = [(b - a) / 1e9 for a, b in zip(times[:-1], times[1:], strict=True)]
    return {
        "interval_s": interval,
        "share_of_a_core": round(cpu / seconds, 5),
        "longest_gap_s": round(max(gaps), 4),
        "longest_gap_in_intervals": round(max(gaps) / interval, 2),
        "samples": len(times),
        "rss_mib": round(run.summary().monitor["rss_bytes"] / 2**20, 1),
    }


def train_in_blocks(seconds: float) -> None:
    """Run a training loop that stops and continues its monitor between blocks; print steps/s.

    The loop trains the small CNN of the paper with batch size 32 and PyTorch on all cores.
    """
    import torch
    from torch.utils.data import DataLoader

    sys.path.insert(0, str(HERE.parent / "examples" / "plain_loop"))
    from train import small_cnn, synthetic_images

    monitor, events = os.getppid(), os.environ["STEPSCOPE_EVENTS"]
    hook: Any = sys.modules["_stepscope_events"]
    loader = DataLoader(synthetic_images(6_000), 32, shuffle=True)
    model = small_cnn()
    optimizer = torch.optim.Adam(model.parameters())
    loss = torch.nn.CrossEntropyLoss()

    def batches() -> Any:
        while True:
            yield from loader

    source = batches()

    def block(length: float) -> float:
        steps, started = 0, time.perf_counter()
        while (spent := time.perf_counter() - started) < length:
            images, labels = next(source)
            optimizer.zero_grad()
            loss(model(images), labels).backward()
            optimizer.step()
            steps += 1
        return steps / spent

    block(3.0)
    rates: dict[bool, list[float]] = {True: [], False: []}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        # With monitoring first in one pair, without first in the next: drift cancels out.
        for monitored in (True, False) if len(rates[True]) % 2 else (False, True):
            hook.report_to(events if monitored else None)
            os.kill(monitor, signal.SIGCONT if monitored else signal.SIGSTOP)
            rates[monitored].append(block(BLOCK))
    os.kill(monitor, signal.SIGCONT)
    print("RATES " + json.dumps([rates[True], rates[False]]), flush=True)


def slowdown(folder: Path, seconds: float) -> dict[str, Any]:
    """Measure the slowdown of the loop by monitoring, from pairs of blocks in one process."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "stepscope",
            "run",
            "-q",
            "--out",
            str(folder / "train"),
            "--",
            sys.executable,
            __file__,
            "--train",
            str(seconds),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    match = re.search(r"RATES (.*)", done.stdout)
    assert match
    monitored, alone = json.loads(match[1])
    slower = sorted(100 * (1 - w / a) for w, a in zip(monitored, alone, strict=True))
    error = statistics.stdev(slower) / len(slower) ** 0.5
    cut = len(slower) // 10
    return {
        "pairs": len(slower),
        "steps_per_second_alone": round(statistics.mean(alone), 1),
        "slowdown_percent": round(statistics.mean(slower), 3),
        "standard_error_percent": round(error, 3),
        "median_percent": round(statistics.median(slower), 3),
        "trimmed_mean_percent": round(statistics.mean(slower[cut : len(slower) - cut]), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the time, for a quick check"
    )
    parser.add_argument("--sample", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--train", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.sample:
        return sample_process_tree(int(options.sample[0]), float(options.sample[1]))
    if options.train:
        return train_in_blocks(options.train)
    length = 0.1 if options.quick else 1.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = {
            "tree_part": tree_part(folder, max(6, 30 * length)),
            "monitor_10hz": monitor_tree(folder, max(6, 30 * length), False, 0.1),
            "both_cores_busy_10hz": monitor_tree(folder, max(6, 30 * length), True, 0.1),
            "monitor_50hz": monitor_tree(folder, max(6, 20 * length), False, 0.02),
            "training": slowdown(folder, max(20, 240 * length)),
        }
    print(json.dumps(figures, indent=1))
    if not options.quick:
        print(results_file.write("monitor_cost", figures))


if __name__ == "__main__":
    main()
