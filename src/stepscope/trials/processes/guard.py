"""The guard: a small process that ends the trials of a runner if the runner is killed.

It has its own session and waits for the exit of the runner through a pipe and a pidfd. Unless the
runner has dismissed it, it then ends every process whose token names that runner and removes their
cgroups. It runs without site-packages and imports only this module, `trial_processes` and
`procfs`, so that it starts within milliseconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

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
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Schedulers send them to all processes; the guard must run until the runner has exited."""


class Guard:
    """The guard process, as seen by the runner."""

    def __init__(self, runner: str) -> None:
        """Start the guard for all trials of a runner, without waiting for it."""
        import subprocess

        source, self._control = os.pipe()
        packages = os.path.dirname(os.path.dirname(os.path.abspath(stepscope.__file__)))
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, packages, runner],
                stdin=source,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env={k: v for k, v in os.environ.items() if k != trial_processes.VARIABLE},
            )
        except OSError:
            os.close(self._control)
            raise
        finally:
            os.close(source)

    def add_group(self, path: str | os.PathLike[str]) -> None:
        """Register a cgroup that must not outlive the runner."""
        self._send(os.fsencode(path))

    def dismiss(self) -> None:
        """End the guard after the runner has cleaned up."""
        self._send(_DISMISS)
        self.clean_up()

    def clean_up(self) -> None:
        """Let the guard clean up the remaining processes, unless dismissed, and wait for it."""
        os.close(self._control)
        try:
            self.process.wait(_EXIT_TIMEOUT_S)
        except Exception:  # a stuck guard is no longer needed
            self.process.kill()
            self.process.wait()

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # the guard was killed: the trial continues without it
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
    groups = [os.fsdecode(path) for path in received.splitlines()]
    inside = [member for group in groups for member in trial_processes.members(group)]
    trial_processes.end_all(runner, inside, _PATIENCE_S)
    for group in groups:
        trial_processes.remove_group(group)
