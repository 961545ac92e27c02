"""If the runner dies, its trials die too: a tiny process sees to it.

It sits in a session of its own and waits for the runner's end, which a pipe and the kernel tell it.
Unless the runner has said goodbye, it then ends every process whose token names that runner, and
removes their control groups. It is started without site packages and imports only this file and
`kin`, so that it is there within milliseconds and nobody has to wait for it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from typing import TYPE_CHECKING

from stepscope.trials import kin

if TYPE_CHECKING:
    import subprocess

_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from stepscope.trials.guard import stand; stand(sys.argv[2])"
)
_GOODBYE = b"goodbye"
_PATIENCE_S = 0.5
"""Between asking and killing: nobody is interested in the results any more."""
_LEAVES_S = 6.0
_LOOKS_EVERY_MS = 1000
_DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""What schedulers send to everybody; the guard is needed until the runner has gone."""


class Guard:
    """The runner's side: a process that is told what there will be to clean up."""

    def __init__(self, process: subprocess.Popen[bytes], control: int) -> None:
        self._process = process
        self._control = control

    @classmethod
    def start(cls, runner: str) -> Guard:
        """Start it for all trials of a runner, `kin.runner_name()`. Does not wait for it."""
        import subprocess

        source, control = os.pipe()
        packages = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, packages, runner],
                stdin=source,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
                env={k: v for k, v in os.environ.items() if k != kin.VARIABLE},
            )
        except OSError:
            os.close(control)
            raise
        finally:
            os.close(source)
        return cls(process, control)

    @property
    def pid(self) -> int:
        return self._process.pid

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
            self._process.wait(_LEAVES_S)
        except Exception:  # one that hangs has nothing left to guard
            self._process.kill()
            self._process.wait()

    def _tell(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # somebody killed it: the trial goes on without
            os.write(self._control, line + b"\n")


def stand(runner: str) -> None:
    """The guard's side: wait for the end of the runner, and clean up after it."""
    for number in _DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    told = _listen(runner)
    if _GOODBYE in told:
        return
    groups = [os.fsdecode(path) for path in told]
    inside = [member for group in groups for member in kin.members(group)]
    kin.end_all(runner, inside, _PATIENCE_S)
    for group in groups:
        kin.remove_group(group)


def _listen(runner: str) -> list[bytes]:
    """The lines that were told until the runner was done, or gone."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    sees_end = _watch_runner(runner, poll)
    told = b""
    while True:
        ready = poll.poll(None if sees_end else _LOOKS_EVERY_MS)
        if any(descriptor == 0 for descriptor, _ in ready):
            heard = os.read(0, 65536)
            told += heard
            if not heard or told.endswith(_GOODBYE + b"\n"):
                break
        elif not kin.runner_lives(runner):
            break
    return told.splitlines()


def _watch_runner(runner: str, poll: select.poll) -> bool:
    """Be woken when it dies: the pipe alone does not tell while somebody else holds its end."""
    try:
        poll.register(os.pidfd_open(int(runner.partition(".")[0])), select.POLLIN)
    except (OSError, AttributeError):
        return False
    return bool(kin.runner_lives(runner))
