"""What goes wrong around a run must not change how its command runs and ends."""

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

ENDS_WHEN_ASKED = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print("ready", flush=True)
time.sleep(20)
"""


def test_a_signal_at_any_time_reaches_the_command(python_file: PythonFile, tmp_path: Path) -> None:
    """Threads of libraries must not receive, and die of, what is meant for the command."""
    script = python_file(ENDS_WHEN_ASKED)

    def ask_one_to_end(number: int) -> int:
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
        assert set(pool.map(ask_one_to_end, range(12))) == {3}


def test_an_impatient_second_ctrl_c(python_file: PythonFile, tmp_path: Path) -> None:
    script = python_file(ENDS_WHEN_ASKED.replace("SIGTERM", "SIGINT"))
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
        ending = open_run(latest_run(tmp_path)).ending
        # The second one may reach a command that is leaving already, and then it dies of it.
        assert (code, ending.exit_code, ending.signal) in ((3, 3, None), (-2, None, "SIGINT"))


@pytest.mark.parametrize("redirect", ["2>&-", ">&- 2>&-", "<&-", "2>&1 | true", "2>/dev/full"])
def test_nobody_reads_what_we_say(tmp_path: Path, redirect: str) -> None:
    command = " ".join(
        [*STEPSCOPE, "run", "--out", str(tmp_path), "--", "sh -c 'exit 7'", redirect]
    )
    script = f"{command}; exit ${{PIPESTATUS[0]}}"
    assert subprocess.run(["bash", "-c", script], stderr=subprocess.DEVNULL).returncode == 7
    assert open_run(latest_run(tmp_path)).ending.exit_code == 7


def test_a_real_time_signal(watch: Watch) -> None:
    done = watch("sh", "-c", "kill -40 $$")
    assert done.code == -40
    assert done.run.ending.signal == "SIGRTMIN+6"


def test_empty_entries_of_pythonpath_still_mean_the_current_folder(
    watch: Watch, tmp_path: Path
) -> None:
    (tmp_path / "mylib.py").write_text("x = 42")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "script.py").write_text("import mylib; print(mylib.x)")
    path = os.pathsep + os.environ.get("PYTHONPATH", "/nowhere")
    done = watch(
        sys.executable, "sub/script.py", cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.out == "42\n", done.err


def test_a_process_whose_first_thread_has_ended(watch: Watch, tmp_path: Path) -> None:
    """It looks like a zombie and is none: waiting for it would stop the watcher."""
    if shutil.which("gcc") is None:
        pytest.skip("there is no C compiler")
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
    assert done.run.summary().watcher["longest_gap_s"] < 2


def test_the_allowance_is_that_of_the_command(watch: Watch) -> None:
    if shutil.which("taskset") is None:
        pytest.skip("there is no taskset")
    done = watch("taskset", "-c", "0", "sleep", "1.2")
    assert done.run.summary().cpu_allowed == 1.0


def test_looking_for_a_framework_is_not_importing_it(watch: Watch) -> None:
    program = """
import importlib.util, pickle
spec = importlib.util.find_spec("keras"), importlib.util.find_spec("torch.optim")
import torch.optim
pickle.dumps(torch.optim.__spec__)
"""
    done = watch(sys.executable, "-c", program)
    assert done.code == 0, done.err
    assert "hook: DataLoader, optimizer" in done.err or "hook: optimizer" in done.err


def test_a_terminal_shared_with_somebody_who_made_it_non_blocking(tmp_path: Path) -> None:
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


def test_names_that_are_no_text(watch: Watch) -> None:
    done = watch(
        "sh", "-c", os.fsdecode(b"exit 7 # \xff"), options=["--name", "line\nbreak \U0001f600"]
    )
    assert done.code == 7
    assert "report could not be made" not in done.err
    assert (done.run.path / "derived" / "report.html").exists()


def test_the_current_folder_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"cd {gone} && rmdir {gone} && {' '.join(STEPSCOPE)} run --out {tmp_path} -- true"
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 125
    assert "current folder does not exist" in done.stderr and done.stderr.count("\n") == 1


def test_the_run_folder_is_deleted_meanwhile(watch: Watch, tmp_path: Path) -> None:
    done = watch("sh", "-c", f"sleep 0.5; rm -rf {tmp_path}/runs; sleep 1; exit 4")
    assert done.code == 4
    assert "Traceback" not in done.err


def test_a_stray_file_among_the_events(watch: Watch, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    done = watch(
        "sh", "-c", f"touch {runs}/*/events/13abc.bin {runs}/*/events/77.bin; sleep 1; exit 6"
    )
    assert done.code == 6
    assert "watching failed" not in done.err
