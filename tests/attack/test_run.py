"""Nothing but the command ends `stepscope run`, and its outcome is recorded in any case."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attack_runs import StartedRun, as_user, needs_root, start_run
from attack_trials import until
from conftest import STEPSCOPE
from stepscope.sensors import procfs
from studies import design, planted_environment

ENDS_WITH_7 = ("sh", "-c", "read line; exit 7")
"""Runs until its input is closed."""
WITHOUT_TABLES = "mount -t proc -o subset=pid proc /proc"
"""/proc contains only processes."""
UNSHARE = ("unshare", "--mount", "--pid", "--fork", "sh", "-c")


@pytest.fixture
def user(tmp_path: Path) -> int:
    """Return the owner of the folder: a user without processes, for a limit of processes."""
    number = 10**6 + secrets.randbelow(10**6)
    os.chown(tmp_path, number, number)
    return number


def check_7(started: StartedRun, code: int, err: str) -> None:
    """The command was not abandoned, and its outcome is recorded."""
    assert code == 7 and "Traceback" not in err, err
    exit_status = started.run.exit_status
    assert (exit_status.outcome, exit_status.exit_code) == ("crashed", 7)


@needs_root
def test_proc_without_tables(tmp_path: Path) -> None:
    if subprocess.run([*UNSHARE, WITHOUT_TABLES], capture_output=True).returncode:
        pytest.skip("/proc cannot be mounted with subset=pid")
    child = "import os, time\nif os.fork() == 0:\n while time.process_time() < 0.5: pass\nelse:"
    command = (sys.executable, "-S", "-c", f"{child} os.wait(); os._exit(7)")
    before = (*UNSHARE, f'{WITHOUT_TABLES}; exec "$@"', "sh")
    started = start_run(tmp_path / "runs", *command, before=before)
    code, _, err = started.finish()
    check_7(started, code, err)
    run = started.run
    assert not run.facts.problems
    counted = run.samples("process", ["processes"]).column("processes").to_pylist()
    assert max(filter(None, counted)) == 2 and run.summary().core_seconds >= 0.5
    missing = run.facts.sensors.missing
    assert missing["host_cpu"] == "/proc/stat: No such file or directory"
    assert missing["host_memory"] == "/proc/meminfo: No such file or directory"


@pytest.mark.parametrize("descriptors", [12, 16])
def test_too_few_descriptors(tmp_path: Path, descriptors: int) -> None:
    before = ("prlimit", f"--nofile={descriptors}")
    started = start_run(tmp_path / "runs", *ENDS_WITH_7, before=before)
    code, _, err = started.finish()
    if code == 125:  # the driver of a GPU needs more
        assert "was not started: Too many open files" in err and "Traceback" not in err
        return
    check_7(started, code, err)
    assert "(Too many open files). The command continues" in err
    assert "sensors not started: process" in err


@pytest.mark.parametrize("options", [(), ("--epoch-pattern", "x")], ids=["", "pattern"])
@pytest.mark.parametrize(
    ("kind", "value"),
    [(resource.RLIMIT_AS, None), (resource.RLIMIT_NOFILE, 12), (resource.RLIMIT_FSIZE, 0)],
    ids=["memory", "descriptors", "file size"],
)
def test_monitor_loses_a_resource(
    tmp_path: Path, kind: int, value: int | None, options: tuple[str, ...]
) -> None:
    started = start_run(tmp_path / "runs", *ENDS_WITH_7, options=options)
    started.wait_for_begin()
    if value is None:
        status = procfs.status(started.process.pid)
        value = (status and status.size("VmSize")) or 0
    resource.prlimit(started.process.pid, kind, (value, value))
    code, _, err = started.finish()
    assert code == 7 and "Traceback" not in err, err
    if kind != resource.RLIMIT_FSIZE:
        check_7(started, code, err)


CLOSED = (">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-")


@pytest.mark.parametrize("redirect", CLOSED)
def test_closed_streams_with_a_pattern(tmp_path: Path, redirect: str) -> None:
    """The command sees closed streams, too: it is not killed when it prints."""
    prints = "import os, sys; [print(i, file=f, flush=True) for i in range(9) for f in (sys.stdout,"
    prints += " sys.stderr) if f]; os._exit(7)"
    options = "--epoch-pattern", r"(\d+)"
    words = [
        *STEPSCOPE,
        "run",
        "--out",
        str(tmp_path),
        *options,
        "--",
        sys.executable,
        "-c",
        prints,
    ]
    done = subprocess.run(["bash", "-c", f'"$@" {redirect}', "bash", *words], capture_output=True)
    assert done.returncode == 7
    (folder,) = tmp_path.iterdir()
    assert (folder / "stdout.log").exists() == (" >&-" not in f" {redirect}")
    assert (folder / "stderr.log").exists() == ("2>&-" not in redirect)


@needs_root
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("run -- touch started", 125),
        ("run --epoch-pattern x -- touch started", 125),
        ("watch 1", 125),
        ("trial cnn --framework made_up.loop --data random", 5),
        ("study run planted.yaml", 5),
        ("fit cnn --memory 1GiB", 5),
    ],
)
def test_no_threads_before_the_start(tmp_path: Path, user: int, command: str, code: int) -> None:
    design(tmp_path, "factors: {batch_size: [1, 2]}")
    words = as_user(user, "prlimit", "--nproc=1", *STEPSCOPE, *command.split())
    environment = {**planted_environment(tmp_path), "HOME": str(tmp_path)}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("\n") == 1 and "Raise the process limit" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["planted.yaml"]


TAKES_ALL = """
import os, sys
while True:
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        os.closerange(1, 3)
        os.read(0, 1)
        os._exit(0)
