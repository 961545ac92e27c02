"""Intact folders to damage: recorded runs, a recorded trial and study, and variants of them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from planted import RECORDED, unpack
from stepscope.metrics import SCOPES
from stepscope.opened_run import open_run
from stepscope.records import Entity
from stepscope.runs.paths import RunPaths
from stepscope.runs.streams import StreamWriter, pack
from stepscope.studies.merge import merge_studies

DATA = Path(__file__).parents[1] / "data"
KINDS = ("run", "trial", "study")


def make_folders(into: Path) -> None:
    """Write all folders: `into/<kind>/<name>`."""
    runs, trials, studies = (into / kind for kind in KINDS)
    unpack(RECORDED / "cpu_one_worker.tar.xz", runs)
    gpu = unpack(RECORDED / "gpu_retries.tar.xz", runs)
    _write_killed(gpu, runs / "killed")
    shutil.copytree(DATA / "runs" / "format1", runs / "format1")
    unpack(DATA / "folders" / "two_ranks.tar.xz", trials)
    study = unpack(DATA / "folders" / "study.tar.xz", studies)
    facts = sorted(study.rglob("run.json"))
    out_of_memory = next(path.parent for path in facts if "gpu_oom" in path.read_text())
    shutil.copytree(out_of_memory, trials / "gpu_oom")
    unlisted = shutil.copytree(study, studies / "unlisted")
    shutil.rmtree(unlisted / "ledger")  # each run folder is read
    _write_merged(study, studies / "merged")
    for folder in (path for kind in KINDS for path in (into / kind).iterdir()):
        (folder / "derived").mkdir(exist_ok=True)
        for name in ("report.html", "summary.json", "findings.json"):
            (folder / "derived" / name).write_text("{}")


def _write_killed(recorded: Path, folder: Path) -> None:
    """Write a run again as if its monitor had been killed: one segment is packed, the others are
    streams."""
    run, paths = open_run(recorded), RunPaths(folder)
    shutil.copytree(recorded / "events", paths.events)
    running = {"outcome": "running", "reason": ""}
    paths.run_json.write_text(json.dumps({**run.json, "exit_status": running}))
    for scope in SCOPES:
        writer, closed = StreamWriter(paths, scope), []
        rows = run.samples(scope).to_pylist()
        for number, row in enumerate(rows, 1):
            t_ns, window_s, entity, pid = (row.pop(key) for key in tuple(row)[:4])
            writer.append(t_ns, window_s, Entity(entity, pid), row)
            if number % (len(rows) // 15) == 0:
                writer.flush()
            if number % (len(rows) // 3) == 0:
                closed.append(writer.roll(at_least=1))
        writer.close()
        pack(closed[0])
    for path in folder.rglob("*"):
        os.utime(path, (0, 0))  # written long ago


def _write_merged(study: Path, folder: Path) -> None:
    other = shutil.copytree(study, folder.with_name("other"))
    facts = json.loads((other / "study.json").read_text())
    (other / "study.json").write_text(json.dumps({**facts, "machine": "64 × Fast", "host": "far"}))
    merge_studies([study, other], folder)
    shutil.rmtree(other)
    merged = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps({**merged, "started": facts["started"]}))
