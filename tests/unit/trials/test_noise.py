"""The stored noise of repeats, with real files and concurrent processes."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from stepscope.analysis.trial.throughput import ASSUMED_NOISE
from stepscope.records import Gpu
from stepscope.records.facts import CpuFacts, Environment
from stepscope.records.trial import ProcessNoise
from stepscope.state import state_folder
from stepscope.trials.noise import MachineKind, NoiseStore

CPU = MachineKind("AMD EPYC × 2", "cpu")
GPU = MachineKind("AMD EPYC × 2; NVIDIA H200", "gpu")


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path, messages: list[str]) -> NoiseStore:
    return NoiseStore(tmp_path / "state" / "noise.json", messages.append)


def repeats(count: int, cv: float, seed: int = 0) -> Sequence[float]:
    return (100 * (1 + cv * np.random.default_rng(seed).normal(size=count))).tolist()


def test_noise_is_assumed_without_repeats(store: NoiseStore, messages: list[str]) -> None:
    assert store.get(CPU) == ProcessNoise(0.08, 4, "assumed")
    assert store.get(GPU) == ProcessNoise(0.02, 4, "assumed")
    assert not store.path.exists() and not messages


def test_noise_is_stored_by_machine_and_device(store: NoiseStore) -> None:
    noise = store.learn(CPU, repeats(6, 0.05))
    assert noise == NoiseStore(store.path).get(CPU)
    assert (noise.source, noise.dof, noise.trials) == ("learned", 5, 6)
    assert 0.02 < noise.cv < 0.1
    assert store.get(GPU) == ASSUMED_NOISE["gpu"]


def test_groups_of_different_speed_are_pooled(store: NoiseStore) -> None:
    """Only differences between repeats of a trial count, not between trials."""
    for seed in range(40):
        factor = 10.0**seed % 7 + 1
        store.learn(CPU, [factor * rate for rate in repeats(3, 0.03, seed)])
    noise = store.get(CPU)
    assert noise.cv == pytest.approx(0.03, rel=0.3)
    assert noise.trials == 120


def test_few_repeats_only_adjust_the_assumption(store: NoiseStore) -> None:
    low = store.learn(CPU, [100.0, 100.1])
    assert low.source == "assumed" and 0.05 < low.cv < 0.08 and low.dof == 5
    high = store.learn(CPU, [50.0, 150.0])
    assert high.source == "assumed" and high.cv > 0.2


def test_old_repeats_lose_weight(store: NoiseStore) -> None:
    for seed in range(30):
        store.learn(CPU, repeats(6, 0.10, seed))
    assert store.get(CPU).cv == pytest.approx(0.10, rel=0.2)
    for seed in range(60):
        store.learn(CPU, repeats(6, 0.01, seed))
    assert store.get(CPU).cv < 0.02
    assert store.get(CPU).dof == pytest.approx(60)


@given(st.lists(st.sampled_from([float("nan"), float("inf"), 0.0, -3.0, 100.0]), max_size=1))
def test_fewer_than_two_rates_are_ignored(rates: list[float]) -> None:
    store = NoiseStore(Path("/nonexistent/noise.json"))
    assert store.learn(CPU, [*rates, float("nan")]) == ASSUMED_NOISE["cpu"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"format": 1, "machines": {',
        "[]",
        "\0" * 200,
        '{"format": 99, "machines": {}}',
        '{"format": 1, "machines": []}',
        json.dumps({"format": 1, "machines": {CPU.key: {"squares": "x", "dof": 1, "trials": 2}}}),
        json.dumps({"format": 1, "machines": {CPU.key: {"squares": 1, "dof": -1, "trials": 2}}}),
        json.dumps({"format": 1, "machines": {CPU.key: None}}),
    ],
)
def test_damaged_file_is_renamed_and_reported(
    text: str, store: NoiseStore, messages: list[str]
) -> None:
    store.path.parent.mkdir()
    store.path.write_text(text)
    assert store.get(CPU) == store.get(CPU) == ASSUMED_NOISE["cpu"]
    assert len(messages) == 1 and "is damaged" in messages[0]
    assert store.path.read_text() == text, "reading does not change the file"
    assert store.learn(CPU, repeats(6, 0.05)).source == "learned"
    assert store.path.with_suffix(".damaged").read_text() == text
    assert "noise.damaged" in messages[1]
    assert NoiseStore(store.path).get(CPU).trials == 6


def test_unwritable_folder_is_not_an_error(tmp_path: Path, messages: list[str]) -> None:
    (tmp_path / "file").write_text("")
    store = NoiseStore(tmp_path / "file" / "noise.json", messages.append)
    assert store.learn(CPU, repeats(6, 0.05)).source == "learned"
    assert store.learn(CPU, repeats(6, 0.05)).trials == 6
    assert any("STEPSCOPE_STATE" in text for text in messages)


def test_unsafe_lock_is_not_an_error(store: NoiseStore, messages: list[str]) -> None:
    store.path.parent.mkdir()
    os.mkfifo(store.path.with_suffix(".lock"))
    assert store.learn(CPU, repeats(6, 0.05)).source == "learned"
    assert any("noise.lock is not a regular file" in text for text in messages)


def test_lock_that_is_never_released(
    store: NoiseStore, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.trials.locks._ATTEMPTS", 5)
    store.path.parent.mkdir()
    with open(store.path.with_suffix(".lock"), "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        store.learn(CPU, repeats(6, 0.05))
    assert len(messages) == 1 and not store.path.exists()


def test_concurrent_runners_lose_nothing(store: NoiseStore) -> None:
    program = f"""
