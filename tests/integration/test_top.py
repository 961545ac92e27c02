"""`stepscope top` in a real terminal: updates, layout, and cleanup."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from conftest import STEPSCOPE
from stepscope.inject import events
from stepscope.runs.events import read_folder
from stepscope.runs.reader import latest_run, open_run

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")

TIMEOUT_S = 60

TRAINS = """
import os, sys, time
import stepscope.marks
events = sys.modules["_stepscope_events"]
write = events.current.write
print("training", flush=True)
while True:
    write(events.LOADER_BEGIN, 0, 1, 0, 20)
    for batch in range(20):
        began = time.monotonic_ns()
        time.sleep(0.01)
        write(events.BATCH, 0, 1, time.monotonic_ns() - began, 64)
        end = time.monotonic() + 0.04
        while time.monotonic() < end: pass
        write(events.STEP, 0, 1, 1)
        if os.path.exists(sys.argv[1]):
            sys.exit()
    write(events.LOADER_END, 0, 1)
"""


@dataclass
class Training:
    """A monitored process that trains until its stop file exists."""

    monitor: subprocess.Popen[str]
    folder: Path
    stop_file: Path

    def stop(self) -> None:
        self.stop_file.touch()
        self.monitor.wait(TIMEOUT_S)


def start_training(folder: Path, name: str = "demo") -> Training:
    script, stop_file, runs = folder / f"{name}.py", folder / f"{name}.stop", folder / "runs"
    script.write_text(TRAINS)
    monitor = subprocess.Popen(
        [
            *STEPSCOPE,
            "run",
            "-q",
            "--name",
            name,
            "--out",
            str(runs),
            "--",
            sys.executable,
            str(script),
            str(stop_file),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert monitor.stdout is not None
    assert monitor.stdout.readline() == "training\n"
    (found,) = runs.glob(f"*_{name}_*")
    return Training(monitor, found, stop_file)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A training that several tests share."""
    started = start_training(tmp_path_factory.mktemp("training"))
    yield started
    started.stop()


@pytest.fixture
def own_training(tmp_path: Path) -> Iterator[Training]:
    """A training for a test that ends it."""
    started = start_training(tmp_path)
    yield started
    started.stop()


