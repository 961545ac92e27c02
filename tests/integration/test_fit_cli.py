"""`stepscope fit` on the command line: errors, interruptions, and a result on the CPU.

No GPU is visible, so that every machine gives the same results.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import stepscope
from conftest import STEPSCOPE, trial_environment
from stepscope.errors import StepscopeError

Own = Callable[..., str]


def environment(folder: Path) -> dict[str, str]:
    return {**trial_environment(folder), "CUDA_VISIBLE_DEVICES": ""}


def fit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STEPSCOPE, "fit", *arguments],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=110,
    )


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)


def workload() -> None:
    """A function at the top level of a file, which probes could import."""


def test_a_function_can_be_passed() -> None:
    """The error is about the method, so the function was found."""
    with pytest.raises(StepscopeError, match="Unknown method 'none'"):
        stepscope.fit(workload, method="none")


def test_a_model_that_does_not_fit_reports_the_shortfall(tmp_path: Path, own: Own) -> None:
    done = fit(tmp_path, own(), "--memory", "128MiB", "--headroom", "25%", "--verify", "--json")
    assert done.returncode == 11, done.stderr
    result = json.loads(done.stdout)
    assert result["verdict"] == "does_not_fit" and result["batch_size"] is None
    assert result["budget"]["requested_bytes"] == 128 << 20
    assert result["budget"]["headroom_bytes"] == 32 << 20
    printed = " ".join(done.stderr.split())
    assert "does not fit in 96 MiB" in printed
    assert "stepscope: `--verify` has no effect for host memory" in printed
    assert "Each probe is a disposable process" in printed


def test_termination_leaves_no_processes(tmp_path: Path, own: Own) -> None:
    """The signal arrives while the first probe trains."""
    started = tmp_path / "started"
    place = own(step=f"open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)")
    process = subprocess.Popen(
        [*STEPSCOPE, "fit", place, "--memory", "2GiB"],
        env=environment(tmp_path),
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (started.exists() and started.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    probe = Path("/proc", started.read_text())
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted: there is no result, and no probe is left running" in err
    assert not probe.exists()
