"""`stepscope trial` with real training in real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from conftest import Tried, trial_environment
from stepscope.errors import TrialError
from stepscope.opened_run import open_run
from stepscope.runs.trial import read_steps
from stepscope.sensors import procfs
from stepscope.trials.heartbeat import Progress

Trial = Callable[..., Tried]
Own = Callable[..., str]
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_cnn_with_profile(trial: Trial) -> None:
    done = trial("cnn", "--samples", "4096", "--steps", "40", "--profile")
    assert done.code == 0, done.err
    result = done.told
    assert result["outcome"] == "ok"
    assert result["samples_per_second_low"] < result["samples_per_second"]
    assert result["samples_per_second"] < result["samples_per_second_high"]
    assert result["host_memory_peak_bytes"] > 200e6
    assert result["allocated_peak_bytes"] is None
    assert 0 <= result["data_wait_share"] < 0.5
    assert result["global_batch"] == 32
    assert "samples/s" in done.err.lower()
    run = done.run
    assert run.exit_status.outcome == "ok"
    assert run.json["workload"]["model"] == "cnn"
    summary = run.summary()
    assert (run.path / "derived" / "report.html").exists()
    profile = json.loads((run.path / "trial" / "profile0.json").read_text())
    assert result["steps"] == 40, "profiled steps do not count"
    assert summary.steps == 40 + 1 + profile["steps"], "the profiler uses one warm-up step"
    assert (run.path / "trial" / "trace0.json.gz").stat().st_size > 1000
    calls = {row["name"]: row["calls"] for row in profile["operators"]}
    assert calls["aten::conv2d"] == 3 * profile["steps"]
    assert "aten::" in done.err and "under the profiler" in done.err


def test_jpeg_with_workers(trial: Trial) -> None:
    done = trial(
        "cnn",
        "--data",
        "jpeg",
        "--workers",
        "2",
        "--samples",
        "48",
        "--batch-size",
        "8",
        "--image-size",
        "64",
        "--steps",
        "10",
        "--classes",
        "10",
    )
    assert done.code == 0, done.err
    result = done.told
    assert result["steps"] == 10 and result["samples_per_second"] > 0
    assert result["data_wait_share"] is not None
    assert "worker" in done.run.summary().roles
    rank = json.loads((done.run.path / "trial" / "rank0.json").read_text())
    assert rank["data"]["source"] == "generated" and rank["data"]["samples"] == 48


@pytest.mark.long
def test_data_modes(trial: Trial) -> None:
    """Resident data is not slower than loaded data, and loading alone is faster than both."""
    rates = {}
    for data in ("random", "resident", "loader-only"):
        done = trial("cnn", "--samples", "8192", "--seconds", "4", "--data", data, "--name", data)
        assert done.code == 0, done.err
        rates[data] = done.told["samples_per_second"]
        if data == "loader-only":
            assert done.told["data_wait_share"] > 0.9
        if data == "resident":
            assert done.told["data_wait_share"] < 0.01
    assert rates["resident"] > 0.7 * rates["random"]
    assert rates["loader-only"] > 3 * rates["random"]


@pytest.mark.quiet
def test_cpus(trial: Trial) -> None:
    """Two CPUs are faster than one, and the affinity is enforced."""
    assert _fast_step(trial, 1) > 1.25 * _fast_step(trial, 2)


def _fast_step(trial: Trial, cpus: int) -> float:
    """Return the compute time of fast steps, with little interference from other processes."""
    done = trial(
        "resnet18",
        "--image-size",
        "64",
        "--batch-size",
        "8",
        "--data",
        "resident",
        "--samples",
        "32",
        "--seconds",
        "2",
        "--cpus",
        str(cpus),
        "--name",
        f"cpus{cpus}",
    )
    assert done.code == 0, done.err
    (folder,) = done.runs.glob(f"*_cpus{cpus}_*")
    limit = json.loads((folder / "run.json").read_text())["limits"]["cpus"]
    assert limit["enforced_by"] == "affinity" and len(limit["cpus"]) == limit["threads"] == cpus
    assert limit["masks_checked"] > 0 and limit["escaped"] == []
    return float(np.quantile(read_steps(folder / "trial" / "steps0.bin")["compute_ns"], 0.1))


@pytest.mark.long
@pytest.mark.parametrize(
    "example", ["workload_huggingface", "workload_lightning", "workload_variable_length"]
)
def test_examples(trial: Trial, example: str) -> None:
    (file,) = (EXAMPLES / example).glob("*.py")
    done = trial(f"{file}:workload", "--steps", "10", "--batch-size", "8")
    assert done.code == 0, done.err
    assert done.told["steps"] == 10 and done.told["samples_per_second"] > 0


def test_repeats_of_an_example_update_the_noise(trial: Trial, tmp_path: Path) -> None:
    (file,) = (EXAMPLES / "workload_plain_loop").glob("*.py")
    done = trial(f"{file}:workload", "--steps", "40", "--batch-size", "8", "--repeat", "2")
    assert done.code == 0, done.err
    for folder in done.folders:
        rank = json.loads((folder / "trial" / "rank0.json").read_text())
        assert rank["steps"] == 40, "without the extra phases of `fit`"
        assert "evaluation" not in rank["phases"] and "parts" not in rank
    result = json.loads(done.out)
    assert result["ok"] == 2 and len(done.folders) == 2
    assert result["samples_per_second_low"] < result["samples_per_second"]
    noise = tmp_path / "state" / "noise.json"
    if not any(each["interference"] for each in result["trials"]):
        (machine,) = json.loads(noise.read_text())["machines"].values()
        assert machine["trials"] == 2
    else:
        assert not noise.exists(), "trials with interference are not used"


def test_all_settings_at_once(trial: Trial) -> None:
    done = trial(
        "cnn",
        "--samples",
        "2048",
        "--batch-size",
        "16",
        "--accumulate",
        "2",
        "--workers",
        "1",
        "--prefetch",
        "3",
        "--no-persistent",
        "--no-pin",
        "--precision",
        "bf16",
        "--channels-last",
        "--optimizer",
        "adamw",
        "--lr",
        "0.001",
        "--weight-decay",
        "0.1",
        "--image-size",
        "40",
        "--classes",
        "7",
        "--fraction",
        "0.25",
        "--seed",
        "3",
        "--epochs",
        "2",
        "--memory",
        "4GiB",
        "--cpus",
        "1.5",
        "--timeout",
        "100",
    )
    assert done.code == 0, done.err
    result = done.told
    assert result["global_batch"] == 32 and result["steps"] == 2 * (512 // 16 // 2)
    assert result["samples"] == 1024
    limits = done.run.json["limits"]
    assert limits["memory"]["requested"] == 4 << 30 and limits["cpus"]["requested"] == 1.5
    assert result["epoch_measured"]


def test_as_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of the calling program, started before or during a trial, are not affected."""
    import stepscope

    for name, value in trial_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    children = [subprocess.Popen(["sleep", "600"])]
    ended: list[subprocess.Popen[bytes]] = []

    def show(number: int, progress: Progress) -> None:
        if progress.steps and len(children) == 1:
            children.append(subprocess.Popen(["sleep", "600"]))
            ended.append(subprocess.Popen(["sh", "-c", "exit 7"]))

    (view,) = stepscope.trial(
        "cnn", samples=512, seconds=2, out=tmp_path / "runs", cpus=1, show=show
    )
    assert len(children) == 2 and all(child.poll() is None for child in children)
    assert ended[0].wait() == 7, "not reaped by stepscope"
    for child in children:
        child.kill()
        child.wait()
    assert view.is_ok and view.samples_per_second
    assert view.record.limits.cpus and view.record.limits.cpus.escaped == ()
    assert "other" not in open_run(view.folder).summary().roles