@dataclass
class Pane:
    """A terminal in a private tmux server."""

    socket: Path

    def tmux(self, *arguments: str) -> str:
        command = ["tmux", "-u", "-S", str(self.socket), "-f", "/dev/null", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def start(self, *command: str, width: int = 80, height: int = 24, **variables: str) -> None:
        """Run a command between two echoes, then keep the shell open."""
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
        program = f"echo before; {settings} {shlex.join(command)}; echo code-$?; exec sh"
        self.tmux("new-session", "-d", "-x", str(width), "-y", str(height), program)

    def screen(self) -> list[str]:
        return self.tmux("capture-pane", "-p").split("\n")[:-1]

    def wait_for(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Return the screen once it meets a condition."""
        end = time.monotonic() + TIMEOUT_S
        while not condition(screen := self.screen()):
            if time.monotonic() > end:
                pytest.fail("timeout, the screen is:\n" + "\n".join(screen))
            time.sleep(0.05)
        return screen

    def wait_for_text(self, *texts: str) -> list[str]:
        return self.wait_for(lambda screen: all(text in "\n".join(screen) for text in texts))

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def pid_of_top(self) -> int:
        """The pid of the only child of the shell."""
        shell = int(self.tmux("list-panes", "-F", "#{pane_pid}"))
        children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
        return int(children[0])


@pytest.fixture
def pane(tmp_path: Path) -> Iterator[Pane]:
    pane = Pane(tmp_path / "tmux")
    yield pane
    if pane.socket.exists():
        pane.tmux("kill-server")


def top(*arguments: str | Path) -> list[str]:
    return [*STEPSCOPE, "top", *map(str, arguments)]


def line_of(screen: list[str], label: str) -> str:
    return next((line for line in screen if line.startswith(label)), "")


def rate_of(training: Training) -> float:
    """Samples per second since the start, from its events: it is slow on a busy machine."""
    (process,) = read_folder(training.folder / "events")
    times = process.of(events.STEP)["t"]
    return float(64 * (len(times) - 1) / ((times[-1] - times[0]) / 1e9))


def fills(screen: list[str], width: int, height: int) -> bool:
    """Whether the screen is a complete frame of this size."""
    return (
        len(screen) == height
        and screen[-1].startswith("q: quit")
        and max(map(len, screen)) <= width
        and (width < 60 or (len(screen[0]) == width and screen[0].endswith("of one core")))
    )


def check_terminal_is_restored(pane: Pane, code: int = 0) -> list[str]:
    """Check that the screen, the cursor and the echo of input are restored."""
    screen = pane.wait_for_text("before", f"code-{code}\n")
    assert not any("q: quit" in line for line in screen)
    assert pane.tmux("display-message", "-p", "#{alternate_on} #{cursor_flag}") == "0 1\n"
    pane.keys("stty -a; echo sum-$((40 + 2))", "Enter")
    settings = " ".join(pane.wait_for_text("sum-42"))
    assert "echo sum-$((40 + 2))" in settings
    assert " echo " in settings and " icanon " in settings
    return screen


def test_follows_resizes_and_quits(training: Training, pane: Pane) -> None:
    pane.start(*top(training.folder), COLUMNS="80", LINES="24")  # as some shells export them
    screen = pane.wait_for(
        lambda screen: "training  ━" in "\n".join(screen) and "of 20 batches" in "\n".join(screen)
    )
    assert fills(screen, 80, 24)
    assert screen[0].startswith("demo  running  0:0")
    pane.wait_for(lambda screen: bool(set("▂▃▄▅▆▇█") & set(line_of(screen, "CPU "))))
    shown = float(screen[4].split(" samples/s")[0].replace(",", ""))
    assert shown < 1400 and 0.25 < shown / rate_of(training) < 4
    epoch = int(screen[3].split()[1])
    pane.wait_for(lambda screen: int(screen[3].split()[1]) > epoch)

    for width, height in ((120, 40), (50, 12), (200, 50), (20, 5), (80, 24)):
        pane.tmux("resize-window", "-x", str(width), "-y", str(height))
        if height < 6:
            pane.wait_for(lambda screen: screen[0].startswith("demo"))
        else:
            pane.wait_for(lambda s, w=width, h=height: fills(s, w, h))  # type: ignore[misc]

    pane.keys("x", "q")
    check_terminal_is_restored(pane)
    assert open_run(training.folder).exit_status.outcome == "running"


def test_ctrl_c_quits(training: Training, pane: Pane) -> None:
    pane.start(*top("--interval", "30", training.folder))
    pane.wait_for_text("demo  running", "q: quit")
    pane.keys("C-c")
    check_terminal_is_restored(pane)


def test_sigterm_restores_the_terminal(training: Training, pane: Pane) -> None:
    pane.start(*top(training.folder))
    pane.wait_for_text("q: quit")
    os.kill(pane.pid_of_top(), signal.SIGTERM)
    check_terminal_is_restored(pane, 128 + signal.SIGTERM)


def test_ctrl_z_suspends_and_restores_the_terminal(training: Training, pane: Pane) -> None:
    pane.start("bash", "--norc", "--noprofile", "-i")
    pane.keys(shlex.join(top(training.folder)), "Enter")
    pane.wait_for_text("q: quit")
    pane.keys("C-z")
    screen = pane.wait_for_text("before", "Stopped")
    assert not any("q: quit" in line for line in screen)
    pane.keys("fg", "Enter")
    pane.wait_for(lambda screen: fills(screen, 80, 24))
    pane.keys("q")
    pane.wait_for_text("Stopped")


def test_run_ends_while_it_is_shown(own_training: Training, pane: Pane) -> None:
    pane.start(*top(own_training.folder))
    pane.wait_for_text("demo  running", "q: quit")
    own_training.stop()
    pane.wait_for_text("code-0")
    screen = "\n".join(check_terminal_is_restored(pane))
    assert "demo ended after " in screen and ": ok" in screen
    assert "Report    " in screen


def test_monitor_is_killed(own_training: Training, pane: Pane) -> None:
    pane.start(*top(own_training.folder))
    pane.wait_for_text("demo  running", "q: quit")
    own_training.monitor.kill()
    screen = "\n".join(check_terminal_is_restored(pane))
    assert "demo ended after " in screen and ": lost, " in screen


def test_finished_run_is_printed_once(own_training: Training, pane: Pane) -> None:
    own_training.stop()
    pane.start(*top(own_training.folder), height=40)
    screen = "\n".join(check_terminal_is_restored(pane))
    assert "demo  ok  0:0" in screen
    assert "of 20 batches" in screen
    assert "demo ended after " in screen and ": ok" in screen
    report = open_run(own_training.folder).paths.report_html.name
    assert report in screen.replace("\n", "")


def test_plain_text_without_a_terminal(training: Training) -> None:
    done = subprocess.run(top(training.folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("demo  running  0:0")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "ended after" not in done.stdout


@pytest.mark.parametrize("how", ["--once", "dumb"])
def test_one_plain_frame_in_a_terminal(training: Training, pane: Pane, how: str) -> None:
    if how == "dumb":
        pane.start(*top(training.folder), height=40, TERM="dumb")
    else:
        pane.start(*top("--once", training.folder), height=40)
    screen = pane.wait_for_text("before", "demo  running", "CPU", "code-0")
    assert not any("q: quit" in line for line in screen)


def test_one_frame_as_json(training: Training) -> None:
    done = subprocess.run(top("--json", training.folder), capture_output=True, text=True)
    frame = json.loads(done.stdout)
    assert (frame["name"], frame["outcome"]) == ("demo", "running")
    assert frame["epoch"]["index"] >= 1
    assert frame["epoch"]["total_batches"] == 20
    assert frame["steps"] > 0


def test_default_is_the_latest_running_run(own_training: Training) -> None:
    runs = own_training.folder.parent
    later = start_training(runs.parent, "later")
    later.stop()
    assert latest_run(runs) == later.folder
    variables = {**os.environ, "STEPSCOPE_RUNS": str(runs)}
    done = subprocess.run(top("--json"), capture_output=True, text=True, env=variables)
    assert json.loads(done.stdout)["name"] == "demo"
