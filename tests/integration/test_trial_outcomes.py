"""How trials end, each way with real processes; after each of them the next starts clean."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import STEPSCOPE, Tried, trial_environment
from stepscope.runs.reader import open_run
from stepscope.sensors.cgroup import find_cgroup
from stepscope.trials.limits.cgroups import PREFIX, Refused, make_group
from stepscope.trials.processes import trial_processes

Trial = Callable[..., Tried]
Own = Callable[..., str]


@pytest.fixture(autouse=True)
def _nothing_is_left() -> object:
    """Other tests run trials at the same time: what is of those goes away, or its runner lives."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert _until(lambda: not trial_processes.strays(), 20), trial_processes.strays()
    new = set(os.listdir("/dev/shm")) - before
    assert _until(lambda: not new & set(os.listdir("/dev/shm")), 20), new
    assert _until(lambda: not _groups_of_dead_runners(), 20), _groups_of_dead_runners()


def _groups_of_dead_runners() -> list[Path]:
    return [
        group
        for own in set(find_cgroup(os.getpid()).paths.values())
        for group in Path(own).glob(f"{PREFIX}*")
        if trial_processes.runner_lives(group.name.removeprefix(PREFIX)) is False
    ]


def _can_limit() -> bool:
    group = make_group(f"stepscope-{trial_processes.new_token()}", 1 << 30, None)
    if isinstance(group, Refused):
        return False
    group.remove()
    return True


CAN_LIMIT = pytest.mark.skipif(not _can_limit(), reason="control groups cannot be made here")
CAN_HIDE = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="mounts cannot be hidden here",
)


@CAN_LIMIT
def test_host_oom(trial: Trial) -> None:
    done = trial("cnn", "--samples", "200000", "--steps", "8", "--memory", "1GiB")
    assert done.code == 11, done.err
    told = done.told
    assert told["outcome"] == "host_oom"
    limit = done.run.json["limits"]["memory"]
    assert limit["asked"] == 1 << 30 and limit["by"].startswith("cgroup")
    assert done.run.ending.evidence["counters"]
    assert "memory" in told["reason"]


@CAN_LIMIT
def test_host_oom_of_a_worker_alone(trial: Trial, own: Own) -> None:
    """The main process lives, and ends with an error that only tells of a worker."""
    greedy = own(item="self.kept = bytearray(1 << 31) if index else None")
    done = trial(greedy, "--workers", "1", "--steps", "8", "--memory", "1200MiB")
    assert done.code == 11, done.err
    ending = done.run.ending
    assert ending.outcome == "host_oom" and ending.evidence["oom_kills"] == 1
    assert ending.exit_code == 1


@pytest.mark.quiet  # it must be noticed before the machine is full
@CAN_HIDE
def test_host_oom_by_the_watchdog(trial: Trial, own: Own) -> None:
    """Where no control group can be made: here they are hidden, elsewhere they are not ours."""
    hidden = "mount -t tmpfs none /sys/fs/cgroup"
    greedy = own(step="globals().setdefault('kept', []).append(bytearray(b'x' * (1 << 25)))")
    done = trial(
        greedy,
        "--steps",
        "4000",
        "--memory",
        "700MiB",
        before=["unshare", "--mount", "sh", "-c", f'{hidden}; exec "$@"', "sh"],
    )
    assert done.code == 11, done.err
    limit = done.run.json["limits"]["memory"]
    assert limit["by"] == "soft" and "page cache" in limit["note"]
    assert "soft" in done.err


@CAN_HIDE
def test_shm_full(trial: Trial, own: Own) -> None:
    """Workers hand their batches over through /dev/shm, here one of 4 MiB."""
    wide = own(item="return torch.zeros(1 << 18), 0")
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4m none /dev/shm; exec "$@"']
    done = trial(
        wide, "--workers", "1", "--batch-size", "16", "--steps", "8", before=[*small, "sh"]
    )
    assert done.code == 12, done.err
    assert done.told["outcome"] == "shm_full"
    assert "--shm-size" in done.err


@CAN_HIDE
def test_full_disk(trial: Trial, own: Own, tmp_path: Path) -> None:
    """Nobody could write down what happened, and yet it is said."""
    (tmp_path / "runs").mkdir()
    small = f'mount -t tmpfs -o size=200k none {tmp_path / "runs"}; exec "$@"'
    chatty = own(step="print('x' * 5000, flush=True)")
    done = trial(chatty, "--steps", "400", before=["unshare", "--mount", "sh", "-c", small, "sh"])
    assert done.code == 14, done.err
    said = " ".join(done.err.split())
    assert "the disk of its run folder is full" in said and "--out DIR" in said
    assert "Traceback" not in done.err


@pytest.mark.quiet  # starting up must take less time than is a hang
def test_hang(trial: Trial, own: Own) -> None:
    sleepy = own(step="time.sleep(600) if batch[1].shape[0] else None")
    done = trial(sleepy, "--steps", "8", "--workers", "1", "--hang", "6")
    assert done.code == 13, done.err
    assert done.told["outcome"] == "timeout"
    stacks = (done.run.path / "trial" / "stacks.txt").read_text()
    assert "in step" in stacks and "own.py" in stacks
    assert "pt_data_worker" in stacks


