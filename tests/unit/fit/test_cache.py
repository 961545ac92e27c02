"""The cache key covers everything a result depends on, and invalid files are ignored."""

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
from stepscope.fit.gpu_search import search_gpu
from stepscope.fit.request import FitListener, FitRequest
from stepscope.fit.result import (
    Batch,
    ChosenGpu,
    FitResult,
    MemoryBudget,
    Note,
    NoteKind,
    OtherProcess,
    SearchCost,
)
from stepscope.fit.search import build_result
from stepscope.trials.limits.spec import Limits
from stepscope.workloads.spec import Workload, make_workload

GPU = ChosenGpu("GPU-1", "NVIDIA A100", 40 * GiB, 39 * GiB, (), "550.54")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def some_fit(created: str = "2026-01-01T12:00:00+00:00") -> FitResult:
    budget = MemoryBudget("gpu", GiB, 2 * GiB, 2 * GiB)
    return FitResult(
        "does_not_fit", "cnn", {}, "auto", budget, None, SearchCost(1.0, 2, 1), created=created
    )


def key(request: dict[str, Any] | None = None, gpu: ChosenGpu = GPU, **settings: Any) -> str:
    return cache.key_of(FitRequest(make_workload("cnn", settings), **(request or {})), gpu)


def test_a_stored_result_is_loaded_and_marked() -> None:
    fit = some_fit()
    assert cache.load("abc") is None
    cache.store("abc", fit)
    loaded = cache.load("abc")
    assert loaded == replace(fit, from_cache=True)
    assert cache.load("abd") is None


def test_a_complete_result_is_loaded_unchanged() -> None:
    other = OtherProcess(3, "python")
    budget = MemoryBudget("gpu", 4 * GiB, 80 * GiB, 80 * GiB, 4 * GiB, 0, (other,))
    request = FitRequest(make_workload("cnn", {}), verify=True)
    found = search_gpu(SimulatedGpu(Net()), budget, request, FitListener())
    fit = build_result(found, request, None)
    cache.store("abc", fit)
    assert cache.load("abc") == replace(fit, from_cache=True)
    assert fit.curve and fit.verification and fit.minimum_memory and fit.max_batch


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: "null",
        lambda text: '"text"',
        lambda text: "{}",
        lambda text: text.replace('"verdict"', '"judgement"'),
        lambda text: json.dumps({**json.loads(text), "budget": 5}),
        lambda text: json.dumps({**json.loads(text), "curve": [[1, 2]]}),
        lambda text: json.dumps({**json.loads(text), "failures_below_max": [[1, 2, 3]]}),
        lambda text: json.dumps({**json.loads(text), "failures_below_max": 7}),
    ],
)
def test_an_invalid_file_is_ignored(state: Path, spoil: Callable[[str], str]) -> None:
    cache.store("abc", some_fit())
    (file,) = state.rglob("*.json")
    file.write_text(spoil(file.read_text()))
    assert cache.load("abc") is None


def test_a_binary_file_is_ignored(state: Path) -> None:
    cache.store("abc", some_fit())
    (file,) = state.rglob("*.json")
    file.write_bytes(b"\xff\xfe{")
    assert cache.load("abc") is None


def test_an_unwritable_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STEPSCOPE_STATE", str(tmp_path / "file"))
    cache.store("abc", some_fit())
    assert cache.load("abc") is None


def test_equal_requests_have_equal_keys() -> None:
    assert key() == key()
    assert key(batch_size=8) == key(batch_size=64)
    assert key({"no_cache": True, "limits": Limits(stall_timeout_s=5.0)}) == key()


