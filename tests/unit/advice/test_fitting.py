"""What was asked, and what is here: the headroom, the limit that can be had, answers of before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simulated_gpu import GiB, Net, SimulatedGpu
from stepscope.advice import cache, fitting
from stepscope.advice.answer import Fit, Room
from stepscope.advice.fit import Options, fit_on_gpu
from stepscope.advice.fitting import Asked, as_of_now
from stepscope.advice.room import GpuHere
from stepscope.advice.wording import answer, memory_free
from stepscope.errors import CannotTry
from stepscope.workloads.spec import make_workload

GPU = GpuHere("GPU-1", "NVIDIA A100", 40 * GiB, 32 * GiB, ("python (pid 3)",), "550.54")


@pytest.mark.parametrize(
    ("asked", "gpu", "bytes_free"),
    [
        (Asked(headroom=GiB, gpu_memory=8 * GiB), GPU, GiB),
        (Asked(headroom_share=0.25), GPU, 8 * GiB),
        (Asked(headroom_share=0.25, gpu_memory=8 * GiB), GPU, 2 * GiB),
        (Asked(headroom_share=0.25, memory=4 * GiB), GPU, 8 * GiB),
        (Asked(headroom_share=0.25, gpu_memory=8 * GiB, memory=4 * GiB), GPU, 2 * GiB),
        (Asked(headroom_share=0.25, gpu_memory=36 * GiB), GPU, 8 * GiB),
        (Asked(headroom_share=0.25, memory=4 * GiB), None, GiB),
        (Asked(headroom=GiB, memory=4 * GiB), None, GiB),
    ],
)
def test_a_percentage_is_one_of_what_is_fitted_into(
    asked: Asked, gpu: GpuHere | None, bytes_free: int
) -> None:
    assert fitting._headroom(asked, gpu) == bytes_free


def test_without_a_limit_it_is_one_of_what_the_host_has_free() -> None:
    found = fitting._headroom(Asked(headroom_share=0.5), None)
    assert found == pytest.approx(0.5 * 0.95 * memory_free(), rel=0.1)


def _found(room: Room) -> Fit:
    found = fit_on_gpu(SimulatedGpu(Net()), room, Options(estimate=True), lambda words: None)
    return answer(found, make_workload("cnn", {}), "auto", Options(estimate=True), None)


def test_an_answer_of_before_names_those_who_are_here_now() -> None:
    room = Room("gpu", 4 * GiB, 80 * GiB, 80 * GiB, 4 * GiB, 0, ("python (pid 812)",))
    before = replace(_found(room), notes=(*_found(room).notes, "a note"))
    assert any("pid 812" in note for note in before.notes)
    now = as_of_now(before, GPU)
    assert now.room == replace(before.room, free=GPU.free, tenants=GPU.tenants)
    assert not any("pid 812" in note for note in now.notes) and "a note" in now.notes
    assert as_of_now(before, None) == before


def test_what_is_known_is_told_as_of_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe is started: there is no GPU to start one on."""
    monkeypatch.setenv("STEPSCOPE_STATE", str(tmp_path))
    monkeypatch.setattr(fitting, "gpu_here", lambda names, environment, ranks: GPU)
    workload, asked = make_workload("cnn", {}), Asked(gpu_memory=4 * GiB)
    room = Room("gpu", 4 * GiB, 80 * GiB, 80 * GiB, 4 * GiB, 0, ("python (pid 812)",))
    known = replace(_found(room), made="2026-01-01T12:00:00+00:00")
    cache.remember(cache.key_of(workload, fitting._settings(asked, GPU)), known)
    fit = fitting.fit_workload(workload, asked, print, print)
    assert fit.cached == known.made and fit.largest == known.largest
    assert fit.room.tenants == GPU.tenants


def test_a_limit_that_cannot_be_had_is_told() -> None:
    room = Room("gpu", 5 * GiB, 80 * GiB, 6 * GiB, 15 * GiB)
    (note,) = fitting._less_than_asked(room)
    assert note.startswith("--gpu-memory 15 GiB cannot be had now: 5 GiB are free for PyTorch")
    assert "6 GiB are free" in fitting._less_than_asked(replace(room, headroom=GiB))[0]
    for enough in (
        replace(room, asked=None),
        replace(room, asked=5 * GiB),
        replace(room, asked=6 * GiB, headroom=GiB),
    ):
        assert fitting._less_than_asked(enough) == ()


def test_on_the_host_what_does_nothing_is_told() -> None:
    for asked, words in (
        (Asked(prove=True), ["--prove is for a GPU"]),
        (Asked(estimate=True), ["--estimate is for a GPU"]),
        (Asked(), []),
    ):
        told: list[str] = []
        fitting._need_no_gpu(make_workload("cnn", {}), asked, told.append)
        assert [line.split(":")[0] for line in told] == words


@pytest.mark.parametrize(
    "asked", [Asked(gpu_memory=GiB), Asked(cards=(GiB,)), Asked(method="linear2019")]
)
def test_a_gpu_that_is_left_out_is_not_said_to_be_missing(asked: Asked) -> None:
    for device, words in (("cpu", "--device cpu leaves it out"), ("auto", "there is none")):
        with pytest.raises(CannotTry, match=words):
            fitting._need_no_gpu(make_workload("cnn", {"device": device}), asked, print)