def test_failed_start_of_monitoring_leaves_no_trial_behind(
    own: Own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import stepscope

    def broken(*_: object) -> None:
        raise RuntimeError("no hook today")

    for name, value in trial_environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("stepscope.capture.session.HookMonitor", broken)
    before = procfs.children()
    with pytest.raises(TrialError, match="no hook today"):
        stepscope.trial(own(), steps=16, out=tmp_path / "runs")
    assert procfs.children() == before
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.long
def test_two_concurrent_trials_in_one_program(own: Own, tmp_path: Path) -> None:
    """The trial that ends first does not affect the other."""
    program = f"""
import threading, stepscope
views = {{}}
def run(name, seconds):
    (views[name],) = stepscope.trial({own()!r}, seconds=seconds, out={str(tmp_path / "runs")!r})
threads = [threading.Thread(target=run, args=pair) for pair in (("short", 2), ("long", 12))]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print({{name: view.exit_status.outcome.value for name, view in views.items()}})
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=trial_environment(tmp_path),
    )
    assert done.stdout.strip() == "{'short': 'ok', 'long': 'ok'}", done.stderr


@pytest.mark.long
@pytest.mark.parametrize("how", ["SIG_IGN", "lambda *_: [os.waitpid(-1, os.WNOHANG)]"])
def test_program_that_reaps_all_its_children(own: Own, tmp_path: Path, how: str) -> None:
    how = f"signal.{how}" if how == "SIG_IGN" else how
    program = f"""
import os, signal, stepscope
signal.signal(signal.SIGCHLD, {how})
(view,) = stepscope.trial({own()!r}, steps=16, stall_timeout=30, out={str(tmp_path / "runs")!r})
print(view.exit_status.outcome.value)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=trial_environment(tmp_path),
        timeout=60,
    )
    assert done.stdout.strip() == "ok", done.stderr
