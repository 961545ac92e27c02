"""Commands of other users: their marks are recorded, and they cannot misuse the run folder."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from attack_runs import as_user, needs_root, start_run
from attack_trials import until

pytestmark = needs_root

NOBODY = 65534
MARKS = """
import os, stepscope
for step in range(20):
    stepscope.mark("step", step)
os.read(0, 1)
stepscope.mark("step", 20)
"""
PLANT = """
import json, os, sys, time
from pathlib import Path
kind, victim = sys.argv[1], sys.argv[2]
events = Path(os.environ["STEPSCOPE_EVENTS"])
while not os.access(events, os.W_OK):
    time.sleep(0.01)
monitor = json.loads((events.parent / "run.json").read_text())["monitor"]["pid"]
for name in ("interpreters", str(monitor), str(os.getppid())):
    path = events / f"{name}.bin"
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    else:
        (os.symlink if kind == "symbolic link" else os.link)(victim, path)
"""
"""Plants files for the pump, which has the file of the monitor, and for the parent process."""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder of root that every user can open."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize("place", ["folder of root", "closed folder", "folder of the user"])
def test_marks_of_another_user(tmp_path: Path, shared: Path, place: str) -> None:
    """They are recorded if the user can open the run folder but cannot replace it."""
    runs = (tmp_path if place == "closed folder" else shared) / "runs"
    if place == "folder of the user":
        os.chown(shared, NOBODY, NOBODY)
    started = start_run(runs, *as_user(NOBODY, sys.executable, "-c", MARKS))
    started.wait_for_begin()
    events = started.folder / "events"
    if place == "folder of root":
        assert until(lambda: events.stat().st_uid == NOBODY)
    code, _, err = started.finish()
    assert code == 0, err
    assert events.parent.stat().st_uid == 0
    if place == "folder of root":
        assert started.run.summary().steps == 21 and "another user" not in err
    else:
        assert events.stat().st_uid == 0 and not started.run.summary().steps
        assert "Python runs as another user, who cannot write to the run folder" in err


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("symbolic link", "is a symbolic link"),
        ("hard link", "exited normally"),
        ("FIFO", "not a regular file"),
    ],
)
def test_planted_files(shared: Path, kind: str, refused: str) -> None:
    """They are neither written to, nor waited for. Reports refuse them with a message."""
    victim = shared / "victim"
    victim.write_text("of somebody else\n" * 32)
    victim.chmod(0o666)  # otherwise the kernel refuses the hard link
    before = victim.stat()
    plant = " ".join(as_user(NOBODY, sys.executable, "-c", '"$PLANT"', f"'{kind}'", str(victim)))
    # The shell becomes the Python process of root whose file is planted.
    marks = f'exec {sys.executable} -c "$MARKS"'
    started = start_run(
        shared / "runs",
        *("sh", "-c", f"{plant} && {marks}"),
        options=("--epoch-pattern", r"Epoch (\d+)"),
        env={**os.environ, "PLANT": PLANT, "MARKS": f"{MARKS}\nprint('Epoch 1')"},
    )
    code, out, err = started.finish()
    assert (code, out) == (0, "Epoch 1\n"), err
    after = victim.stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert started.run.exit_status.outcome == "ok" and not started.run.facts.problems
    assert refused in err and "Traceback" not in err, err


def test_signal_that_cannot_be_forwarded(shared: Path) -> None:
    """A command with the setuid bit runs as root, and its monitor does not."""
    if os.statvfs(shared).f_flag & os.ST_NOSUID:
        pytest.skip("the setuid bit has no effect here")
    privileged = shutil.copy(shutil.which("setpriv") or "", shared / "setpriv")
    Path(privileged).chmod(0o4755)
    runs = shared / "runs"
    runs.mkdir()
    os.chown(runs, NOBODY, NOBODY)
    command = (privileged, "--reuid", "0", "sh", "-c", "read line; exit 7")
    started = start_run(runs, *command, before=tuple(as_user(NOBODY)))
    root = started.wait_for_begin()
    assert until(lambda: Path(f"/proc/{root}/comm").read_text() == "sh\n")
    started.process.send_signal(signal.SIGTERM)
    assert started.process.stderr is not None
    message = started.process.stderr.readline().decode()
    assert "SIGTERM was not forwarded: the command runs as another user. The command" in message
    assert started.finish()[0] == 7
    assert started.run.exit_status.outcome == "crashed"
