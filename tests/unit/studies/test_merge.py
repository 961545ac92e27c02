"""Merging the studies of several machines."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import RunFolderError, StepscopeError
from stepscope.report.study.read import read_view
from stepscope.studies.folder import StudyPaths, exclusive_run
from stepscope.studies.merge import merge_studies, parts_of
from stepscope.studies.results import MACHINE
from studies import design, planted_environment, study

DESIGN = "factors: {batch_size: [16, 64]}\nblocks: {reruns: 0, reference: none}\n"
LONG = "64 × Some Very Long Processor Name @ 2.50GHz"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merged")
    env = planted_environment(folder, formula="10 * batch_size")
    ended = study("run", design(folder, DESIGN), "--out", folder, env=env)
    assert ended.returncode == 0, ended.stderr
    return folder / "planted"


def of_machine(done: Path, folder: Path, **facts: Any) -> Path:
    """Copy a study as if another machine had run it."""
    shutil.copytree(done, folder)
    before = json.loads((folder / "study.json").read_text())
    (folder / "study.json").write_text(json.dumps({**before, **facts}))
    return folder


def test_the_machine_becomes_a_factor(done: Path, tmp_path: Path) -> None:
    a = of_machine(done, tmp_path / "a", machine="8 × Fast")
    b = of_machine(done, tmp_path / "b", machine="2 × Slow")
    out = tmp_path / "both"
    assert merge_studies([a, b], out) == {"8 × Fast": 2, "2 × Slow": 2}
    view = read_view(out)
    levels = {factor.name: factor.levels for factor in view.analysis.factors}
    assert levels == {MACHINE: ("8 × Fast", "2 × Slow"), "batch_size": (16, 64)}
    assert sorted((r.machine, r.settings["batch_size"]) for r in view.counted) == [
        ("2 × Slow", 16),
        ("2 × Slow", 64),
        ("8 × Fast", 16),
        ("8 × Fast", 64),
    ]
    assert (view.planned, view.remaining, view.running) == (4, 0, None)


def test_the_sources_are_unchanged(done: Path, tmp_path: Path) -> None:
    a = of_machine(done, tmp_path / "a", machine="8 × Fast")
    b = of_machine(done, tmp_path / "b", machine="2 × Slow")
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    merge_studies([a, b], tmp_path / "both")
    shutil.rmtree(tmp_path / "both")
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"machine": LONG, "host": "a"}, {"machine": LONG, "host": "b"}),
        ({"machine": f"{LONG}, 1 × GPU A"}, {"machine": f"{LONG}, 1 × GPU B"}),
        ({"machine": "2 × CPU (a)"}, {"machine": "2 × CPU -a-"}),
        ({"machine": "", "host": "a"}, {"machine": None, "host": "b"}),
    ],
)
def test_machines_with_similar_names_are_distinguished(
    done: Path, tmp_path: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    a, b = of_machine(done, tmp_path / "a", **first), of_machine(done, tmp_path / "b", **second)
    machines = merge_studies([a, b], tmp_path / "both")
    assert len(machines) == 2 and set(machines.values()) == {2}
    parts = list(parts_of(StudyPaths(tmp_path / "both")))
    assert [machine for machine, _ in parts] == list(machines)
    assert len({part.paths.folder for _, part in parts}) == 2


def test_two_studies_of_one_host_have_one_machine(done: Path, tmp_path: Path) -> None:
    a, b = (of_machine(done, tmp_path / n, machine=LONG, host="a") for n in ("a", "b"))
    assert merge_studies([a, b], tmp_path / "both") == {LONG: 4}


def test_errors_leave_no_files(done: Path, tmp_path: Path) -> None:
    a = of_machine(done, tmp_path / "a", machine="A")
    b = of_machine(done, tmp_path / "b", machine="B")
    other = of_machine(done, tmp_path / "other", machine="C")
    text = (other / "design.yaml").read_text()
    (other / "design.yaml").write_text(text.replace("batch_size", "prefetch"))
    (tmp_path / "there").mkdir()
    (tmp_path / "file").write_text("")
    merge_studies([a, b], tmp_path / "both")
    before = sorted(tmp_path.rglob("*"))
    cases = [
        ([a], "out", "at least two studies"),
        ([a, tmp_path / "b" / ".." / "a"], "out", "passed twice"),
        ([a, b], "there", "already exists"),
        ([a, b], "a/out", "is inside"),
        ([a, b], "b/deep/er/out", "is inside"),
        ([a, b], "file/out", "Cannot write the merged study"),
        ([a, tmp_path / "there"], "out", "is not a study"),
        ([a, tmp_path / "nowhere"], "out", "No such study folder"),
        ([a, tmp_path / "both"], "out", "is a merged study"),
        ([a, other], "out", "no factor in common"),
    ]
    for folders, out, expected in cases:
        with pytest.raises(StepscopeError, match=expected):
            merge_studies(folders, tmp_path / out)
        assert sorted(tmp_path.rglob("*")) == before, expected


def test_a_running_study_is_not_merged(done: Path, tmp_path: Path) -> None:
    a = of_machine(done, tmp_path / "a", machine="A")
    b = of_machine(done, tmp_path / "b", machine="B")
    with exclusive_run(StudyPaths(b)), pytest.raises(RunFolderError, match="is running"):
        merge_studies([a, b], tmp_path / "out")


def test_files_are_copied_if_hard_links_are_not_possible(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = of_machine(done, tmp_path / "a", machine="A")
    b = of_machine(done, tmp_path / "b", machine="B")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert merge_studies([a, b], tmp_path / "out") == {"A": 2, "B": 2}
