"""`stepscope fit` on the command line: errors, interruptions, and a result on the CPU.

No GPU is visible, so that every machine gives the same results.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("model", "options", "code", "message"),
    [
        ("resnt50", {}, 4, "Unknown model 'resnt50'. Did you mean 'resnet50'"),
        ("train.py:workload", {}, 4, "No such file: train.py"),
        ("cnn", {"batch_size": 8}, 4, "`fit` finds the batch size. Remove --batch-size"),
        ("cnn", {"seconds": 8.0}, 4, "`fit` decides how long a probe trains. Remove --sec"),
        ("cnn", {"precision": "fp8"}, 4, "Unknown precision 'fp8'"),
        ("cnn", {"memory": "lots"}, 5, "Invalid size 'lots'"),
        ("cnn", {"memory": "1MiB"}, 5, "`--memory 1MiB` must be at least 64 MiB"),
        ("cnn", {"memory": "900TiB"}, 5, "`--memory 900TiB` exceeds the available"),
        ("cnn", {"gpu_memory": "8GiB"}, 5, "`--gpu-memory` needs a GPU, but no usable GPU"),
        ("cnn", {"predict_for": ["11GiB"]}, 5, "`--predict-for` needs a GPU"),
        ("cnn", {"predict_for": ["big"]}, 5, "Invalid size 'big'"),
        ("cnn", {"gpus": ["none"]}, 5, "Invalid GPU 'none' in --gpus"),
        ("cnn", {"device": "cuda"}, 5, "`--device cuda` needs a GPU, but no usable GPU"),
        (
            "cnn",
            {"device": "cpu", "gpus": ["0"]},
            5,
            "`--device cpu` and `--gpus 0` exclude each other",
        ),
        ("cnn", {"device": "cpu", "gpu_memory": "1GiB"}, 5, "but `--device cpu` is set"),
        ("cnn", {"device": "cpu", "predict_for": ["1GiB"]}, 5, "but `--device cpu` is set"),
        (
            "cnn",
            {"method": "linear2019"},
            5,
            "`--method linear2019` needs a GPU, but no usable GPU",
        ),
        ("cnn", {"method": "linear"}, 5, "Unknown method 'linear'. Did you mean 'linear2019'"),
        ("cnn", {"stall_timeout": 0.0}, 5, "`--stall-timeout 0` must be greater than 0"),
        ("cnn", {"headroom": "much"}, 5, "Invalid size 'much'"),
        ("cnn", {"headroom": "-1"}, 5, "Invalid size '-1'"),
        ("cnn", {"headroom": "x%"}, 5, "Invalid percentage 'x%' in `--headroom`"),
        ("cnn", {"headroom": "nan%"}, 5, "Invalid percentage 'nan%' in `--headroom`"),
        ("cnn", {"headroom": "100%"}, 5, "`--headroom 100%` leaves no memory"),
        ("cnn", {"headroom": "2GiB", "memory": "1GiB"}, 5, "`--headroom 2 GiB` leaves none of"),
    ],
)
def test_invalid_arguments(model: str, options: dict[str, Any], code: int, message: str) -> None:
    with pytest.raises(StepscopeError) as error:
        stepscope.fit(model, **options)
    assert message in str(error.value) and error.value.exit_code == code


def workload() -> None:
    """A function at the top level of a file, which probes could import."""


def test_a_function_can_be_passed() -> None:
    """The error is about the method, so the function was found."""
    with pytest.raises(StepscopeError, match="Unknown method 'none'"):
        stepscope.fit(workload, method="none")


def test_a_function_that_cannot_be_imported_is_rejected() -> None:
    def within() -> None: ...

    for function in (lambda: None, within, print, int):
        with pytest.raises(StepscopeError, match="cannot be imported by another process"):
            stepscope.fit(function)


def test_a_function_without_a_file_is_rejected() -> None:
    code = "import stepscope\ndef workload(): ...\nstepscope.fit(workload)\n"
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True)
    assert "workload is not defined in a file. The probes import it" in done.stderr


def test_an_error_on_the_command_line_is_one_line(tmp_path: Path) -> None:
    done = fit(tmp_path, "cnn", "--gpu-memory", "8GiB", "--json")
    assert done.returncode == 5 and done.stdout == ""
    assert done.stderr.startswith("stepscope: `--gpu-memory` needs a GPU")
    assert len(done.stderr.splitlines()) == 1


def test_a_setting_that_fit_determines_is_explained(tmp_path: Path) -> None:
    done = fit(tmp_path, "cnn", "--batch-size", "32")
    assert done.returncode == 4 and done.stderr == (
        "stepscope: `fit` finds the batch size. Remove --batch-size, or use `stepscope trial` to "
        "train at a given batch size\n"
    )


def test_an_empty_list_of_sizes_is_rejected(tmp_path: Path) -> None:
    done = fit(tmp_path, "cnn", "--predict-for", ",,")
    assert done.returncode == 5 and "`--predict-for ,,` contains no size. Pass sizes" in done.stderr


def test_a_model_that_does_not_fit_reports_the_shortfall(tmp_path: Path, own: Own) -> None:
    done = fit(tmp_path, own(), "--memory", "128MiB", "--headroom", "25%", "--verify", "--json")
    assert done.returncode == 11, done.stderr
    result = json.loads(done.stdout)
    assert result["verdict"] == "does_not_fit" and result["batch_size"] is None
    assert result["budget"]["requested_bytes"] == 128 << 20
    assert result["budget"]["headroom_bytes"] == 32 << 20
    printed = " ".join(done.stderr.split())
    assert "does not fit in 96 MiB" in printed
    assert "stepscope: `--verify` has no effect on the host" in printed
    assert "Probes are disposable processes and do not affect yours" in printed


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
