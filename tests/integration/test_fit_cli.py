"""`stepscope fit` as its user meets it: mistakes, interruptions, and an answer on the CPU.

No GPU is visible here, so that every machine gives the same answers.
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
    ("model", "options", "code", "said"),
    [
        ("resnt50", {}, 4, "no model 'resnt50'. Did you mean resnet50"),
        ("train.py:workload", {}, 4, "There is no file train.py"),
        ("cnn", {"batch_size": 8}, 4, "--batch-size is not for a fit to be told"),
        ("cnn", {"seconds": 8.0}, 4, "--seconds is not for a fit to be told"),
        ("cnn", {"precision": "fp8"}, 4, "--precision fp8 is not known"),
        ("cnn", {"memory": "lots"}, 5, "'lots' is no size"),
        ("cnn", {"memory": "1MiB"}, 5, "--memory 1 MiB is too small"),
        ("cnn", {"memory": "900TiB"}, 5, "--memory 900 TiB is more than there is"),
        ("cnn", {"gpu_memory": "8GiB"}, 5, "--gpu-memory is about a GPU, and there is none"),
        ("cnn", {"cards": ["11GiB"]}, 5, "--cards is about a GPU"),
        ("cnn", {"cards": ["big"]}, 5, "'big' is no size"),
        ("cnn", {"gpus": ["none"]}, 5, "--gpus none names no GPU"),
        ("cnn", {"device": "cuda"}, 5, "There is no GPU here"),
        (
            "cnn",
            {"device": "cpu", "gpus": ["0"]},
            5,
            "--device cpu leaves out the GPU that --gpus 0",
        ),
        ("cnn", {"device": "cpu", "gpu_memory": "1GiB"}, 5, "and --device cpu leaves it out"),
        ("cnn", {"device": "cpu", "cards": ["1GiB"]}, 5, "and --device cpu leaves it out"),
        (
            "cnn",
            {"method": "linear2019"},
            5,
            "--method linear2019 is about a GPU, and there is none",
        ),
        ("cnn", {"method": "linear"}, 5, "--method linear is not known. Did you mean linear2019"),
        ("cnn", {"hang": 0.0}, 5, "--hang 0 is no time"),
        ("cnn", {"headroom": "much"}, 5, "'much' is no size"),
        ("cnn", {"headroom": "-1"}, 5, "'-1' is no size"),
        ("cnn", {"headroom": "x%"}, 5, "--headroom x% is no percentage"),
        ("cnn", {"headroom": "nan%"}, 5, "--headroom nan% is no percentage"),
        ("cnn", {"headroom": "100%"}, 5, "leaves nothing to fit into"),
        ("cnn", {"headroom": "2GiB", "memory": "1GiB"}, 5, "--headroom 2 GiB leaves nothing of"),
    ],
)
def test_a_mistake_is_told(model: str, options: dict[str, Any], code: int, said: str) -> None:
    with pytest.raises(StepscopeError) as error:
        stepscope.fit(model, **options)
    assert said in str(error.value) and error.value.exit_code == code


def workload() -> None:
    """At the top of this file, which would be imported."""


def test_a_function_is_found_by_its_place() -> None:
    """The mistake is another one: it was found, or there would be no talk of methods."""
    with pytest.raises(StepscopeError, match="--method none is not known"):
        stepscope.fit(workload, method="none")


def test_a_function_that_no_other_process_finds_is_refused() -> None:
    def within() -> None: ...

    for function in (lambda: None, within, print, int):
        with pytest.raises(StepscopeError, match="cannot be found by another process"):
            stepscope.fit(function)


def test_a_function_that_was_typed_in_is_refused() -> None:
    code = "import stepscope\ndef workload(): ...\nstepscope.fit(workload)\n"
    done = subprocess.run([sys.executable, "-"], input=code, capture_output=True, text=True)
    assert "workload was typed in, and is in no file. The probes are processes" in done.stderr


def test_a_mistake_on_the_command_line_is_one_line(tmp_path: Path) -> None:
    done = fit(tmp_path, "cnn", "--gpu-memory", "8GiB", "--json")
    assert done.returncode == 5 and done.stdout == ""
    assert done.stderr.startswith("stepscope: --gpu-memory is about a GPU")
    assert len(done.stderr.splitlines()) == 1


def test_cards_without_a_size_are_no_cards(tmp_path: Path) -> None:
    done = fit(tmp_path, "cnn", "--cards", ",,")
    assert done.returncode == 5 and "--cards ,, names no size. For example" in done.stderr


def test_what_does_not_fit_says_how_much_is_missing(tmp_path: Path, own: Own) -> None:
    done = fit(tmp_path, own(), "--memory", "128MiB", "--headroom", "25%", "--prove", "--json")
    assert done.returncode == 11, done.stderr
    told = json.loads(done.stdout)
    assert told["verdict"] == "does not fit" and told["batch_size"] is None
    assert told["room"]["asked"] == 128 << 20 and told["room"]["headroom"] == 32 << 20
    assert "does not fit into 96 MiB" in " ".join(done.stderr.split())
    assert "stepscope: --prove is for a GPU" in done.stderr
    assert "nothing of yours was touched" in " ".join(done.stderr.split())


def test_a_request_to_end_leaves_nothing(tmp_path: Path, own: Own) -> None:
    """Sent while the first probe trains, which it does for ever."""
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
    assert "interrupted: there is no answer, and no probe is left running" in err
    assert not probe.exists()
