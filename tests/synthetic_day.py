"""A day of training at ten samples a second, as a run that ended and as one that was killed."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from stepscope.metrics import SCOPES
from stepscope.runs.paths import RunPaths, write_json
from stepscope.runs.streams import pack
from synthetic import OK, RUNNING, Plan, facts_of, write_run, write_workers

DAY = Plan(seconds=86400.0, epochs=90, batches=9600)


def write_day(folder: Path, plan: Plan = DAY) -> None:
    """`folder/killed`, whose last samples were never packed, and the same as `folder/ended`."""
    folder.mkdir(parents=True, exist_ok=True)
    killed = write_run(folder / "killed", replace(plan, ending=RUNNING))
    write_workers(killed, plan)
    paths = RunPaths(shutil.copytree(killed.folder, folder / "ended"))
    write_json(paths.run_json, facts_of(replace(plan, ending=OK)))
    for scope in SCOPES:
        closed = paths.closed_stream(scope, len(paths.segments(scope)) - 1)
        pack(paths.live_stream(scope).rename(closed))


if __name__ == "__main__":  # a process of its own: what it takes, its children would begin with
    write_day(Path(sys.argv[1]), replace(DAY, gpus=int(sys.argv[2])))
