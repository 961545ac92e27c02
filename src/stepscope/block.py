"""`with stepscope.watch("name"):` monitors this process and its children from a side process.

Run as a module, this is the side process.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepscope.capture.request import RunRequest
from stepscope.capture.watch import monitor_block, monitor_parent
from stepscope.runs.paths import DEFAULT_FOLDER

if TYPE_CHECKING:
    from stepscope.opened_run import OpenedRun
    from stepscope.records import Summary


@dataclass(frozen=True)
class WatchedBlock:
    """The run that a watched block leaves. Complete once the block has ended."""

    path: Path

    def run(self) -> OpenedRun:
        from stepscope.opened_run import open_run

        return open_run(self.path)

    def summary(self) -> Summary:
        return self.run().summary()


@contextmanager
def watch(
    name: str = "watch",
    *,
    interval: float = 0.1,
    out: str | Path = DEFAULT_FOLDER,
    hook: bool = True,
) -> Iterator[WatchedBlock]:
    """Watch this process, and all that it starts, until the block ends.

    Sampling happens in a side process; epochs and steps of PyTorch and Keras are seen as under
    `stepscope run` (`hook=False` to leave the frameworks alone). The run, with its report, is in
    the `path` of what the block gets.
    """
    request = RunRequest(name, sys.argv, interval, Path(out), hook=hook)
    with monitor_block(request, __name__) as folder:
        yield WatchedBlock(folder)


def main() -> None:
    """Sample the process that started us until its block ends, then make the report."""

    def tell(text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"stepscope: {text}\n")
            sys.stderr.flush()

    folder = monitor_parent(int(sys.argv[1]), sys.argv[2], tell)
    from stepscope.report.run.derive import derive
    from stepscope.runs.reader import open_run

    with contextlib.suppress(OSError):
        derive(open_run(folder))


if __name__ == "__main__":
    main()
