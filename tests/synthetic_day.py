"""A day of training at ten samples per second: a finished run and a killed one."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from stepscope.metrics import SCOPES
from stepscope.runs.files import write_json
from stepscope.runs.paths import RunPaths
from stepscope.runs.streams import pack
from synthetic import OK, RUNNING, Plan, facts_of, write_run, write_workers

DAY = Plan(seconds=86400.0, epochs=90, batches=9600)


def write_day(folder: Path, plan: Plan = DAY) -> None:
    """Write `folder/killed`, whose last samples are not packed, and the same as `folder/ended`."""
    folder.mkdir(parents=True, exist_ok=True)
    killed = write_run(folder / "killed", replace(plan, exit_status=RUNNING))
    write_workers(killed, plan)
    paths = RunPaths(shutil.copytree(killed.folder, folder / "ended"))
    write_json(paths.run_json, facts_of(replace(plan, exit_status=OK)))
    for scope in SCOPES:
        closed = paths.closed_stream(scope, len(paths.segments(scope)) - 1)
        pack(paths.live_stream(scope).rename(closed))


if __name__ == "__main__":  # in a separate process, to keep its memory out of the caller
    write_day(Path(sys.argv[1]), replace(DAY, gpus=int(sys.argv[2])))
