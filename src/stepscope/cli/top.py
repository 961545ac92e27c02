"""`stepscope top [RUN]`: live view of a run, read from its folder."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.cli.console import near, runs_folder, write_json
from stepscope.errors import RunFolderError
from stepscope.records import Outcome

if TYPE_CHECKING:
    from rich.live import Live

    from stepscope.report.live.follow import Follower
    from stepscope.report.live.view import Frame

_DUMB_TERMINALS = ("", "dumb", "unknown")
_QUIT_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
_READ_BYTES = 1024


def top(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="Run folder (default: the latest run, preferring one that is still running)"
        ),
    ] = None,
    interval: Annotated[
        float, typer.Option(help="Seconds between frames", metavar="S", min=0.1, max=60)
    ] = 0.5,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame as plain text and exit")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one frame as JSON and exit")
    ] = False,
) -> None:
    """Show a live view of a run: epoch, throughput, CPU, memory, disk, network and GPUs.

    The live view only reads the run folder, so you can start and quit it at any time. Press q or
    Ctrl-C to quit. When the run ends, its outcome is printed. If the output is not a terminal or
    the run has already ended, one frame is printed.
    """
    from stepscope.report.live.follow import Follower
    from stepscope.report.live.view import frame_dict
    from stepscope.runs.reader import open_run

    with contextlib.suppress(KeyboardInterrupt):
        follower = Follower(open_run(run if run is not None else _latest(runs_folder())).path)
        frame = follower.frame(wait=True)
        on_screen = sys.stdout.isatty() and os.environ.get("TERM", "") not in _DUMB_TERMINALS
        if as_json:
            write_json(frame_dict(frame))
        elif once or not on_screen or frame.exit_status.outcome is not Outcome.RUNNING:
            _print_plain(follower, frame)
        else:
            quit_by = _show(follower, interval)
            if quit_by is not None and quit_by != signal.SIGINT:
                raise typer.Exit(128 + quit_by)


def _latest(runs: Path) -> Path:
    """Return the latest run that is still running, else the latest run.

    A run with packed samples is not running, so only folders with a live stream are opened.
    """
    from stepscope.runs.reader import latest_run, open_run, runs_in

    running: dict[Path, int] = {}
    for folder in runs_in(runs):
        if not os.path.exists(folder / "process.arrows"):
            continue
        with contextlib.suppress(RunFolderError):
            run = open_run(folder)
            if run.exit_status.outcome is Outcome.RUNNING:
                running[run.path] = run.begin_ns
    return max(running, key=running.__getitem__) if running else latest_run(runs)


def _print_plain(follower: Follower, frame: Frame) -> None:
    from stepscope.report.live.screen import plain_text

    encoding = (sys.stdout.encoding or "ascii").lower()
    width = shutil.get_terminal_size((80, 24)).columns
    text = plain_text(frame, width, ascii_only=not encoding.startswith("utf"))
    if frame.exit_status.outcome is not Outcome.RUNNING:
        text += f"\n{_ending(follower, frame)}"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _ending(follower: Follower, frame: Frame) -> str:
    from stepscope.report.live.screen import ending_text

    paths = follower.tail.paths
    if os.path.exists(paths.report_html):
        return ending_text(frame, paths.report_html.absolute().as_uri())
    return ending_text(frame, f"stepscope report {near(paths.folder)}")


def _show(follower: Follower, interval: float) -> int | None:
    """Follow a run on the whole screen. Return the signal that quit it; None if the run ended."""
    from rich.console import Console
    from rich.live import Live

    from stepscope.capture.signals import signals_as_bytes

    console = Console()
    live = Live(
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    while True:
        # Signals are queued, so they do not interrupt the drawing of a frame.
        queue = signals_as_bytes((*_QUIT_SIGNALS, signal.SIGWINCH))
        with queue as signals, _single_keys() as keyboard, live:
            quit_by = _draw_frames(follower, interval, live, signals, keyboard)
            console.clear()  # else a terminal that was enlarged keeps parts of the frame
        if quit_by != signal.SIGTSTP:
            break
        os.kill(os.getpid(), signal.SIGSTOP)  # with the terminal restored; SIGCONT continues here
    if quit_by is None:
        sys.stdout.write(_ending(follower, follower.frame()))
    return quit_by


@contextlib.contextmanager
def _single_keys() -> Iterator[int | None]:
    """Yield the keyboard in unbuffered mode; None if standard input is not a terminal."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield None
        return
    keyboard = sys.stdin.fileno()
    modes = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard, termios.TCSADRAIN)
    try:
        yield keyboard
    finally:
        with contextlib.suppress(termios.error):  # the terminal may be closed
            termios.tcsetattr(keyboard, termios.TCSADRAIN, modes)


def _draw_frames(
    follower: Follower, interval: float, live: Live, signals: int, keyboard: int | None
) -> int | None:
    from stepscope.report.live.screen import LiveScreen

    def draw() -> None:
        # Rich prefers COLUMNS and LINES, which do not follow the window size.
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        live.console.size = columns or 80, lines or 24
        live.update(LiveScreen(frame), refresh=True)

    while True:
        frame = follower.frame()
        if frame.exit_status.outcome is not Outcome.RUNNING:
            return None
        draw()
        due = time.monotonic() + interval
        while (remaining := due - time.monotonic()) > 0:
            sources = [signals] if keyboard is None else [signals, keyboard]
            ready, _, _ = select.select(sources, [], [], remaining)
            if keyboard in ready:
                typed = b""
                with contextlib.suppress(OSError):
                    typed = os.read(keyboard, _READ_BYTES)
                if b"q" in typed.lower():
                    return signal.SIGINT
                keyboard = keyboard if typed else None  # end of input
            received = os.read(signals, _READ_BYTES) if signals in ready else b""
            for number in _QUIT_SIGNALS:
                if number in received:
                    return number
            if signal.SIGWINCH in received:
                draw()
