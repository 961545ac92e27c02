"""If the runner dies, its trials die too: a tiny process sees to it.

It sits in a session of its own and waits for the runner's end, which a pipe and the kernel tell it.
Unless the runner dismissed it, it then ends every process whose token names that runner, and
removes their control groups. It is started without site packages and imports only this file,
`trial_processes` and `procfs`, so that it is there within milliseconds and nobody waits for it.
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
    f"from {__name__} import stand_guard; stand_guard(sys.argv[2])"
)
_GOODBYE = b"goodbye"
_PATIENCE_S = 0.5
"""Between asking and killing: nobody is interested in the results any more."""
_LEAVES_S = 6.0
_POLL_MS = 1000
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Schedulers send them to everybody; the guard is needed until the runner has gone."""


class Guard:
    """The runner's side: a process that is told what there will be to clean up."""

    def __init__(self, runner: str) -> None:
        """Start it for all trials of a runner. Does not wait for it."""
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

    def tell_group(self, path: str | os.PathLike[str]) -> None:
        """A control group that must not outlive the runner."""
        self._tell(os.fsencode(path))

    def dismiss(self) -> None:
        """The runner has cleaned up itself."""
        self._tell(_GOODBYE)
        self.leave()

    def leave(self) -> None:
        """Whatever is left of the trials, the guard cleans up now."""
        os.close(self._control)
        try:
            self.process.wait(_LEAVES_S)
        except Exception:  # one that hangs has nothing left to guard
            self.process.kill()
            self.process.wait()

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # somebody killed it: the trial goes on without
            os.write(self._control, line + b"\n")


def stand_guard(runner: str) -> None:
    """The guard's side: wait for the end of the runner, and clean up after it."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    poll = select.poll()
    poll.register(0, select.POLLIN)
    sees_end = False
    # The pipe alone does not tell the runner's end while somebody else holds it.
    with contextlib.suppress(OSError, AttributeError):
        poll.register(os.pidfd_open(int(runner.partition(".")[0])), select.POLLIN)
        sees_end = bool(trial_processes.runner_lives(runner))
    received = b""
    while True:
        ready = poll.poll(None if sees_end else _POLL_MS)
        if any(descriptor == 0 for descriptor, _ in ready):
            data = os.read(0, 65536)
            received += data
            if received.endswith(_GOODBYE + b"\n"):
                return
            if not data:
                break
        elif not trial_processes.runner_lives(runner):
            break
    groups = [os.fsdecode(path) for path in received.splitlines()]
    inside = [member for group in groups for member in trial_processes.members(group)]
    trial_processes.end_all(runner, inside, _PATIENCE_S)
    for group in groups:
        trial_processes.remove_group(group)
