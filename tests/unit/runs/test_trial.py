"""Reading the files of a trial, which may have been killed at any time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from stepscope.errors import RunFolderError
from stepscope.records.profile import ProfiledCopies
from stepscope.records.trial import CpuLimit, LimitFacts, ProcessNoise, RankFacts, TrialFacts
from stepscope.runs.reader import open_run
from stepscope.runs.trial import STEP, is_trial, read_profile, read_steps, read_trial
from stepscope.steplog import FIELDS, RECORD, Step, StepLog
from stepscope.workloads.spec import Workload
from synthetic import write_run
from synthetic_trials import Trial, even_steps, write_trial

STEPS = st.lists(st.tuples(*[st.integers(-1, 2**40)] * 4), max_size=30)


@pytest.fixture
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trial") / "steps0.bin"


def write(path: Path, parts: list[tuple[int, ...]]) -> list[Step]:
    path.unlink(missing_ok=True)
    steps = [Step(1000 * n + 1000, n, *part) for n, part in enumerate(parts)]
    log = StepLog(path)
    for step in steps:
        log.add(step)
    log.close()
    return steps


@settings(max_examples=50)
@given(parts=STEPS, cut=st.integers(0, 2 * RECORD.size), zeros=st.integers(0, 3 * RECORD.size))
def test_steps_round_trip(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[int, ...]], cut: int, zeros: int
) -> None:
    """With any truncation, and with any number of zeros after a power failure."""
    path = tmp_path_factory.getbasetemp() / "steps.bin"
    steps = write(path, parts)
    whole = max(0, len(steps) * RECORD.size - cut) // RECORD.size * RECORD.size
    path.write_bytes(path.read_bytes()[:whole] + bytes(zeros))
    read = read_steps(path)
    assert read.dtype == STEP and STEP.names == FIELDS
    assert [Step(*each.tolist()) for each in read] == steps[: whole // RECORD.size]


def test_truncated_record_is_dropped(path: Path) -> None:
    steps = write(path, [(1, 2, 3, 4)] * 5)
    path.write_bytes(path.read_bytes()[:-7])
    assert len(read_steps(path)) == len(steps) - 1


@pytest.mark.parametrize("bad", [Step(1500, 9, 0), Step(0, 9, 0), Step(-5, 9, 0), Step(9000, 1, 0)])
def test_invalid_record_and_later_records_are_dropped(path: Path, bad: Step) -> None:
    write(path, [(0, 0, 0, 0)] * 3)
    path.write_bytes(path.read_bytes() + RECORD.pack(*bad) + RECORD.pack(*Step(9999, 99, 0)))
    assert read_steps(path)["step"].tolist() == [0, 1, 2]


def test_missing_file_has_no_steps(tmp_path: Path) -> None:
    assert len(read_steps(tmp_path / "nothing.bin")) == 0


def test_complete_trial(tmp_path: Path) -> None:
    trial = Trial(Workload("cnn", ranks=2), even_steps(20), limits={"cpus": {"requested": 2}})
    record = read_trial(open_run(write_trial(tmp_path / "run", trial).folder))
    assert record.workload["model"] == "cnn" and record.limits == LimitFacts(CpuLimit(2))
    assert [rank.rank for rank in record.ranks] == [0, 1]
    assert [rank.facts.pid for rank in record.ranks] == [4100, 4101]
    assert [len(rank.steps) for rank in record.ranks] == [21, 21]
    assert record.noise == ProcessNoise(0.08, 4, "assumed")


def test_damaged_and_missing_files_are_ignored(tmp_path: Path) -> None:
    paths = write_trial(tmp_path / "run", Trial(Workload("cnn", ranks=3), even_steps(20)))
    paths.trial_rank(0).write_text('{"rank": 0, "pi')
    paths.trial_rank(1).write_text("[1, 2]")
    paths.trial_steps(1).write_bytes(b"trunc")
    paths.trial_rank(2).unlink()
    paths.trial_steps(2).unlink()
    record = read_trial(open_run(paths.folder))
    assert [rank.facts for rank in record.ranks] == [RankFacts()] * 3
    assert [len(rank.steps) for rank in record.ranks] == [21, 0, 0]
    assert record.first == RankFacts()


def test_trial_that_was_killed_before_its_folder_was_created(tmp_path: Path) -> None:
    paths = write_trial(tmp_path / "run")
    for file in paths.trial.iterdir():
        file.unlink()
    paths.trial.rmdir()
    facts = json.loads(paths.run_json.read_text())
    del facts["limits"], facts["trial"]
    paths.run_json.write_text(json.dumps(facts))
    record = read_trial(open_run(paths.folder))
    assert len(record.ranks) == 1 and not len(record.ranks[0].steps)
    assert record.trial == TrialFacts() and record.noise is None


@pytest.mark.parametrize("noise", [None, {}, "x", {"cv": None}, {"cv": -1, "dof": 3}, {"cv": 0.1}])
def test_invalid_noise_is_ignored(tmp_path: Path, noise: dict[str, float] | None) -> None:
    paths = write_trial(tmp_path / "run", Trial(steps=even_steps(5), noise=noise))
    assert read_trial(open_run(paths.folder)).noise is None


def test_run_that_is_not_a_trial(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run").folder)
    assert not is_trial(run)
    with pytest.raises(RunFolderError, match="stepscope report"):
        read_trial(run)


def test_dtype_matches_the_step_log() -> None:
    assert STEP.itemsize == RECORD.size
    assert np.dtype(STEP).names == FIELDS


PROFILE: dict[str, Any] = {
    "device": "cuda:0",
    "steps": 4,
    "step_us": [300.0, 310.0, 290.0, 300.0],
    "operators": [],
    "kernels": [{"name": "gemm", "calls": 8, "us": 600.0}],
    "sums": {"operator_cpu_us": 500.0, "kernels": 8},
    "copies": {"to_device": {"calls": 4, "us": 40.0, "pageable_us": 8.0}},
    "memory": {"cuda:0": {"allocated": 1000, "reserved": 2000}},
    "missing": "",
    "trace": {"file": "trace0.json.gz", "bytes": 10, "unzipped_bytes": 100},
}


def test_missing_and_invalid_profiles_are_reported(tmp_path: Path) -> None:
    paths = write_trial(tmp_path, Trial(workload=Workload("cnn", ranks=5)))
    assert read_profile(open_run(tmp_path)) is None
    cut = {name: value for name, value in PROFILE.items() if name != "trace"}
    for rank, stored in enumerate((PROFILE, {"error": "no"}, cut, {**PROFILE, "steps": 0})):
        paths.trial_profile(rank).write_text(json.dumps(stored))
    profile = read_profile(open_run(tmp_path))
    assert profile and list(profile.ranks) == [0] and profile.ranks[0].kernels[0].us == 600
    assert profile.failed[1] == "no"
    assert "cannot be read" in profile.failed[2] and "trace" in profile.failed[2]
    assert set(profile.failed) == {1, 2, 3}


def test_profile_of_an_older_version(tmp_path: Path) -> None:
    """It had the bytes of copies, the number of events in the trace, and the length of epochs."""
    copies = {"to_device": {"calls": 4, "bytes": 4096, "us": 40.0, "pageable_bytes": 0}}
    old = {**PROFILE, "copies": copies, "steps_per_epoch": 100}
    old["trace"] = {**PROFILE["trace"], "events": 5}
    paths = write_trial(tmp_path, Trial())
    paths.trial_profile(0).write_text(json.dumps(old))
    profile = read_profile(open_run(tmp_path))
    assert profile and not profile.failed
    assert profile.ranks[0].copies == {"to_device": ProfiledCopies(calls=4, us=40.0)}
