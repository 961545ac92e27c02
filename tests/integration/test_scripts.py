"""Unmodified scripts work as before, and their epochs and steps are tracked."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable

import pytest

from conftest import SCRIPTS, Finished


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test if its package is missing; `make test` installs all of them."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


Watch = Callable[..., Finished]
PythonFile = Callable[[str], str]


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_torch_loop_with_workers(watch: Watch, start: str) -> None:
    done = watch(sys.executable, str(SCRIPTS / "torch_loop.py"), "2", start)

    assert done.code == 0, done.err
    assert len(re.findall(r"^epoch \d: ", done.out, re.M)) == 3
    assert "tracking epochs and steps (PyTorch DataLoader and optimizer)" in done.err
    summary = done.run.summary()
    assert summary.epoch_source == "loader"
    assert [row.index for row in summary.epochs] == [1, 2, 3]
    assert [row.steps for row in summary.epochs] == [16, 16, 16]
    assert [row.samples for row in summary.epochs] == [1000, 1000, 1000]
    assert summary.steps == 48
    assert summary.phases[0][:2] == ("evaluation", 3)
    assert {"main", "worker"} <= set(summary.roles)
    assert all(0 < row.data_wait_share < 1 for row in summary.epochs)
    assert done.run.json["hook"]["frameworks"]["torch"].startswith("2.")


def test_torchrun_with_two_ranks(watch: Watch) -> None:
    done = watch(
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--standalone",
        str(SCRIPTS / "torchrun_ranks.py"),
    )

    assert done.code == 0, done.err
    summary = done.run.summary()
    assert {"rank0", "rank1"} <= set(summary.roles)
    assert [row.steps for row in summary.epochs] == [8, 8]
    assert [row.samples for row in summary.epochs] == [256, 256], "samples of both ranks"
    steps = done.run.steps().to_pylist()
    assert {row["rank"] for row in steps} == {0, 1}
    assert sum(row["steps"] or 0 for row in steps) == 32


@needs("keras")
def test_keras_fit(watch: Watch) -> None:
    done = watch(sys.executable, str(SCRIPTS / "keras_fit.py"))

    assert done.code == 0, done.err
    assert "tracking epochs and steps (Keras fit)" in done.err
    summary = done.run.summary()
    assert summary.epoch_source == "fit"
    assert [row.steps for row in summary.epochs] == [10, 10, 10]
    assert [row.index for row in summary.epochs] == [1, 2, 3], "as Keras prints them"
    assert ("evaluation", 3) in [phase[:2] for phase in summary.phases]


@needs("lightning")
def test_lightning_fit(watch: Watch) -> None:
    done = watch(sys.executable, str(SCRIPTS / "lightning_fit.py"))

    assert done.code == 0, done.err
    summary = done.run.summary()
    assert summary.epoch_source == "loader"
    assert [row.steps for row in summary.epochs] == [10, 10, 10]
    assert [row.index for row in summary.epochs] == [0, 1, 2], "as Lightning prints them"


@needs("jax")
def test_jax_is_not_supported(watch: Watch) -> None:
    done = watch(sys.executable, str(SCRIPTS / "jax_loop.py"))

    assert done.code == 0, done.err
    assert done.out.startswith("loss ")
    assert "jax is not supported. Use stepscope.mark() or --epoch-pattern" in done.err
    assert done.run.json["hook"]["frameworks"]["jax"]


def test_shell_pipeline(watch: Watch) -> None:
    done = watch("sh", "-c", "seq 1 100000 | sort -r | tail -n 1; exit 7")

    assert (done.code, done.out) == (7, "1\n")
    assert "tracking" not in done.err, "a command that failed needs no advice"
    assert done.run.exit_status.outcome == "crashed"
    assert done.run.exit_status.exit_code == 7


def test_reads_its_standard_input(watch: Watch) -> None:
    done = watch(
        sys.executable, "-c", "import sys; print(sys.stdin.read().upper())", input="hello\n"
    )

    assert (done.code, done.out) == (0, "HELLO\n\n")


def test_isolated_python_does_not_load_the_hook(watch: Watch) -> None:
    done = watch(sys.executable, "-I", "-c", "print('fine')")

    assert (done.code, done.out) == (0, "fine\n")
    assert "Python was started with -I or -E" in done.err


DETACHING = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        end = time.monotonic() + {seconds}
        while time.monotonic() < end:
            pass
        open({result!r}, "w").write(str(time.process_time()))
        os._exit(0)
    os._exit(0)
os.wait()
"""


def test_forks_and_detaches(watch: Watch, python_file: PythonFile, tmp_path: object) -> None:
    result = f"{tmp_path}/result"
    script = python_file(DETACHING.format(seconds=3, result=result))

    done = watch(sys.executable, script)

    assert done.code == 0
    assert "still running: " in done.err
    assert len(done.run.json["survivors"]) == 1


def test_wait_tree(watch: Watch, python_file: PythonFile, tmp_path: object) -> None:
    result = f"{tmp_path}/result"
    script = python_file(DETACHING.format(seconds=1.5, result=result))

    done = watch(sys.executable, script, options=["--wait-tree"])

    assert done.code == 0
    assert "still running" not in done.err
    with open(result) as file:
        cpu_seconds = float(file.read())
    core_seconds = done.run.summary().core_seconds
    assert core_seconds is not None and core_seconds > cpu_seconds
