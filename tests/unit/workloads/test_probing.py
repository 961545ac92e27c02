"""Requests and results of probes, and the training lock."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from pathlib import Path

import pytest

from stepscope.analysis.memory.model import Parts
from stepscope.records.codec import dumps, loads
from stepscope.workloads.probing import (
    Layer,
    ProbeRequest,
    ProbeResult,
    Subject,
    training_lock,
)


def test_requests_and_results_survive_json() -> None:
    request = ProbeRequest((2, 16), 5, exclusive=True)
    result = ProbeResult(
        4, "gpu_oom", "step 1", step_s=(0.1,), allocated_bytes=(1, 2), parts=Parts(3), notes=("x",)
    )
    subject = Subject("cuda", "a GPU", 7, 8, None, versions={"torch": "2"}, notes=("a",))
    assert loads(ProbeRequest, dumps(request)) == request
    assert loads(ProbeResult, dumps(result)) == result
    assert loads(Subject, dumps(subject)) == subject
    assert Layer(**json.loads(json.dumps(vars(Layer("a", "b", 1, 2))))) == Layer("a", "b", 1, 2)


def test_throughput_is_that_of_the_median_step_without_the_first() -> None:
    assert ProbeResult(10, "ok", step_s=(9.0, 0.5, 0.1, 0.2)).samples_per_second == 50
    assert ProbeResult(10, "ok", step_s=(9.0,)).samples_per_second is None
    assert ProbeResult(10, "ok", step_s=()).samples_per_second is None
    assert ProbeResult(10, "ok", step_s=(1.0, 0.0)).samples_per_second is None


@pytest.mark.parametrize(
    ("kind", "is_oom"),
    [("gpu_oom", True), ("host_oom", True), ("killed", False), ("error", False)],
)
def test_only_oom_kinds_are_out_of_memory(kind: str, is_oom: bool) -> None:
    assert ProbeResult(1, kind).is_oom == is_oom and not ProbeResult(1, kind).is_ok  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("held_exclusive", "exclusive", "waits"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_an_exclusive_probe_trains_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    held_exclusive: bool,
    exclusive: bool,
    waits: bool,
) -> None:
    monkeypatch.setenv("STEPSCOPE_STATE", str(tmp_path))
    acquired = threading.Event()

    def other() -> None:
        with training_lock(exclusive):
            acquired.set()

    thread = threading.Thread(target=other)
    with training_lock(held_exclusive):
        thread.start()
        assert acquired.wait(0.2 if waits else 20) != waits
    thread.join(20)
    assert acquired.is_set()


@pytest.mark.parametrize("kind", ["link", "fifo", "unwritable"])
def test_probe_continues_without_an_unsafe_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """It neither follows a link nor waits for the reader of a FIFO."""
    state = tmp_path / "state"
    monkeypatch.setenv("STEPSCOPE_STATE", str(state))
    with training_lock(True):
        (lock,) = state.iterdir()
    lock.unlink()
    if kind == "link":
        lock.symlink_to(tmp_path / "target")
    elif kind == "fifo":
        os.mkfifo(lock)
    else:
        state.rmdir()
        state.write_text("not a folder")
    with training_lock(True, tmp_path / "waiting"):
        assert not (tmp_path / "waiting").exists()
    assert not (tmp_path / "target").exists()


def test_lock_is_not_in_the_temporary_folder_of_all_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, another user could create it first and hold it."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("STEPSCOPE_STATE", str(tmp_path / "state"))
    with training_lock(True):
        assert list((tmp_path / "tmp").iterdir()) == []