print("ready", flush=True)
os.read(int(sys.argv[1]), 1)
os._exit(7)
"""


@needs_root
@pytest.mark.parametrize("options", [(), ("--epoch-pattern", "x")], ids=["", "pattern"])
def test_command_takes_all_processes(tmp_path: Path, user: int, options: tuple[str, ...]) -> None:
    """No thread can be started at the end, and no pump if one is killed."""
    source, end = os.pipe()
    started = start_run(
        tmp_path / "runs",
        *("env", sys.executable, "-S", "-c", TAKES_ALL, str(source)),
        options=options,
        before=tuple(as_user(user, "prlimit", "--nproc=30")),
        pass_fds=[source],
    )
    stdout = started.process.stdout
    assert stdout is not None and stdout.readline() == b"ready\n"
    for pump in started.pumps():
        os.kill(pump, signal.SIGKILL)
    os.close(source)
    os.close(end)
    code = started.process.wait(100)
    _, _, err = started.finish()
    check_7(started, code, err)
    assert "still running" in err


def test_outcome_is_recorded_before_the_output_is_drained(tmp_path: Path) -> None:
    """A survivor keeps the output open, so that the monitor waits for it when it is killed."""
    command = ("sh", "-c", "sleep 5 & read line; exit 7")
    started = start_run(tmp_path / "runs", *command, options=("--epoch-pattern", "x"))
    started.wait_for_begin()
    assert started.process.stdin is not None
    started.process.stdin.close()
    assert until(lambda: started.facts["exit_status"]["outcome"] != "running")
    started.process.kill()
    started.process.wait()
    assert (started.folder / "process.arrows").exists(), "the samples were not packed yet"
    assert started.run.exit_status.exit_code == 7


def test_outcome_is_recorded_if_packing_fails(tmp_path: Path) -> None:
    """As after an upgrade of pyarrow during the run: the error is not an OSError."""
    fails = (
        "import stepscope.capture.sampler as sampler, stepscope.cli.app as app\n"
        "def fail(closed): raise TypeError('upgraded')\n"
        "sampler.pack = fail\n"
        "app.main()"
    )
    started = start_run(tmp_path / "runs", *ENDS_WITH_7, program=(sys.executable, "-c", fails))
    code, _, err = started.finish()
    check_7(started, code, err)
    assert "some samples could not be written: TypeError: upgraded" in err
    assert started.run.samples("process").num_rows


def test_modules_for_the_end_are_loaded_at_the_start(tmp_path: Path) -> None:
    started = start_run(tmp_path / "runs", *ENDS_WITH_7)
    maps = Path(f"/proc/{started.process.pid}/maps")
    assert until(lambda: "/_parquet.cpython" in maps.read_text())
    assert started.finish()[0] == 7
