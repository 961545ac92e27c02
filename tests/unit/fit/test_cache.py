"""Answers are remembered by all that they depend on, and a file that is no answer is none."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simulated_gpu import GiB, Net, SimulatedGpu
from stepscope.fit import cache
from stepscope.fit.answer import (
    Batch,
    ChosenGpu,
    Effort,
    Fit,
    MemoryBudget,
    Note,
    NoteKind,
    OtherProcess,
)
from stepscope.fit.gpu_search import search_gpu
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.search import answer_of
from stepscope.trials.limits.spec import Limits
from stepscope.workloads.spec import Workload, make_workload

GPU = ChosenGpu("GPU-1", "NVIDIA A100", 40 * GiB, 39 * GiB, (), "550.54")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def some_fit(made: str = "2026-01-01T12:00:00+00:00") -> Fit:
    budget = MemoryBudget("gpu", GiB, 2 * GiB, 2 * GiB)
    return Fit("does not fit", "cnn", {}, "auto", budget, None, Effort(1.0, 2, 1), made=made)


def key(request: dict[str, Any] | None = None, gpu: ChosenGpu = GPU, **settings: Any) -> str:
    return cache.key_of(FitRequest(make_workload("cnn", settings), **(request or {})), gpu)


def test_what_is_remembered_is_recalled_and_said_to_be_so() -> None:
    fit = some_fit()
    assert cache.recall("abc") is None
    cache.remember("abc", fit)
    recalled = cache.recall("abc")
    assert recalled is not None and recalled.cached == fit.made
    assert recalled == Fit(**{**vars(fit), "cached": fit.made})
    assert cache.recall("abd") is None


def test_a_whole_answer_is_recalled_as_it_was() -> None:
    other = OtherProcess(3, "python")
    budget = MemoryBudget("gpu", 4 * GiB, 80 * GiB, 80 * GiB, 4 * GiB, 0, (other,))
    request = FitRequest(make_workload("cnn", {}), prove=True)
    found = search_gpu(SimulatedGpu(Net()), budget, request, FitListener())
    fit = answer_of(found, request, None)
    cache.remember("abc", fit)
    recalled = cache.recall("abc")
    assert recalled is not None
    assert Fit(**{**vars(recalled), "cached": None}) == fit
    assert recalled.curve and recalled.proof and recalled.minimum and recalled.max_batch


@pytest.mark.parametrize(
    "spoil",
    [
        lambda told: "",
        lambda told: told[: len(told) // 2],
        lambda told: "[]",
        lambda told: "null",
        lambda told: '"text"',
        lambda told: "{}",
        lambda told: told.replace('"verdict"', '"judgement"'),
        lambda told: json.dumps({**json.loads(told), "budget": 5}),
        lambda told: json.dumps({**json.loads(told), "curve": [[1, 2]]}),
        lambda told: json.dumps({**json.loads(told), "holes": [[1, 2, 3]]}),
        lambda told: json.dumps({**json.loads(told), "holes": 7}),
    ],
)
def test_a_file_that_is_no_answer_is_ignored(state: Path, spoil: Callable[[str], str]) -> None:
    cache.remember("abc", some_fit())
    (file,) = state.rglob("*.json")
    file.write_text(spoil(file.read_text()))
    assert cache.recall("abc") is None


def test_bytes_that_are_no_text_are_ignored(state: Path) -> None:
    cache.remember("abc", some_fit())
    (file,) = state.rglob("*.json")
    file.write_bytes(b"\xff\xfe{")
    assert cache.recall("abc") is None


def test_where_nothing_can_be_written_nothing_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STEPSCOPE_STATE", str(tmp_path / "file"))
    cache.remember("abc", some_fit())
    assert cache.recall("abc") is None


def test_the_same_question_has_the_same_key() -> None:
    assert key() == key()
    assert key(batch_size=8) == key(batch_size=64)
    assert key({"fresh": True, "limits": Limits(stall_timeout_s=5.0)}) == key()


@pytest.mark.parametrize(
    "other",
    [
        {"request": {"limits": Limits(gpu_memory=GiB)}},
        {"request": {"headroom": GiB}},
        {"request": {"headroom_share": 0.05}},
        {"request": {"cards": (GiB,)}},
        {"request": {"method": "linear2019"}},
        {"request": {"estimate": True}},
        {"request": {"limits": Limits(memory=GiB)}},
        {"gpu": ChosenGpu("GPU-1", "NVIDIA H100", 40 * GiB, 39 * GiB, (), "550.54")},
        {"gpu": ChosenGpu("GPU-1", "NVIDIA A100", 80 * GiB, 39 * GiB, (), "550.54")},
        {"gpu": ChosenGpu("GPU-1", "NVIDIA A100", 40 * GiB, 30 * GiB, (), "550.54")},
        {"gpu": ChosenGpu("GPU-1", "NVIDIA A100", 40 * GiB, 39 * GiB, (), "560.01")},
        {"precision": "bf16"},
        {"optimizer": "adam"},
        {"workers": 3},
    ],
)
def test_another_question_or_machine_has_another_key(other: dict[str, Any]) -> None:
    assert key(**other) != key()


def test_with_a_limit_free_memory_beyond_it_does_not_matter() -> None:
    others = (OtherProcess(3, "python"),)
    fuller = ChosenGpu("GPU-2", "NVIDIA A100", 40 * GiB, 30 * GiB, others, "550.54")
    request = {"limits": Limits(gpu_memory=GiB)}
    assert key(request) == key(request, gpu=fuller)


@pytest.mark.parametrize("free", [16, 20, 38])
def test_a_limit_that_is_not_all_free_depends_on_what_is(free: int) -> None:
    request = {"limits": Limits(gpu_memory=(free - 1) * GiB)}
    fuller = replace(GPU, free=free * GiB)
    assert key(request) != key(request, gpu=fuller)
    assert key(request, gpu=fuller) != key(request, gpu=replace(fuller, free=fuller.free - GiB))


@pytest.mark.parametrize(
    "name",
    ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDNN_LOGLEVEL_DBG", "NVIDIA_TF32_OVERRIDE"],
)
def test_what_changes_kernels_or_the_allocator_has_another_key(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = key()
    monkeypatch.setenv("UNRELATED", "1")
    assert key() == before
    monkeypatch.setenv(name, "1")
    assert key() != before


FITS = replace(some_fit(), verdict="fits", max_batch=Batch(9, passed=2))


@pytest.mark.parametrize(
    "fit",
    [
        replace(FITS, verdict="cannot tell"),
        replace(FITS, notes=(Note(NoteKind.BATCH_FAILED, "no such file", 8),)),
        replace(FITS, notes=(Note(NoteKind.EDGE_UNSTABLE),)),
    ],
)
def test_what_an_accident_had_a_part_in_is_not_remembered(fit: Fit) -> None:
    cache.remember("abc", fit)
    assert cache.recall("abc") is None
    cache.remember("abc", FITS)
    assert cache.recall("abc") is not None


def test_the_oldest_are_forgotten(state: Path) -> None:
    for number in range(203):
        cache.remember(f"{number}", FITS)
        if number < 202:
            os.utime(state / "fits" / f"{number}.json", (number, number))
    kept = {int(file.stem) for file in state.rglob("*.json")}
    assert kept == set(range(3, 203))


def test_another_version_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(cache.metadata, "version", lambda package: "0.0")
    assert key() != before


def test_a_users_files_are_part_of_the_key(tmp_path: Path) -> None:
    mine, beside = tmp_path / "mine.py", tmp_path / "nets" / "net.py"
    beside.parent.mkdir()

    def written(text: str, other: str) -> str:
        mine.write_text(text)
        beside.write_text(other)
        workload: Workload = make_workload(f"{mine}:workload", {})
        return cache.key_of(FitRequest(workload), GPU)

    first = written("def workload(): ...", "a = 1")
    assert written("def workload(): ...", "a = 1") == first
    assert written("def workload(): ... # more", "a = 1") != first
    assert written("def workload(): ...", "a = 2") != first


def _own(tmp_path: Path) -> tuple[Path, Callable[[], str]]:
    mine = tmp_path / "project" / "train.py"
    mine.parent.mkdir()
    mine.write_text("def workload(): ...")
    return mine, lambda: cache.key_of(FitRequest(make_workload(f"{mine}:workload", {})), GPU)


@pytest.mark.parametrize("name", ["net.py", "hyper.yaml", "hyper.yml", "hyper.toml", "hyper.json"])
def test_settings_below_are_part_of_the_key(tmp_path: Path, name: str) -> None:
    mine, key_now = _own(tmp_path)
    before = key_now()
    (mine.parent / "conf").mkdir()
    (mine.parent / "conf" / name).write_text("1")
    first = key_now()
    (mine.parent / "conf" / name).write_text("2")
    assert len({before, first, key_now()}) == 3


@pytest.mark.parametrize(
    "place",
    [
        ".venv/lib/a.py",
        "env/lib/a.py",
        "site-packages/a.py",
        "node_modules/a.json",
        "__pycache__/a.py",
        "runs/one/trial/a.json",
        "studies/one/a.yaml",
        "data/a.csv",
    ],
)
def test_what_is_not_the_users_own_is_left_out(tmp_path: Path, place: str) -> None:
    mine, key_now = _own(tmp_path)
    for mark in ("env/pyvenv.cfg", "runs/one/run.json", "studies/one/study.json"):
        (mine.parent / mark).parent.mkdir(parents=True)
        (mine.parent / mark).write_text("")
    for mark in ("runs/one/events", "studies/one/ledger"):
        (mine.parent / mark).mkdir()
    before = key_now()
    (mine.parent / place).parent.mkdir(parents=True, exist_ok=True)
    (mine.parent / place).write_text("1")
    assert key_now() == before


def test_a_large_folder_hides_neither_the_named_file_nor_its_neighbours(tmp_path: Path) -> None:
    mine, key_now = _own(tmp_path)
    many, near = mine.parent / "a" / "many", mine.parent / "z" / "net.py"
    many.mkdir(parents=True)
    near.parent.mkdir()
    near.write_text("1")
    for number in range(cache._MOST_FILES + 5):
        (many / f"{number:04}.py").write_text("")
    before = key_now()
    (many / "0900.py").write_text("beyond what is read")
    assert key_now() == before
    near.write_text("2")
    changed = key_now()
    mine.write_text("def workload(): ... # more")
    assert len({before, changed, key_now()}) == 3


def test_a_file_too_large_to_read_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, key_now = _own(tmp_path)
    monkeypatch.setattr(cache, "_MOST_BYTES", 1000)
    (mine.parent / "annotations.json").write_text("x" * 2000)
    before = key_now()
    (mine.parent / "net.py").write_text("1")
    assert key_now() != before