@pytest.mark.long
def test_timeout(trial: Trial, own: Own) -> None:
    started = time.monotonic()
    done = trial(own(item="time.sleep(0.01)"), "--seconds", "600", "--timeout", "10")
    assert done.code == 13, done.err
    assert done.told["steps"] > 3, "what was measured until then is kept"
    assert time.monotonic() - started < 40


def test_crash(trial: Trial, own: Own) -> None:
    done = trial(own(step="os.abort()"), "--steps", "8")
    assert done.code == 14, done.err
    assert done.run.ending.signal == "SIGABRT"


def test_exception(trial: Trial, own: Own) -> None:
    done = trial(own(step="raise ValueError('no such luck')"), "--steps", "8")
    assert done.code == 14, done.err
    assert "ValueError: no such luck" in done.told["reason"]
    assert any("no such luck" in line for line in done.run.ending.evidence["stderr"])
    assert "Traceback" not in done.err


@pytest.mark.long
def test_leaving_early_is_no_success(trial: Trial, own: Own) -> None:
    done = trial(own(step="raise SystemExit(0)"), "--steps", "8")
    assert done.code == 14, done.err


def test_gpu_oom_is_told_by_the_allocator(trial: Trial, own: Own) -> None:
    """The message of a GPU's allocator, where there is no GPU; tests/gpu has the real thing."""
    message = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 15.00 GiB"
    done = trial(own(step=f"raise torch.OutOfMemoryError({message!r})"), "--steps", "8")
    assert done.code == 10, done.err
    assert done.told["reason"] == "CUDA out of memory"
    assert "Tried to allocate 20.00 MiB" in " ".join(done.err.split())


def test_children_that_go_their_own_way_are_ended(trial: Trial, own: Own, tmp_path: Path) -> None:
    begin = "import subprocess; subprocess.Popen(['sleep', '987'], start_new_session=True)"
    done = trial(own(begin=begin), "--steps", "8")
    assert done.code == 0, done.err
    assert subprocess.run(["pgrep", "-f", "sleep 987"]).returncode == 1


def test_killed_runner(trial: Trial, own: Own, tmp_path: Path) -> None:
    """The run is `lost`, its processes and groups are gone, and the next trial runs."""
    runs = tmp_path / "runs"
    runner = subprocess.Popen(
        [
            *STEPSCOPE,
            "trial",
            own(item="time.sleep(0.001)"),
            "--workers",
            "2",
            "--seconds",
            "600",
            "--memory",
            "2GiB",
            "--out",
            str(runs),
        ],
        env=trial_environment(tmp_path),
        stderr=subprocess.DEVNULL,
    )
    name = f"{runner.pid}."
    assert _until(lambda: list(runs.glob("*/trial/steps0.bin")), 60)
    assert _until(lambda: len(_marked(name)) >= 3, 60)
    runner.kill()
    runner.wait()
    assert _until(lambda: not _marked(name), 20), _marked(name)
    (folder,) = runs.iterdir()
    assert open_run(folder).ending.outcome == "lost"
    shutil.rmtree(runs)
    assert trial(own(), "--steps", "8").code == 0


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_interrupted(own: Own, tmp_path: Path, number: int) -> None:
    runs = tmp_path / "runs"
    runner = subprocess.Popen(
        [*STEPSCOPE, "trial", own(), "--seconds", "600", "--out", str(runs), "--repeat", "3"],
        env=trial_environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert _until(lambda: list(runs.glob("*/trial/steps0.bin")), 60)
    time.sleep(0.2)
    runner.send_signal(number)
    _, said = runner.communicate(timeout=60)
    assert runner.returncode == 130, said
    (folder,) = runs.iterdir()
    assert open_run(folder).ending.outcome == "interrupted"
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.long)]
)
def test_asked_twice(own: Own, tmp_path: Path, number: int) -> None:
    """Who is impatient, or closes the terminal, does not cut the clean-up short."""
    runs = tmp_path / "runs"
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    begin = f"import signal, multiprocessing; {deaf}; os.fork() or time.sleep(900)"
    runner = subprocess.Popen(
        [*STEPSCOPE, "trial", own(begin=begin), "--seconds", "600", "--out", str(runs)],
        env=trial_environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert _until(lambda: list(runs.glob("*/trial/steps0.bin")), 60)
    runner.send_signal(number)
    time.sleep(0.3)
    runner.send_signal(number)
    _, said = runner.communicate(timeout=60)
    assert runner.returncode == 130, said
    (folder,) = runs.iterdir()
    assert open_run(folder).ending.outcome == "interrupted"
    assert not _marked(f"{runner.pid}.")


def _marked(name: str) -> list[int]:
    """Processes whose token names a runner."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{trial_processes.VARIABLE}={name}".encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
        except OSError:
            continue
    return found


def _until(happens: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if happens():
            return True
        time.sleep(0.05)
    return False
