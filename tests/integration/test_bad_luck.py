"""Problems around a run must not change how its command runs and exits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import STEPSCOPE, Finished
from stepscope.opened_run import open_run
from stepscope.runs.reader import latest_run

Watch = Callable[..., Finished]
PythonFile = Callable[[str], str]

EXITS_ON_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print("ready", flush=True)
time.sleep(20)
"""


def test_signal_at_any_time_reaches_the_command(python_file: PythonFile, tmp_path: Path) -> None:
    """Threads of libraries must not receive signals for the command."""
    script = python_file(EXITS_ON_SIGTERM)

    def terminate_one(number: int) -> int:
        process = subprocess.Popen(
            [
                *STEPSCOPE,
                "run",
                "-q",
                "--out",
                str(tmp_path / f"runs{number}"),
                "--",
                sys.executable,
                "-S",
                script,
            ],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(random.Random(number).uniform(0, 0.4))
        process.terminate()
        return process.wait(60)

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(terminate_one, range(12))) == {3}


def test_second_ctrl_c(python_file: PythonFile, tmp_path: Path) -> None:
    script = python_file(EXITS_ON_SIGTERM.replace("SIGTERM", "SIGINT"))
    for wait in (0.05, 0.15, 0.3):
        process = subprocess.Popen(
            [*STEPSCOPE, "run", "-q", "--out", str(tmp_path), "--", sys.executable, "-S", script],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        time.sleep(wait)
        process.send_signal(signal.SIGINT)
        code = process.wait(60)
        exit_status = open_run(latest_run(tmp_path)).exit_status
        # The second one may kill a command that is already exiting.
        assert (code, exit_status.exit_code, exit_status.signal) in (
            (3, 3, None),
            (-2, None, "SIGINT"),
        )


@pytest.mark.parametrize("redirect", ["2>&-", ">&- 2>&-", "<&-", "2>&1 | true", "2>/dev/full"])
def test_closed_output(tmp_path: Path, redirect: str) -> None:
    command = " ".join(
        [*STEPSCOPE, "run", "--out", str(tmp_path), "--", "sh -c 'exit 7'", redirect]
    )
    script = f"{command}; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", script], stderr=subprocess.DEVNULL).returncode == 7
    assert open_run(latest_run(tmp_path)).exit_status.exit_code == 7


def test_real_time_signal(watch: Watch) -> None:
    done = watch("sh", "-c", "kill -40 $$")
    assert done.code == -40
    assert done.run.exit_status.signal == "SIGRTMIN+6"


def test_empty_entries_of_pythonpath_mean_the_current_folder(watch: Watch, tmp_path: Path) -> None:
    (tmp_path / "mylib.py").write_text("x = 42")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text("import mylib; print(mylib.x)")
    path = os.pathsep + os.environ.get("PYTHONPATH", "/missing")
    done = watch(
        sys.executable, "sub/script.py", cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.out == "42\n", done.err


def test_process_whose_main_thread_has_exited(watch: Watch, tmp_path: Path) -> None:
    """It looks like a zombie but is not: waiting for it would block the monitor."""
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    source = tmp_path / "leader.c"
    source.write_text("""
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
void *work(void *_) { sleep(3); exit(5); }
int main(void) { pthread_t t; pthread_create(&t, 0, work, 0); pthread_exit(0); }
""")
    subprocess.run(["gcc", "-pthread", str(source), "-o", str(tmp_path / "leader")], check=True)
    done = watch(str(tmp_path / "leader"))
    assert done.code == 5
    assert done.run.summary().monitor["longest_gap_s"] < 2


def test_allowed_cpus_are_those_of_the_command(watch: Watch) -> None:
    if shutil.which("taskset") is None:
        pytest.skip("taskset is not available")
    done = watch("taskset", "-c", "0", "sleep", "1.2")
    assert done.run.summary().cpu_allowed == 1.0


def test_find_spec_does_not_attach_the_hook(watch: Watch) -> None:
    program = """
import importlib.util, pickle
spec = importlib.util.find_spec("keras"), importlib.util.find_spec("torch.optim")
import torch.optim
pickle.dumps(torch.optim.__spec__)
"""
    done = watch(sys.executable, "-c", program)
    assert done.code == 0, done.err
    assert "(PyTorch DataLoader and optimizer)" in done.err or "(PyTorch optimizer)" in done.err


def test_shared_terminal_that_is_non_blocking(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    process = subprocess.Popen(
        [
            *STEPSCOPE,
            "run",
            "-q",
            "--out",
            str(tmp_path),
            "--epoch-pattern",
            "x",
            "--",
            sys.executable,
            "-c",
            "print('y' * 300_000)",
        ],
        stdout=write,
    )
    os.close(write)
    time.sleep(1.5)
    with os.fdopen(read, "rb") as source:
        assert len(source.read()) == 300_001
    assert process.wait(60) == 0


def test_names_that_are_not_text(watch: Watch) -> None:
    done = watch(
        "sh", "-c", os.fsdecode(b"exit 7 # \xff"), options=["--name", "line\nbreak \U0001f600"]
    )
    assert done.code == 7
    assert "report could not be created" not in done.err
    assert (done.run.path / "derived" / "report.html").exists()


def test_current_folder_is_deleted(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"cd {gone} && rmdir {gone} && {' '.join(STEPSCOPE)} run --out {tmp_path} -- true"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 125
    assert "current folder no longer exists" in done.stderr and done.stderr.count("\n") == 1


def test_run_folder_is_deleted_during_the_run(watch: Watch, tmp_path: Path) -> None:
    done = watch("sh", "-c", f"sleep 0.5; rm -rf {tmp_path}/runs; sleep 1; exit 4")
    assert done.code == 4
    assert "Traceback" not in done.err


def test_unrelated_file_among_the_events(watch: Watch, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = watch(
        "sh", "-c", f"touch {runs}/*/events/13abc.bin {runs}/*/events/77.bin; sleep 1; exit 6"
    )
    assert done.code == 6
    assert "monitoring failed" not in done.err
