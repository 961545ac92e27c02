"""The side process of `stepscope.watch`: samples its parent until told that the block is over.

Started with a JSON object; told through its standard input, answers on its standard output.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from stepscope.capture.attach import watch_process
from stepscope.capture.session import Plan
from stepscope.cli.run import say
from stepscope.report.derive import derive
from stepscope.runs.paths import RunPaths
from stepscope.runs.reader import open_run


def main() -> None:
    spec = json.loads(sys.argv[1])
    folder, pid = Path(spec["folder"]), int(spec["pid"])
    command = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).rstrip("\0").split("\0")
    plan = Plan(spec["name"], command, float(spec["interval"]), folder.parent, hook=spec["hook"])
    watch_process(plan, RunPaths(folder), pid, control=0, ready=os.dup(1), tell=say)
    with contextlib.suppress(OSError):
        derive(open_run(folder))


if __name__ == "__main__":
    main()
