"""`with stepscope.watch(...)`: monitoring from Python."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import stepscope
from conftest import Finished
from stepscope.errors import MonitorError
from stepscope.inject import finder
from stepscope.inject.events import FOLDER_VARIABLE
from stepscope.opened_run import open_run
from stepscope.runs.reader import latest_run

PythonFile = Callable[[str], str]

TRAINING = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset
import stepscope

torch.set_num_threads(1)
loader = DataLoader(TensorDataset(torch.randn(96, 8)), 32)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def epoch():
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

epoch()  # before the block: not tracked
with stepscope.watch("inside <b>", out=sys.argv[1]) as block:
    for _ in range(2):
        epoch()
    start = time.process_time()
    while time.process_time() < start + 0.5: pass
    {last}
epoch()  # after the block: not tracked
summary = block.summary()
print(summary.steps, len(summary.epochs), 0.45 < summary.core_seconds < 1.5, flush=True)
assert (block.path / "derived" / "report.html").exists()
"""


def test_monitors_this_process(python_file: PythonFile, tmp_path: Path) -> None:
    script = python_file(TRAINING.format(last="pass"))
    done = subprocess.run(
        [sys.executable, script, str(tmp_path / "runs")], capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "6 2 True\n"
    run = open_run(latest_run(tmp_path / "runs"))
    assert run.name == "inside <b>"
    assert run.exit_status.outcome == "ok"
    assert run.json["hook"]["attached"] == ["DataLoader", "optimizer"]
    longest = run.summary().monitor["longest_gap_s"]
    assert longest < 0.5


def test_nested_in_stepscope_run(
    watch: Callable[..., Finished], python_file: PythonFile, tmp_path: Path
) -> None:
    script = python_file("""
import stepscope, sys, time
stepscope.mark("epoch", 0)
time.sleep(0.1)
with stepscope.watch("inner", out=sys.argv[1]):
    stepscope.mark("inner")
stepscope.mark("epoch", 1)
time.sleep(0.1)
""")
    done = watch(sys.executable, script, str(tmp_path / "inner"))

    assert done.code == 0, done.err
    assert [mark["name"] for mark in done.run.marks().to_pylist()] == ["epoch", "epoch"]
    assert [row.index for row in done.run.summary().epochs] == [0, 1]
    inner = open_run(latest_run(tmp_path / "inner"))
    assert [mark["name"] for mark in inner.marks().to_pylist()] == ["inner"]


def test_interval_out_of_range(tmp_path: Path) -> None:
    with (
        pytest.raises(MonitorError, match=r"0\.02 to 60"),
        stepscope.watch(interval=0, out=tmp_path),
    ):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("last", "outcome", "words"),
    [
        ("raise ValueError('bad')", "crashed", "raised ValueError: bad"),
        ("import os; os.kill(os.getpid(), 9)", "crashed", "exited inside the monitored block"),
        ("raise KeyboardInterrupt", "interrupted", "interrupted"),
    ],
)
def test_exit_status_of_a_block(
    python_file: PythonFile, tmp_path: Path, last: str, outcome: str, words: str
) -> None:
    script = python_file(f"""
import stepscope, sys, time
with stepscope.watch("block", out=sys.argv[1]):
    time.sleep(0.2)
    {last}
""")
    subprocess.run([sys.executable, script, str(tmp_path / "runs")], capture_output=True)

    import time

    end = time.monotonic() + 60  # if the process was killed, the monitor is still writing
    while time.monotonic() < end:
        run = open_run(latest_run(tmp_path / "runs"))
        if run.exit_status.outcome != "running":
            break
        time.sleep(0.05)
    assert run.exit_status.outcome == outcome
    assert words in run.exit_status.reason


def test_children_that_outlive_the_block_do_not_delay_it(
    python_file: PythonFile, tmp_path: Path
) -> None:
    script = python_file("""
import os, stepscope, sys, time
with stepscope.watch("block", out=sys.argv[1]) as block:
    child = os.fork()
    if child == 0:
        time.sleep(100)
        os._exit(0)
    exiting = os.fork()
    if exiting == 0:
        sys.exit(0)  # exits inside the block of its parent
    os.waitpid(exiting, 0)
    time.sleep(0.3)
print(block.run().exit_status.outcome.value, flush=True)
os.kill(child, 9)
""")
    done = subprocess.run(
        [sys.executable, script, str(tmp_path / "runs")], capture_output=True, text=True, timeout=90
    )
    assert done.stdout == "ok\n", done.stderr


def test_one_block_at_a_time(tmp_path: Path) -> None:
    with (
        stepscope.watch("outer", out=tmp_path),
        pytest.raises(MonitorError, match="Another"),
        stepscope.watch("inner", out=tmp_path),
    ):
        pass
    with stepscope.watch("next", out=tmp_path) as again:
        descriptors = len(list(Path("/proc/self/fd").iterdir()))
    assert again.run().exit_status.outcome == "ok"
    assert len(list(Path("/proc/self/fd").iterdir())) < descriptors


def test_failures_of_the_hook_do_not_reach_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version of torch without the patched functions, and a full disk at the installation."""

    def full_disk(folder: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(finder, "install", full_disk)
    monkeypatch.setitem(sys.modules, "torch.utils.data.dataloader", ModuleType("strange"))
    lightning = ModuleType("lightning")
    lightning.__dict__["__version__"] = "9.9"
    monkeypatch.setitem(sys.modules, "lightning", lightning)
    with stepscope.watch("strange", out=tmp_path) as monitored:
        pass
    assert FOLDER_VARIABLE not in os.environ
    assert monitored.run().exit_status.outcome == "ok"
    assert monitored.run().json["hook"]["frameworks"]["lightning"] == "9.9"


def test_interrupt_at_the_start_of_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    before = dict(os.environ)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(finder, "attach_to_imported", interrupted)
        with stepscope.watch("interrupted", out=tmp_path):
            pass
    assert dict(os.environ) == before
    assert open_run(latest_run(tmp_path)).exit_status.outcome == "interrupted"
    with stepscope.watch("next", out=tmp_path):
        pass
