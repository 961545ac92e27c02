"""`stepscope watch PID`, with real processes that stepscope did not start."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from conftest import STEPSCOPE
from stepscope.runs.reader import Run, latest_run, open_run

PythonFile = Callable[[str], str]

KERNEL = tuple(int(word) for word in platform.release().split("-")[0].split(".")[:2])

# Waits for a file to appear, and exits.
SCRIPT = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
{end}
"""
EXITS = {
    "exits 0": "sys.exit(0)",
    "exits 3": "sys.exit(3)",
    "is killed": "os.kill(os.getpid(), 9)",
    "is terminated": "os.kill(os.getpid(), 15)",
}
REAPING_PARENT = """
import subprocess, sys
process = subprocess.Popen(sys.argv[1:])
print(process.pid, flush=True)
process.wait()
"""
# As on a kernel without pidfd.
OLD_KERNEL = """
import errno, os
def absent(*_):
    raise OSError(errno.ENOSYS, "Function not implemented")
os.pidfd_open = absent
from stepscope.cli.app import main
main()
"""


@dataclass(frozen=True)
class Monitor:
    """A running `stepscope watch`."""

    process: subprocess.Popen[str]
    runs: Path

    def wait_until_sampling(self) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if any('"root"' in path.read_text() for path in self.runs.glob("*/run.json")):
                return
            time.sleep(0.02)
        raise AssertionError("no samples")

    def result(self) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        return dict(json.loads(out.splitlines()[-1]))

    @property
    def run(self) -> Run:
        return open_run(latest_run(self.runs))


def watch(pid: int, runs: Path, *options: str, program: list[str] | None = None) -> Monitor:
    command = [*(program or STEPSCOPE), "watch", str(pid), "--json", "--out", str(runs), *options]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    return Monitor(process, runs)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a process without stepscope."""
    started: list[subprocess.Popen[str]] = []

    def begin(*command: str, **more: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_exit_status(
    start: Callable[..., subprocess.Popen[str]], python_file: PythonFile, tmp_path: Path
) -> None:
    """These are not reaped: they stay zombies, and their status can be read."""
    go = tmp_path / "go"
    monitors = {}
    for number, (name, end) in enumerate(EXITS.items()):
        script = python_file(SCRIPT.format(end=end))
        process = start(sys.executable, script, str(go), "--api-key", "hunter2hunter2")
        monitors[name] = watch(process.pid, tmp_path / f"runs{number}")
    for monitor in monitors.values():
        monitor.wait_until_sampling()
    go.touch()
    results = {name: monitor.result() for name, monitor in monitors.items()}

    assert {name: result["outcome"] for name, result in results.items()} == {
        "exits 0": "ok",
        "exits 3": "crashed",
        "is killed": "crashed",
        "is terminated": "interrupted",
    }
    assert [result["exit_code"] for result in results.values()] == [0, 3, None, None]
    assert [result["signal"] for result in results.values()] == [None, None, "SIGKILL", "SIGTERM"]
    assert "another process probably sent the signal" in results["is killed"]["reason"]
    run = monitors["exits 0"].run
    assert run.command[0] == sys.executable
    assert "hunter2hunter2" not in run.paths.run_json.read_text()
    assert run.paths.report_html.exists()


def test_process_that_its_parent_reaps_at_once(
    start: Callable[..., subprocess.Popen[str]], python_file: PythonFile, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    script = python_file(SCRIPT.format(end="sys.exit(3)"))
    pids = []
    for _ in range(2):
        parent = start(sys.executable, "-c", REAPING_PARENT, sys.executable, script, str(go))
        assert parent.stdout is not None
        pids.append(int(parent.stdout.readline()))
    new = watch(pids[0], tmp_path / "new")
    old = watch(pids[1], tmp_path / "old", program=[sys.executable, "-c", OLD_KERNEL])
    for monitor in (new, old):
        monitor.wait_until_sampling()
    go.touch()

    on_new, on_old = new.result(), old.result()

    if KERNEL >= (6, 15):
        assert (on_new["outcome"], on_new["exit_code"]) == ("crashed", 3)
    else:
        assert on_new["outcome"] in ("crashed", "lost")
    assert on_old["outcome"] == "lost", "never `ok`"
    assert "unknown exit code" in on_old["reason"]


BURNING = """
import os, sys, time
def burn(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end: pass
burn(1.0)  # before monitoring starts
print("ready", flush=True)
if os.fork() == 0:
    burn(30)
    os._exit(0)
time.sleep(30)
"""


def test_ctrl_c_and_duration_end_only_the_monitoring(
    start: Callable[..., subprocess.Popen[str]], python_file: PythonFile, tmp_path: Path
) -> None:
    process = start(sys.executable, python_file(BURNING), start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    try:
        timed = watch(process.pid, tmp_path / "timed", "--duration", "1.5", "--name", "burns")
        stopped = watch(process.pid, tmp_path / "stopped")
        stopped.wait_until_sampling()
        result = timed.result()
        stopped.process.send_signal(signal.SIGINT)
        interrupted = stopped.result()
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)

    assert (result["name"], result["outcome"]) == ("burns", "interrupted")
    assert result["reason"] == "monitoring ended after 1.5 s; the process is still running"
    assert 1.4 < result["seconds"] < 5
    # The CPU time before monitoring is not counted; that of its child is.
    assert 0.1 < result["core_seconds"] < 1.1 * result["seconds"]
    statistics = {(s["metric"], s["entity"]): s for s in result["statistics"]}
    assert statistics["processes", "tree"]["max"] == 2
    assert statistics["cpu", "other"]["mean"] > 5 * statistics["cpu", "main"]["mean"]
    assert interrupted["reason"] == "monitoring was stopped; the process is still running"
    assert stopped.run.paths.report_html.exists()


def test_environment_is_that_of_the_process(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "7", "STEPSCOPE_EVENTS": "/runs/other/events"}
    process = start("sleep", "30", cwd=folder, env=environment)
    monitor = watch(process.pid, tmp_path / "runs", "--duration", "0.3")
    result = monitor.result()
    facts = monitor.run.json
    assert facts["cwd"] == str(folder)
    assert facts["root"]["pid"] == process.pid
    assert facts["environment"]["variables"]["OMP_NUM_THREADS"] == "7"
    assert any("They are recorded in /runs/other" in note for note in result["notes"])


def test_messages_and_survivors(
    start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start(
        "sh", "-c", "sleep 100 & read line", stdin=subprocess.PIPE, start_new_session=True
    )
    monitor = subprocess.Popen(
        [*STEPSCOPE, "watch", str(process.pid), "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert monitor.stderr is not None and process.stdin is not None
    first = monitor.stderr.readline().rstrip()
    while monitor.poll() is None and not (
        list(tmp_path.glob("*/run.json")) and open_run(tmp_path).samples().num_rows
    ):
        time.sleep(0.02)
    process.stdin.write("\n")
    process.stdin.flush()
    out, rest = monitor.communicate()
    os.killpg(process.pid, signal.SIGKILL)
    assert monitor.returncode == 0, rest
    assert out == ""
    last = rest.splitlines()[-1]
    assert first == (
        f"stepscope: monitoring sh (PID {process.pid}); Ctrl-C ends monitoring, not the process"
    )
    assert last.startswith("stepscope: still running: sleep (PID ")
    assert "sh  ok  exited normally" in rest
