"""Answers are remembered by all that they depend on, and a file that is no answer is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulated_gpu import GiB, Net, SimulatedGpu
from stepscope.advice import cache
from stepscope.advice.answer import Effort, Fit, Room
from stepscope.advice.fit import Options, fit_on_gpu
from stepscope.advice.fitting import Asked, _settings
from stepscope.advice.room import GpuHere
from stepscope.advice.wording import answer
from stepscope.workloads.spec import Workload, make_workload

GPU = GpuHere("GPU-1", "NVIDIA A100", 40 * GiB, 39 * GiB, (), "550.54")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPSCOPE_STATE", str(tmp_path / "state"))
    return tmp_path / "state"


def some_fit(made: str = "2026-01-01T12:00:00+00:00") -> Fit:
    room = Room("gpu", GiB, 2 * GiB, 2 * GiB)
    return Fit("does not fit", "No.", "cnn", {}, "auto", room, None, Effort(1.0, 2, 1), made=made)


def key(asked: Asked = Asked(), gpu: GpuHere = GPU, **knobs: Any) -> str:  # noqa: B008
    return cache.key_of(make_workload("cnn", knobs), _settings(asked, gpu))


def test_what_is_remembered_is_recalled_and_said_to_be_so() -> None:
    fit = some_fit()
    assert cache.recall("abc") is None
    cache.remember("abc", fit)
    recalled = cache.recall("abc")
    assert recalled is not None and recalled.cached == fit.made
    assert recalled == Fit(**{**vars(fit), "cached": fit.made})
    assert cache.recall("abd") is None


def test_a_whole_answer_is_recalled_as_it_was() -> None:
    room = Room("gpu", 4 * GiB, 80 * GiB, 80 * GiB, 4 * GiB, 0, ("python (pid 3)",))
    found = fit_on_gpu(SimulatedGpu(Net()), room, Options(prove=True), lambda words: None)
    fit = answer(found, make_workload("cnn", {}), "auto", Options(), None)
    cache.remember("abc", fit)
    recalled = cache.recall("abc")
    assert recalled is not None
    assert Fit(**{**vars(recalled), "cached": None}) == fit
    assert recalled.curve and recalled.proof and recalled.need and recalled.largest


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
        lambda told: json.dumps({**json.loads(told), "of a later version": 1}),
        lambda told: json.dumps({**json.loads(told), "room": 5}),
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
    assert key(Asked(fresh=True, hang_s=5.0)) == key()


@pytest.mark.parametrize(
    "other",
    [
        {"asked": Asked(gpu_memory=GiB)},
        {"asked": Asked(headroom=GiB)},
        {"asked": Asked(cards=(GiB,))},
        {"asked": Asked(method="linear2019")},
        {"asked": Asked(estimate=True)},
        {"asked": Asked(memory=GiB)},
        {"gpu": GpuHere("GPU-1", "NVIDIA H100", 40 * GiB, 39 * GiB, (), "550.54")},
        {"gpu": GpuHere("GPU-1", "NVIDIA A100", 80 * GiB, 39 * GiB, (), "550.54")},
        {"gpu": GpuHere("GPU-1", "NVIDIA A100", 40 * GiB, 30 * GiB, (), "550.54")},
        {"gpu": GpuHere("GPU-1", "NVIDIA A100", 40 * GiB, 39 * GiB, (), "560.01")},
        {"precision": "bf16"},
        {"optimizer": "adam"},
        {"workers": 3},
    ],
)
def test_another_question_or_machine_has_another_key(other: dict[str, Any]) -> None:
    assert key(**other) != key()


def test_with_a_limit_free_memory_beyond_it_does_not_matter() -> None:
    fuller = GpuHere("GPU-2", "NVIDIA A100", 40 * GiB, 30 * GiB, ("python (pid 3)",), "550.54")
    asked = Asked(gpu_memory=GiB)
    assert key(asked) == key(asked, gpu=fuller)


def test_another_version_has_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key()
    monkeypatch.setattr(cache, "_version", lambda package: "0.0")
    assert key() != before


def test_a_users_files_are_part_of_the_key(tmp_path: Path) -> None:
    mine, beside = tmp_path / "mine.py", tmp_path / "nets" / "net.py"
    beside.parent.mkdir()

    def written(text: str, other: str) -> str:
        mine.write_text(text)
        beside.write_text(other)
        workload: Workload = make_workload(f"{mine}:workload", {})
        return cache.key_of(workload, {})

    first = written("def workload(): ...", "a = 1")
    assert written("def workload(): ...", "a = 1") == first
    assert written("def workload(): ... # more", "a = 1") != first
    assert written("def workload(): ...", "a = 2") != first
