"""The guard: a small process that ends the trials of a runner if the runner is killed.

It has its own session and waits for the exit of the runner through a pipe and a pidfd. Unless the
runner has dismissed it, it then ends every process whose token names that runner, the processes
that the runner has registered, and everything in their cgroups. If the guard is killed, the runner
replaces it. It runs without site-packages and imports only this module, `trial_processes` and
`procfs`, so that it starts within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import ClassVar

import stepscope
from stepscope.trials.processes import trial_processes

_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    f"from {__name__} import run_guard; run_guard(sys.argv[2])"
)
_DISMISS = b"dismiss"
_PATIENCE_S = 0.5
"""Time between SIGTERM and SIGKILL; short, because the results are lost anyway."""
_EXIT_TIMEOUT_S = 6.0
_POLL_MS = 1000
_RESTART_S = 1.0
_KILLED = "the guard process, which stops the trial if stepscope is killed, was killed"
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Schedulers send them to all processes; the guard must run until the runner has exited."""


class Guard:
    """The guard process, as seen by the runner."""

    pids: ClassVar[set[int]] = set()
    """The guards of this process, which are its children like the trials."""

    def __init__(self, runner: str) -> None:
        """Start the guard for all trials of a runner, without waiting for it."""
        self._runner = runner
        self._control: int | None = None
        self._registered: list[bytes] = []
        self._restart_at = 0.0
        self._start()

    def _start(self) -> None:
        import subprocess

        source, control = os.pipe()
        packages = os.path.dirname(os.path.dirname(os.path.abspath(stepscope.__file__)))
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, packages, self._runner],
                stdin=source,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env={k: v for k, v in os.environ.items() if k != trial_processes.VARIABLE},
            )
        except OSError:
            os.close(control)
            raise
        finally:
            os.close(source)
        if self._control is not None:
            os.close(self._control)
        self._control = control
        self.pids.add(self.process.pid)

    def keep_running(self, notify: Callable[[str], None] = lambda text: None) -> None:
        """Replace the guard if it was killed, at most once a second. Tell the user the first time.

        It costs one system call while the guard is running.
        """
        if self.process.poll() is None or time.monotonic() < self._restart_at:
            return
        is_first = not self._restart_at
        self._restart_at = time.monotonic() + _RESTART_S
        self.pids.discard(self.process.pid)
        try:
            self._start()
        except OSError as error:  # out of processes: try again later
            if is_first:
                notify(f"{_KILLED} and cannot be restarted: {error.strerror}")
            return
        for line in self._registered:
            self._send(line)
        if is_first:
            notify(f"{_KILLED} and has been restarted")

    def add_group(self, path: str | os.PathLike[str]) -> None:
        """Register a cgroup that must not outlive the runner."""
        self._register(os.fsencode(path))

    def add_process(self, process: trial_processes.TrialProcess) -> None:
        """Register a process of a trial that the guard cannot find by its token."""
        self._register(f"{process.pid} {process.started}".encode())

    def dismiss(self) -> None:
        """End the guard after the runner has cleaned up."""
        self._send(_DISMISS)
        self.clean_up()

    def clean_up(self) -> None:
        """Let the guard clean up the remaining processes, unless dismissed, and wait for it."""
        assert self._control is not None
        os.close(self._control)
        try:
            self.process.wait(_EXIT_TIMEOUT_S)
        except Exception:  # a stuck guard is no longer needed
            self.process.kill()
            self.process.wait()
        self.pids.discard(self.process.pid)

    def _register(self, line: bytes) -> None:
        # Groups of earlier trials no longer exist.
        self._registered = [
            each for each in self._registered if each[:1] != b"/" or os.path.isdir(each)
        ]
        self._registered.append(line)
        self._send(line)

    def _send(self, line: bytes) -> None:
        assert self._control is not None
        with contextlib.suppress(OSError):  # the guard was killed: `keep_running` sends it again
            os.write(self._control, line + b"\n")


def run_guard(runner: str) -> None:
    """The main function of the guard: wait for the exit of the runner and clean up."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    has_pidfd = False
    # The pipe does not report the exit while another process holds its other end.
    with contextlib.suppress(OSError, AttributeError):
        poll.register(os.pidfd_open(int(runner.partition(".")[0])), select.POLLIN)
        has_pidfd = bool(trial_processes.runner_is_running(runner))
    received = b""
    while True:
        ready = poll.poll(None if has_pidfd else _POLL_MS)
        if any(descriptor == 0 for descriptor, _ in ready):
            data = os.read(0, 65536)
            received += data
            if received.endswith(_DISMISS + b"\n"):
                return
            if not data:
                break
        elif not trial_processes.runner_is_running(runner):
            break
    groups, known = [], []
    for line in received.splitlines():
        if line.startswith(b"/"):
            groups.append(os.fsdecode(line))
        elif process := trial_processes.identify_same(*map(int, line.split())):
            known.append(process)

    def inside() -> list[trial_processes.TrialProcess]:
        return [member for group in groups for member in trial_processes.members(group)]

    trial_processes.end_all(runner, known, _PATIENCE_S, inside)
    for group in groups:
        trial_processes.remove_group(group)
