"""Captures a command's output for a pattern, without standing between it and its terminal.

The command writes into a pseudo-terminal where it wrote into a terminal, so that colours and
progress bars stay, and into a pipe otherwise. A pump, a process of its own that outlives a killed
watcher, passes everything on.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import termios
from dataclasses import dataclass, field
from pathlib import Path

import stepscope.inject
from stepscope.runs.paths import RunPaths

_DRAIN_S = 2.0


@dataclass
class Output:
    """The command's side of its captured output, and the pump that reads the other."""

    for_command: dict[int, int] = field(default_factory=dict)
    """Descriptor of the command (1, 2) to the one it gets."""
    pump: subprocess.Popen[bytes] | None = None

    def command_started(self) -> None:
        """Only the command holds its ends now: the pump ends when the last writer does."""
        for descriptor in set(self.for_command.values()):
            os.close(descriptor)

    def drain(self) -> bool:
        """Wait until all that the command printed was passed on. False if survivors still print."""
        if self.pump is None:
            return True
        try:
            self.pump.wait(_DRAIN_S)
        except subprocess.TimeoutExpired:
            return False
        return True


def capture_output(paths: RunPaths, pattern: str) -> Output:
    """Start a pump for the standard output and error of a command that is about to start."""
    for_command: dict[int, int] = {}
    arguments, sources = [], []
    for descriptor, log in ((1, paths.stdout_log), (2, paths.stderr_log)):
        source, end = _channel(descriptor)
        for_command[descriptor] = end
        sources.append(source)
        arguments.append(f"{source}:{descriptor}:{log}")
    program = Path(stepscope.inject.__file__).with_name("pump.py")
    pump = subprocess.Popen(
        [sys.executable, "-I", str(program), str(paths.events), pattern, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=sources,
    )
    for source in sources:
        os.close(source)
    return Output(for_command, pump)


def _channel(descriptor: int) -> tuple[int, int]:
    """(what the pump reads, what the command writes into)."""
    if not os.isatty(descriptor):
        return os.pipe()
    source, end = os.openpty()
    with contextlib.suppress(termios.error):
        settings = termios.tcgetattr(end)
        settings[1] &= ~termios.OPOST  # the real terminal translates line ends, not ours too
        termios.tcsetattr(end, termios.TCSANOW, settings)
    return source, end
