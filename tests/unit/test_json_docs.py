"""docs/json.md describes every key of every JSON output."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from conftest import STEPSCOPE
from simulated_gpu import GiB, Net, SimulatedGpu
from stepscope.cli.app import app
from stepscope.fit.gpu_search import search_gpu
from stepscope.fit.memory_budget import loader_memory
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.result import MemoryBudget, OtherProcess
from stepscope.fit.search import build_result
from stepscope.records.profile import (
    PeakMemory,
    Profile,
    ProfiledCopies,
    ProfiledKernel,
    ProfiledOperator,
    ProfiledSums,
    RankProfile,
    TraceFile,
)
from stepscope.report.fit.json import fit_dict
from stepscope.report.study.export import study_dict
from stepscope.report.trial.json import trials_dict
from stepscope.report.trial.profile import profile_dict
from stepscope.report.trial.view import trial_view
from stepscope.workloads.spec import make_workload
from synthetic import Plan, write_run
from synthetic_studies import usual_study
from synthetic_trials import Trial, write_repeats

ROOT = Path(__file__).parents[2]

MAPPINGS = {
    *("totals", "missing", "estimated", "outcomes", "versions"),  # by metric, outcome, package
    *("settings", "workload", "limits", "fixed", "levels", "group", "values", "factors"),
    *("evidence", "failure_details", "leftovers", "data"),  # recorded as they are
    "memory",  # by device
}
"""Keys whose value has keys of its own: names of metrics, settings and so on."""


def printed(*arguments: str) -> Any:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def summary(folder: Path) -> Any:
    return printed("report", str(write_run(folder / "run", Plan(gpus=2)).folder), "--json")


def explanation(folder: Path) -> Any:
    return printed("explain", str(write_run(folder / "run", Plan(gpus=2)).folder), "--json")


def frame(folder: Path) -> Any:
    return printed("top", str(write_run(folder / "run", Plan(gpus=2)).folder), "--json")


def trials(folder: Path) -> Any:
    first, second = write_repeats(folder, Trial(), [1, 1.1])
    repeats = trials_dict([trial_view(first), trial_view(second)])
    return {**repeats, "profiles": [profile_dict(profile_of_a_rank())]}


def profile_of_a_rank() -> Profile:
    copies = {"to_device": ProfiledCopies(1, 2.0, 1.0)}
    rank = RankProfile(
        device="cuda:0",
        steps=2,
        step_us=(5.0, 5.0),
        operators=(ProfiledOperator("aten::mm", "operator", 1, 1.0, 1.0, 1.0, 1.0),),
        kernels=(ProfiledKernel("gemm", 1, 1.0),),
        sums=ProfiledSums(1.0),
        copies=copies,
        memory={"cuda:0": PeakMemory(1, 2)},
        missing="",
        trace=TraceFile("trace0.json.gz", 1, 2),
    )
    return Profile({0: rank}, {})


def fit(_: Path) -> Any:
    request = FitRequest(make_workload("cnn", {}), verify=True)
    other = (OtherProcess(3, "python"),)
    budget = MemoryBudget("gpu", 4 * GiB, 80 * GiB, 80 * GiB, 4 * GiB, 0, other)
    found = search_gpu(SimulatedGpu(Net()), budget, request, FitListener())
    return fit_dict(build_result(found, request, loader_memory(request.workload, 600_000, None)))


def plan(folder: Path) -> Any:
    design = ROOT / "examples" / "study" / "two_cores.yaml"
    return printed("study", "plan", str(design), "--out", str(folder), "--json")


def study(folder: Path) -> Any:
    return study_dict(usual_study(folder, gpu=True, running=True))


def checks(folder: Path) -> Any:
    command = [*STEPSCOPE, "doctor", "--quick", "--no-gpu", "--out", str(folder), "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def keys_of(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for each in value:
            yield from keys_of(each)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key not in MAPPINGS:
                yield from keys_of(inner)


@pytest.mark.parametrize(
    ("heading", "output"),
    [
        ("`run`, `watch` and `report`", summary),
        ("`explain`", explanation),
        ("`trial`", trials),
        ("`fit`", fit),
        ("`study plan`", plan),
        ("`study run`, `study show` and `study report`", study),
        ("`top`", frame),
        ("`doctor`", checks),
    ],
)
def test_every_key_is_described(heading: str, output: Any, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    section = page.split(f"## {heading}\n")[1].split("\n## ")[0]
    if heading == "`run`, `watch` and `report`":  # it has the diagnosis, too
        section += page.split("## `explain`\n")[1].split("\n## ")[0]
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`|(?<=each with ).*", section))))

    value = output(tmp_path)

    assert value["format"] == 1
    assert sorted(set(keys_of(value)) - words) == []
