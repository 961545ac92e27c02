"""`with stepscope.watch("name"):` monitors this process and its children from a separate process.

Run as a module, this file is the monitor process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.capture.block import monitor_block, monitor_parent
from stepscope.capture.request import RunRequest
from stepscope.runs.paths import DEFAULT_FOLDER

if TYPE_CHECKING:
    from stepscope.opened_run import OpenedRun
    from stepscope.records import Summary


@dataclass(frozen=True)
class MonitoredBlock:
    """The run of a monitored block. It is complete after the block."""

    path: Path
    """The run folder. The report is `derived/report.html` in it."""

    def run(self) -> OpenedRun:
        """Open the run, as `stepscope.open_run` does."""
        from stepscope.opened_run import open_run

        return open_run(self.path)

    def summary(self) -> Summary:
        """Return what the run consumed."""
        return self.run().summary()


@contextmanager
def watch(
    name: str = "watch",
    *,
    interval: float = 0.1,
    out: str | Path = DEFAULT_FOLDER,
    hook: bool = True,
) -> Iterator[MonitoredBlock]:
    """Monitor this process, and every process that it starts, during a `with` block.

    A separate process takes the samples. Epochs and steps of PyTorch and Keras are tracked as in
    `stepscope run`; `hook=False` disables this. When the block ends, the run folder and its report
    are written.

    Args:
        name: Name of the run.
        interval: Seconds between samples, from 0.02 to 60.
        out: Parent folder of the run folder.
        hook: Whether to track epochs and steps with the import hook.

    Yields:
        An object with the run folder in `.path`. After the block, `.run()` opens the run and
        `.summary()` returns its summary.

    Raises:
        MonitorError: Monitoring could not start, or another `stepscope.watch` block is active in
            this process.
    """
    request = RunRequest(name, sys.argv, interval, Path(out), hook=hook)
    with monitor_block(request, __name__) as folder:
        yield MonitoredBlock(folder)


def main() -> None:
    """Sample the parent process until its block ends, then write the report."""

    def notify(text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"stepscope: {text}\n")
            sys.stderr.flush()

    folder = monitor_parent(int(sys.argv[1]), sys.argv[2], notify)
    from stepscope.report.run.derive import derive
    from stepscope.runs.reader import open_run

    with contextlib.suppress(OSError):
        derive(open_run(folder))


if __name__ == "__main__":
    main()
