"""Every outcome of a trial with real processes, and the cleanup after it."""

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
def _no_leftovers() -> object:
    """Wait, because concurrent tests run trials whose leftovers disappear soon."""
    before = set(os.listdir("/dev/shm"))
    yield
    assert _until(lambda: not trial_processes.stale_processes(), 20), (
        trial_processes.stale_processes()
    )
    new = set(os.listdir("/dev/shm")) - before
    assert _until(lambda: not new & set(os.listdir("/dev/shm")), 20), new
    assert _until(lambda: not _groups_of_exited_runners(), 20), _groups_of_exited_runners()


def _groups_of_exited_runners() -> list[Path]:
    return [
        group
        for own in set(find_cgroup(os.getpid()).paths.values())
        for group in Path(own).glob(f"{PREFIX}*")
        if trial_processes.runner_is_running(group.name.removeprefix(PREFIX)) is False
    ]


def _can_limit() -> bool:
    group = make_group(f"stepscope-{trial_processes.new_token()}", 1 << 30, None)
    if isinstance(group, Refused):
        return False
    group.remove()
    return True


CAN_LIMIT = pytest.mark.skipif(not _can_limit(), reason="cannot create cgroups")
CAN_UNSHARE = pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="cannot create a mount namespace",
)


@CAN_LIMIT
def test_host_oom(trial: Trial) -> None:
    done = trial("cnn", "--samples", "200000", "--steps", "8", "--memory", "1GiB")
    assert done.code == 11, done.err
    result = done.told
    assert result["outcome"] == "host_oom"
    limit = done.run.json["limits"]["memory"]
    assert limit["requested"] == 1 << 30 and limit["enforced_by"].startswith("cgroup")
    assert done.run.exit_status.evidence["counters"]
    assert "memory" in result["reason"]


@CAN_LIMIT
def test_host_oom_of_a_worker_alone(trial: Trial, own: Own) -> None:
    """The main process survives and fails with an error about a worker. On a busy machine the
    kernel may kill it too, before the memory of the worker is free."""
    greedy = own(item="self.kept = bytearray(1 << 31) if index else None")
    done = trial(greedy, "--workers", "1", "--steps", "8", "--memory", "1200MiB")
    assert done.code == 11, done.err
    exit_status = done.run.exit_status
    kills = exit_status.evidence["oom_kills"]
    assert exit_status.outcome == "host_oom" and kills >= 1
    assert exit_status.exit_code == 1 or kills > 1


@pytest.mark.quiet  # the watchdog must react before the memory is full
@CAN_UNSHARE
def test_host_oom_by_the_watchdog(trial: Trial, own: Own) -> None:
    """Without cgroups, which are hidden here."""
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
    assert limit["enforced_by"] == "soft" and "page cache" in limit["note"]
    assert "soft" in done.err


@CAN_UNSHARE
def test_shm_full(trial: Trial, own: Own) -> None:
    """Workers pass batches through /dev/shm, which has 4 MiB here."""
    wide = own(item="return torch.zeros(1 << 18), 0")
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=4m none /dev/shm; exec "$@"']
    done = trial(
        wide, "--workers", "1", "--batch-size", "16", "--steps", "8", before=[*small, "sh"]
    )
    assert done.code == 12, done.err
    assert done.told["outcome"] == "shm_full"
    assert "--shm-size" in done.err


@CAN_UNSHARE
def test_full_disk(trial: Trial, own: Own, tmp_path: Path) -> None:
    """The reason is reported although nothing could be written."""
    (tmp_path / "runs").mkdir()
    small = f'mount -t tmpfs -o size=200k none {tmp_path / "runs"}; exec "$@"'
    chatty = own(step="print('x' * 5000, flush=True)")
    done = trial(chatty, "--steps", "400", before=["unshare", "--mount", "sh", "-c", small, "sh"])
    assert done.code == 14, done.err
    printed = " ".join(done.err.split())
    assert "the disk with the run folder is full" in printed and "--out DIR" in printed
    assert "Traceback" not in done.err


@pytest.mark.quiet  # the start must take less time than the stall timeout
def test_stall(trial: Trial, own: Own) -> None:
    sleepy = own(step="time.sleep(600) if batch[1].shape[0] else None")
    done = trial(sleepy, "--steps", "8", "--workers", "1", "--stall-timeout", "6")
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
    assert done.told["steps"] > 3, "the measurements until then are kept"
    assert time.monotonic() - started < 40


def test_crash(trial: Trial, own: Own) -> None:
    done = trial(own(step="os.abort()"), "--steps", "8")
    assert done.code == 14, done.err
    assert done.run.exit_status.signal == "SIGABRT"


def test_exception(trial: Trial, own: Own) -> None:
    done = trial(own(step="raise ValueError('no such luck')"), "--steps", "8")
    assert done.code == 14, done.err
    assert "ValueError: no such luck" in done.told["reason"]
    assert any("no such luck" in line for line in done.run.exit_status.evidence["stderr"])
    assert "Traceback" not in done.err


@pytest.mark.long
def test_early_exit_is_a_crash(trial: Trial, own: Own) -> None:
    done = trial(own(step="raise SystemExit(0)"), "--steps", "8")
    assert done.code == 14, done.err


def test_gpu_oom_message_of_the_allocator(trial: Trial, own: Own) -> None:
    """A simulated message of the allocator; tests/gpu has the real one."""
    message = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 15.00 GiB"
    done = trial(own(step=f"raise torch.OutOfMemoryError({message!r})"), "--steps", "8")
    assert done.code == 10, done.err
    assert done.told["reason"] == "CUDA out of memory"
    assert "Tried to allocate 20.00 MiB" in " ".join(done.err.split())


def test_detached_children_are_ended(trial: Trial, own: Own, tmp_path: Path) -> None:
    begin = "import subprocess; subprocess.Popen(['sleep', '987'], start_new_session=True)"
    done = trial(own(begin=begin), "--steps", "8")
    assert done.code == 0, done.err
    assert subprocess.run(["pgrep", "-f", "sleep 987"]).returncode == 1


def test_killed_runner(trial: Trial, own: Own, tmp_path: Path) -> None:
    """The run is `lost`, its processes and groups are removed, and the next trial runs."""
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
    assert open_run(folder).exit_status.outcome == "lost"
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
    _, err = runner.communicate(timeout=60)
    assert runner.returncode == 130, err
    (folder,) = runs.iterdir()
    assert open_run(folder).exit_status.outcome == "interrupted"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.long)]
)
def test_second_signal_does_not_interrupt_the_cleanup(
    own: Own, tmp_path: Path, number: int
) -> None:
    runs = tmp_path / "runs"
    ignore = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    begin = f"import signal, multiprocessing; {ignore}; os.fork() or time.sleep(900)"
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
    _, err = runner.communicate(timeout=60)
    assert runner.returncode == 130, err
    (folder,) = runs.iterdir()
    assert open_run(folder).exit_status.outcome == "interrupted"
    assert not _marked(f"{runner.pid}.")


def _marked(name: str) -> list[int]:
    """Return the processes whose token names a runner."""
    pids = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{trial_processes.VARIABLE}={name}".encode() in entry.read_bytes():
                pids.append(int(entry.parent.name))
        except OSError:
            continue
    return pids


def _until(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False