from pathlib import Path
from stepscope.trials import locks
from stepscope.trials.noise import MachineKind, NoiseStore
locks._ATTEMPTS = 3000
for _ in range(10):
    NoiseStore(Path({str(store.path)!r}), print).learn({CPU!r}, [100.0, 101.0])
"""
    runners = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [runner.communicate()[0] for runner in runners] == ["", "", ""]
    assert store.get(CPU).trials == 3 * 10 * 2
    assert {path.name for path in store.path.parent.iterdir()} == {"noise.json", "noise.lock"}


def test_state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert state_folder() == tmp_path / ".local/state/stepscope"
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert state_folder() == Path("/xdg/stepscope")
    monkeypatch.setenv("STEPSCOPE_STATE", "/state")
    assert NoiseStore().path == Path("/state/noise.json")


def test_machines_have_different_keys() -> None:
    one, two = (Environment(cpu=CpuFacts("AMD EPYC", logical)) for logical in (2, 4))
    gpu = replace(one, gpus=(Gpu(uuid="GPU-1", model="NVIDIA H200"),))
    cnn = {"model": "cnn", "batch_size": 32, "seed": 1, "steps": 8}
    keys = {
        MachineKind.of(each, device, cnn).key
        for each in (one, two, gpu)
        for device in ("cpu", "gpu")
    }
    assert len(keys) == 6
    assert MachineKind.of(one, "cpu", cnn).place == "AMD EPYC × 2; on cpu"
    assert MachineKind.of(Environment(), "cpu", cnn).hardware == f"unknown CPU × {os.cpu_count()}"


def test_workload_keys_ignore_length_and_seed() -> None:
    cnn = {"model": "cnn", "batch_size": 32, "seed": 1, "steps": 8}
    here = MachineKind.of(Environment(), "cpu", cnn)
    longer = {**cnn, "steps": None, "seconds": 9, "seed": 2}
    assert here.key == MachineKind.of(Environment(), "cpu", longer).key
    assert here.key != MachineKind.of(Environment(), "cpu", {**cnn, "batch_size": 64}).key


def test_each_workload_has_its_own_noise(store: NoiseStore) -> None:
    """Workloads do not mix, and a new one gets the noise of the noisier half."""
    quiet, noisy, new = (replace(CPU, workload=name) for name in ("quiet", "noisy", "new"))
    store.learn(quiet, repeats(20, 0.01))
    store.learn(noisy, repeats(20, 0.2))
    assert store.get(quiet).cv == pytest.approx(0.01, rel=0.5)
    assert store.get(noisy).cv == pytest.approx(0.2, rel=0.5)
    unseen = store.get(new)
    assert unseen.source == "other_workloads" and unseen.cv == store.get(noisy).cv
    assert unseen.dof == ASSUMED_NOISE["cpu"].dof, "less certain than for the other workloads"
    assert store.get(replace(new, device="gpu")) == ASSUMED_NOISE["gpu"]
    few = store.learn(new, [100.0, 101.0])
    assert few.source == "other_workloads" and few.cv < unseen.cv
