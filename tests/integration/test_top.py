"""`stepscope top` in a real terminal: it follows, fits, and leaves everything as it was."""

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

pytestmark = pytest.mark.skipif(
    shutil.which("tmux") is None, reason="tmux, the terminal of these tests, is not installed"
)

TIMEOUT_S = 60

TRAINS = """
import os, sys, time
import stepscope.marks
events = sys.modules["_stepscope_events"]
tell = events.current.write
print("training", flush=True)
while True:
    tell(events.LOADER_BEGIN, 0, 1, 0, 20)
    for batch in range(20):
        began = time.monotonic_ns()
        time.sleep(0.01)
        tell(events.BATCH, 0, 1, time.monotonic_ns() - began, 64)
        end = time.monotonic() + 0.04
        while time.monotonic() < end: pass
        tell(events.STEP, 0, 1, 1)
        if os.path.exists(sys.argv[1]):
            sys.exit()
    tell(events.LOADER_END, 0, 1)
"""


@dataclass
class Training:
    """A watched process that trains until it is told to stop."""

    watcher: subprocess.Popen[str]
    folder: Path
    stop_file: Path

    def stop(self) -> None:
        self.stop_file.touch()
        self.watcher.wait(TIMEOUT_S)


def start_training(folder: Path, name: str = "demo") -> Training:
    script, stop_file, runs = folder / f"{name}.py", folder / f"{name}.stop", folder / "runs"
    script.write_text(TRAINS)
    watcher = subprocess.Popen(
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
    assert watcher.stdout is not None
    assert watcher.stdout.readline() == "training\n"
    (found,) = runs.glob(f"*_{name}_*")
    return Training(watcher, found, stop_file)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """One that goes on while several tests look at it."""
    started = start_training(tmp_path_factory.mktemp("training"))
    yield started
    started.stop()


@pytest.fixture
def own_training(tmp_path: Path) -> Iterator[Training]:
    """One for a test that ends it."""
    started = start_training(tmp_path)
    yield started
    started.stop()


@dataclass
class Pane:
    """A terminal, by tmux; nothing of the user's tmux is touched."""

    socket: Path

    def tmux(self, *arguments: str) -> str:
        command = ["tmux", "-u", "-S", str(self.socket), "-f", "/dev/null", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def start(self, *command: str, width: int = 80, height: int = 24, **variables: str) -> None:
        """Run a command between two words, and stay to be looked at."""
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
        program = f"echo before; {settings} {shlex.join(command)}; echo code-$?; exec sh"
        self.tmux("new-session", "-d", "-x", str(width), "-y", str(height), program)

    def screen(self) -> list[str]:
        return self.tmux("capture-pane", "-p").split("\n")[:-1]

    def wait_for(self, is_so: Callable[[list[str]], bool]) -> list[str]:
        """The screen, once something is so."""
        end = time.monotonic() + TIMEOUT_S
        while not is_so(screen := self.screen()):
            if time.monotonic() > end:
                pytest.fail("it did not come:\n" + "\n".join(screen))
            time.sleep(0.05)
        return screen

    def wait_for_text(self, *texts: str) -> list[str]:
        return self.wait_for(lambda screen: all(text in "\n".join(screen) for text in texts))

    def keys(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def pid_of_top(self) -> int:
        """The shell's only child."""
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
    """Samples a second since its begin, by its own events: on a busy machine it trains slowly."""
    (process,) = read_folder(training.folder / "events")
    times = process.of(events.STEP)["t"]
    return float(64 * (len(times) - 1) / ((times[-1] - times[0]) / 1e9))


def fills(screen: list[str], width: int, height: int) -> bool:
    """A whole frame of this size: its right and its lower edge are where they should be."""
    return (
        len(screen) == height
        and screen[-1].startswith("q quits")
        and max(map(len, screen)) <= width
        and (width < 60 or (len(screen[0]) == width and screen[0].endswith("of a core")))
    )


def check_that_all_is_as_before(pane: Pane, code: int = 0) -> list[str]:
    """The screen from before is back, the cursor is seen, and what is typed is echoed."""
    screen = pane.wait_for_text("before", f"code-{code}\n")
    assert not any("q quits" in line for line in screen)
    assert pane.tmux("display-message", "-p", "#{alternate_on} #{cursor_flag}") == "0 1\n"
    pane.keys("stty -a; echo sum-$((40 + 2))", "Enter")
    settings = " ".join(pane.wait_for_text("sum-42"))
    assert "echo sum-$((40 + 2))" in settings
    assert " echo " in settings and " icanon " in settings
    return screen


def test_it_follows_and_fits_and_q_leaves(training: Training, pane: Pane) -> None:
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
    check_that_all_is_as_before(pane)
    assert open_run(training.folder).ending.outcome == "running"


def test_ctrl_c_leaves(training: Training, pane: Pane) -> None:
    pane.start(*top("--interval", "30", training.folder))
    pane.wait_for_text("demo  running", "q quits")
    pane.keys("C-c")
    check_that_all_is_as_before(pane)


def test_sigterm_leaves_a_clean_terminal(training: Training, pane: Pane) -> None:
    pane.start(*top(training.folder))
    pane.wait_for_text("q quits")
    os.kill(pane.pid_of_top(), signal.SIGTERM)
    check_that_all_is_as_before(pane, 128 + signal.SIGTERM)


def test_ctrl_z_gives_the_terminal_back_for_a_while(training: Training, pane: Pane) -> None:
    pane.start("bash", "--norc", "--noprofile", "-i")
    pane.keys(shlex.join(top(training.folder)), "Enter")
    pane.wait_for_text("q quits")
    pane.keys("C-z")
    screen = pane.wait_for_text("before", "Stopped")
    assert not any("q quits" in line for line in screen)
    pane.keys("fg", "Enter")
    pane.wait_for(lambda screen: fills(screen, 80, 24))
    pane.keys("q")
    pane.wait_for_text("Stopped")


def test_a_run_that_ends_meanwhile(own_training: Training, pane: Pane) -> None:
    pane.start(*top(own_training.folder))
    pane.wait_for_text("demo  running", "q quits")
    own_training.stop()
    pane.wait_for_text("code-0")
    screen = "\n".join(check_that_all_is_as_before(pane))
    assert "demo has ended: ok, the command ended normally (after " in screen
    assert "Report    " in screen


def test_a_watcher_that_is_killed(own_training: Training, pane: Pane) -> None:
    pane.start(*top(own_training.folder))
    pane.wait_for_text("demo  running", "q quits")
    own_training.watcher.kill()
    screen = "\n".join(check_that_all_is_as_before(pane))
    assert "demo has ended: lost, the watcher was killed" in screen


def test_a_run_that_has_ended_is_printed_once(own_training: Training, pane: Pane) -> None:
    own_training.stop()
    pane.start(*top(own_training.folder), height=40)
    screen = "\n".join(check_that_all_is_as_before(pane))
    assert "demo  ok  0:0" in screen
    assert "of 20 batches" in screen
    assert "demo has ended: ok" in screen
    report = open_run(own_training.folder).paths.report_html.name
    assert report in screen.replace("\n", "")


def test_without_a_terminal_it_is_plain_text(training: Training) -> None:
    done = subprocess.run(top(training.folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("demo  running  0:0")
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "has ended" not in done.stdout


@pytest.mark.parametrize("how", ["--once", "dumb"])
def test_one_plain_frame_in_a_terminal(training: Training, pane: Pane, how: str) -> None:
    if how == "dumb":
        pane.start(*top(training.folder), height=40, TERM="dumb")
    else:
        pane.start(*top("--once", training.folder), height=40)
    screen = pane.wait_for_text("before", "demo  running", "CPU", "code-0")
    assert not any("q quits" in line for line in screen)


def test_one_frame_for_programs(training: Training) -> None:
    done = subprocess.run(top("--json", training.folder), capture_output=True, text=True)
    told = json.loads(done.stdout)
    assert (told["name"], told["outcome"]) == ("demo", "running")
    assert told["epoch"]["of"] == 20
    assert told["steps"] > 0


def test_without_a_run_the_newest_that_is_running_is_shown(own_training: Training) -> None:
    runs = own_training.folder.parent
    later = start_training(runs.parent, "later")
    later.stop()
    assert latest_run(runs) == later.folder
    variables = {**os.environ, "STEPSCOPE_RUNS": str(runs)}
    done = subprocess.run(top("--json"), capture_output=True, text=True, env=variables)
    assert json.loads(done.stdout)["name"] == "demo"


def test_no_run(tmp_path: Path) -> None:
    for argument in (tmp_path, tmp_path / "none"):
        done = subprocess.run(top(argument), capture_output=True, text=True)
        assert done.returncode == 3
        assert done.stderr.startswith("stepscope: ") and done.stderr.count("\n") == 1
        assert done.stdout == ""