@pytest.mark.parametrize(
    "other",
    [
        {"request": {"limits": Limits(gpu_memory=GiB)}},
        {"request": {"headroom": GiB}},
        {"request": {"headroom_share": 0.05}},
        {"request": {"predict_for": (GiB,)}},
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
def test_another_request_or_machine_has_another_key(other: dict[str, Any]) -> None:
    assert key(**other) != key()


def test_with_a_limit_ample_free_memory_does_not_matter() -> None:
    others = (OtherProcess(3, "python"),)
    fuller = ChosenGpu("GPU-2", "NVIDIA A100", 40 * GiB, 30 * GiB, others, "550.54")
    request = {"limits": Limits(gpu_memory=GiB)}
    assert key(request) == key(request, gpu=fuller)


@pytest.mark.parametrize("free", [16, 20, 38])
def test_with_a_limit_scarce_free_memory_matters(free: int) -> None:
    request = {"limits": Limits(gpu_memory=(free - 1) * GiB)}
    fuller = replace(GPU, free_bytes=free * GiB)
    assert key(request) != key(request, gpu=fuller)
    assert key(request, gpu=fuller) != key(
        request, gpu=replace(fuller, free_bytes=fuller.free_bytes - GiB)
    )


@pytest.mark.parametrize(
    "name",
    ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUDNN_LOGLEVEL_DBG", "NVIDIA_TF32_OVERRIDE"],
)
def test_variables_of_kernels_and_allocator_are_part_of_the_key(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv(name, raising=False)
    before = key()
    monkeypatch.setenv("UNRELATED", "1")
    assert key() == before
    monkeypatch.setenv(name, "1")
    assert key() != before


FITS = replace(some_fit(), verdict="fits", max_batch=Batch(9, passes=2))


@pytest.mark.parametrize(
    "fit",
    [
        replace(FITS, verdict="unknown"),
        replace(FITS, notes=(Note(NoteKind.BATCH_FAILED, "no such file", 8),)),
        replace(FITS, notes=(Note(NoteKind.EDGE_UNSTABLE),)),
    ],
)
def test_accidental_results_are_not_stored(fit: FitResult) -> None:
    cache.store("abc", fit)
    assert cache.load("abc") is None
    cache.store("abc", FITS)
    assert cache.load("abc") is not None


def test_the_oldest_results_are_deleted(state: Path) -> None:
    for number in range(203):
        cache.store(f"{number}", FITS)
        if number < 202:
            os.utime(state / "fits" / f"{number}.json", (number, number))
    kept = {int(file.stem) for file in state.rglob("*.json")}
    assert kept == set(range(3, 203))


def test_package_versions_are_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(cache.metadata, "version", lambda package: "0.0")
    assert key() != before


def test_user_files_are_part_of_the_key(tmp_path: Path) -> None:
    mine, nested = tmp_path / "mine.py", tmp_path / "nets" / "net.py"
    nested.parent.mkdir()

    def written(text: str, other: str) -> str:
        mine.write_text(text)
        nested.write_text(other)
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
def test_files_in_subfolders_are_part_of_the_key(tmp_path: Path, name: str) -> None:
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
def test_files_that_are_not_user_code_are_ignored(tmp_path: Path, place: str) -> None:
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


def test_a_large_folder_hides_neither_the_main_file_nor_nearer_files(tmp_path: Path) -> None:
    mine, key_now = _own(tmp_path)
    many, near = mine.parent / "a" / "many", mine.parent / "z" / "net.py"
    many.mkdir(parents=True)
    near.parent.mkdir()
    near.write_text("1")
    for number in range(cache._MAX_FILES + 5):
        (many / f"{number:04}.py").write_text("")
    before = key_now()
    (many / "0900.py").write_text("beyond the limit")
    assert key_now() == before
    near.write_text("2")
    changed = key_now()
    mine.write_text("def workload(): ... # more")
    assert len({before, changed, key_now()}) == 3


def test_a_large_file_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, key_now = _own(tmp_path)
    monkeypatch.setattr(cache, "_MAX_BYTES", 1000)
    (mine.parent / "annotations.json").write_text("x" * 2000)
    before = key_now()
    (mine.parent / "net.py").write_text("1")
    assert key_now() != before
