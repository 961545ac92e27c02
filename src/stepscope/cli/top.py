"""`stepscope top [RUN]`: a run as it goes on, read from its folder, in any terminal."""

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

_DUMB = ("", "dumb", "unknown")
_LEAVE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
_READ_BYTES = 1024


def top(
    run: Annotated[
        Path | None,
        typer.Argument(help="A run folder; without it, the latest one that is running."),
    ] = None,
    interval: Annotated[
        float, typer.Option(help="Seconds between frames.", metavar="S", min=0.1, max=60)
    ] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one frame as plain text.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one frame as JSON.")] = False,
) -> None:
    """Show a run while it goes on: epoch, samples per second, CPU, memory, disk, network, GPUs.

    It only reads the run folder, so it can be started and left at any time, in any terminal: q or
    Ctrl-C leaves. When the run ends, it says how. Where the output is no terminal, and for a run
    that has ended, it prints one frame.
    """
    from stepscope.report.live.follow import Follower
    from stepscope.report.live.view import frame_dict
    from stepscope.runs.reader import open_run

    with contextlib.suppress(KeyboardInterrupt):
        follower = Follower(open_run(run if run is not None else _latest(runs_folder())).path)
        frame = follower.frame(wait=True)
        on_screen = sys.stdout.isatty() and os.environ.get("TERM", "") not in _DUMB
        if as_json:
            write_json(frame_dict(frame))
        elif once or not on_screen or frame.ending.outcome is not Outcome.RUNNING:
            _print_plain(follower, frame)
        else:
            left_by = _show(follower, interval)
            if left_by is not None and left_by != signal.SIGINT:
                raise typer.Exit(128 + left_by)


def _latest(runs: Path) -> Path:
    """The newest run that is running, else the newest. Only runs that are not packed may be."""
    from stepscope.runs.reader import latest_run, open_run

    running: dict[Path, int] = {}
    for stream in runs.glob("*/process.arrows"):
        with contextlib.suppress(RunFolderError):
            found = open_run(stream.parent)
            if found.ending.outcome is Outcome.RUNNING:
                running[found.path] = found.begin_ns
    return max(running, key=running.__getitem__) if running else latest_run(runs)


def _print_plain(follower: Follower, frame: Frame) -> None:
    from stepscope.report.live.screen import plain_text

    encoding = (sys.stdout.encoding or "ascii").lower()
    width = shutil.get_terminal_size((80, 24)).columns
    text = plain_text(frame, width, ascii_only=not encoding.startswith("utf"))
    if frame.ending.outcome is not Outcome.RUNNING:
        text += f"\n{_last_words(follower, frame)}"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _last_words(follower: Follower, frame: Frame) -> str:
    from stepscope.report.live.screen import ending_text

    paths = follower.tail.paths
    if paths.report_html.exists():
        return ending_text(frame, str(near(paths.report_html)))
    return ending_text(frame, f"stepscope report {near(paths.folder)}")


def _show(follower: Follower, interval: float) -> int | None:
    """Follow a run on the whole screen; the signal that ended it, None if the run itself did."""
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
        # Signals wait: nothing interrupts the drawing of a frame.
        awaited = signals_as_bytes((*_LEAVE, signal.SIGWINCH))
        with awaited as signals, _single_keys() as keyboard, live:
            left_by = _draw_frames(follower, interval, live, signals, keyboard)
            console.clear()  # what a terminal that grew would otherwise keep of it
        if left_by != signal.SIGTSTP:
            break
        os.kill(os.getpid(), signal.SIGSTOP)  # with the terminal as it was; then go on
    if left_by is None:
        sys.stdout.write(_last_words(follower, follower.frame()))
    return left_by


@contextlib.contextmanager
def _single_keys() -> Iterator[int | None]:
    """The keyboard, whose keys come one by one meanwhile; None where there is none."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield None
        return
    keyboard = sys.stdin.fileno()
    modes = termios.tcgetattr(keyboard)
    tty.setcbreak(keyboard, termios.TCSADRAIN)
    try:
        yield keyboard
    finally:
        with contextlib.suppress(termios.error):  # the terminal may be gone
            termios.tcsetattr(keyboard, termios.TCSADRAIN, modes)


def _draw_frames(
    follower: Follower, interval: float, live: Live, signals: int, keyboard: int | None
) -> int | None:
    from stepscope.report.live.screen import LiveScreen

    def draw() -> None:
        # COLUMNS and LINES, which rich would believe, do not follow the window.
        columns, lines = os.get_terminal_size(sys.stdout.fileno())
        live.console.size = columns or 80, lines or 24
        live.update(LiveScreen(frame), refresh=True)

    while True:
        frame = follower.frame()
        if frame.ending.outcome is not Outcome.RUNNING:
            return None
        draw()
        due = time.monotonic() + interval
        while (left := due - time.monotonic()) > 0:
            sources = [signals] if keyboard is None else [signals, keyboard]
            ready, _, _ = select.select(sources, [], [], left)
            if keyboard in ready:
                typed = b""
                with contextlib.suppress(OSError):
                    typed = os.read(keyboard, _READ_BYTES)
                if b"q" in typed.lower():
                    return signal.SIGINT
                keyboard = keyboard if typed else None  # nobody will type any more
            came = os.read(signals, _READ_BYTES) if signals in ready else b""
            for number in _LEAVE:
                if number in came:
                    return number
            if signal.SIGWINCH in came:
                draw()
