"""What goes between a probe and who asks it, and whose turn it is to train."""

from __future__ import annotations

import json
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
    taking_turns,
)


def test_what_a_probe_is_asked_and_tells_survives_json() -> None:
    ask = ProbeRequest((2, 16), 5, turn=True)
    told = ProbeResult(
        4, "gpu_oom", "step 1", step_s=(0.1,), kept=(1, 2), parts=Parts(3), notes=("x",)
    )
    subject = Subject("cuda", "a GPU", 7, 8, None, versions={"torch": "2"}, notes=("a",))
    assert loads(ProbeRequest, dumps(ask)) == ask
    assert loads(ProbeResult, dumps(told)) == told
    assert loads(Subject, dumps(subject)) == subject
    assert Layer(**json.loads(json.dumps(vars(Layer("a", "b", 1, 2))))) == Layer("a", "b", 1, 2)


def test_the_rate_is_that_of_the_median_step_without_the_first() -> None:
    assert ProbeResult(10, "ok", step_s=(9.0, 0.5, 0.1, 0.2)).samples_per_second == 50
    assert ProbeResult(10, "ok", step_s=(9.0,)).samples_per_second is None
    assert ProbeResult(10, "ok", step_s=()).samples_per_second is None
    assert ProbeResult(10, "ok", step_s=(1.0, 0.0)).samples_per_second is None


@pytest.mark.parametrize(
    ("kind", "is_oom"),
    [("gpu_oom", True), ("host_oom", True), ("killed", False), ("error", False)],
)
def test_only_what_says_so_ran_out_of_memory(kind: str, is_oom: bool) -> None:
    assert ProbeResult(1, kind).is_oom == is_oom and not ProbeResult(1, kind).is_ok  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("holds_alone", "wants_alone", "waits"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_who_is_timed_is_alone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holds_alone: bool,
    wants_alone: bool,
    waits: bool,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    had_turn = threading.Event()

    def other() -> None:
        with taking_turns(wants_alone):
            had_turn.set()

    thread = threading.Thread(target=other)
    with taking_turns(holds_alone):
        thread.start()
        assert had_turn.wait(0.2 if waits else 20) != waits
    thread.join(20)
    assert had_turn.is_set()
