"""Stored events as input of the analysis: allocator series and GPUs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepscope.errors import RunFolderError
from stepscope.inject import events
from stepscope.records.facts import RunFacts
from stepscope.runs.events import RECORD, ProcessEvents, read_file
from stepscope.runs.facts import parse_facts
from stepscope.runs.load import gpus_of, load
from stepscope.runs.reader import open_run
from stepscope.runs.timelines import allocator_series
from synthetic import Plan, write_run
from synthetic_gpus import gpu_uuid

RUNS = Path(__file__).parents[2] / "data" / "runs"
A, B = "GPU-aaaaaaaa-1111", "GPU-bbbbbbbb-2222"

Record = tuple[int, int, int, int, int]
"""Time, kind, number, a, b."""


def process(pid: int, devices: dict[int, str], *records: Record) -> ProcessEvents:
    names = {events.name_id(uuid): uuid for uuid in devices.values()}
    gpus = [(1, events.GPU, number, events.name_id(uuid), 0) for number, uuid in devices.items()]
    table = np.zeros(len(gpus) + len(records), RECORD)
    for record, (t, kind, number, a, b) in zip(table, [*gpus, *records], strict=True):
        record["t"], record["kind"], record["number"] = t, kind, number
        record["a"], record["b"] = a, b
    return ProcessEvents(pid, None, table, names)


def memory(t: int, allocated: int, reserved: int, number: int = 0) -> Record:
    return (t, events.GPU_MEMORY, number, allocated, reserved)


def points(by_key: dict, metric: str, uuid: str = A) -> list[tuple[int, float]]:  # type: ignore[type-arg]
    series = by_key[metric, uuid]
    return list(zip(series.t.tolist(), series.value.tolist(), strict=True))


def test_allocator_series_of_one_process() -> None:
    one = process(
        1,
        {0: A, 1: B},
        memory(10, 3, 5),
        memory(11, 30, 50, number=1),
        (12, events.GPU_PEAK, 0, 7, 8),
        (13, events.GPU_RETRIES, 0, 2, 1),
        memory(20, 4, 6),
    )
    by_key = allocator_series([one])
    assert points(by_key, "gpu_allocated") == [(10, 3), (20, 4)]
    assert points(by_key, "gpu_reserved") == [(10, 5), (20, 6)]
    assert points(by_key, "gpu_reserved", B) == [(11, 50)]
    assert points(by_key, "gpu_allocated_peak") == [(12, 7)]
    assert points(by_key, "gpu_reserved_peak") == [(12, 8)]
    assert points(by_key, "gpu_alloc_retries") == [(13, 2)]
    assert points(by_key, "gpu_alloc_ooms") == [(13, 1)]


def test_processes_on_one_gpu_are_summed_by_uuid() -> None:
    """With CUDA_VISIBLE_DEVICES every process numbers its GPUs from 0."""
    first = process(1, {0: A}, memory(10, 0, 5), memory(30, 0, 7))
    second = process(2, {1: A}, memory(20, 0, 100, number=1), memory(40, 0, 90, number=1))
    by_key = allocator_series([first, second])
    assert points(by_key, "gpu_reserved") == [(10, 5), (20, 105), (30, 107), (40, 97)]


def test_process_that_starts_after_another_replaces_it() -> None:
    first = process(1, {0: A}, memory(10, 0, 5), (11, events.GPU_RETRIES, 0, 3, 0))
    second = process(2, {0: A}, memory(20, 0, 4), (21, events.GPU_RETRIES, 0, 2, 0))
    by_key = allocator_series([first, second])
    assert points(by_key, "gpu_reserved") == [(10, 5), (20, 4)]
    assert points(by_key, "gpu_alloc_retries") == [(11, 3), (21, 5)], "counts are kept"


def test_running_process_keeps_its_memory() -> None:
    first = process(1, {0: A}, memory(10, 0, 5), (50, events.STEP, 1, 1, 0))
    second = process(2, {0: A}, memory(20, 0, 4))
    assert points(allocator_series([first, second]), "gpu_reserved") == [(10, 5), (20, 9)]


def test_mig_slice_is_found_without_its_prefix() -> None:
    """CUDA writes the UUID of a MIG slice with GPU-, NVML with MIG-."""
    reporting = process(1, {0: "GPU-cccccccc-3333"}, memory(10, 0, 5))
    by_key = allocator_series([reporting], known=["GPU-parent", "MIG-cccccccc-3333"])
    assert {uuid for _, uuid in by_key} == {"MIG-cccccccc-3333"}


def test_old_pytorch_without_uuids() -> None:
    reporting = process(1, {0: "cuda:0"}, memory(10, 0, 5))
    assert {uuid for _, uuid in allocator_series([reporting], known=[A])} == {A}
    assert {uuid for _, uuid in allocator_series([reporting], known=[A, B])} == {"cuda:0"}


def test_device_without_a_name_is_dropped() -> None:
    assert allocator_series([process(1, {}, memory(10, 1, 1))]) == {}


def test_gpus_of_the_facts_precede_gpus_of_the_samples() -> None:
    facts = {
        "environment": {
            "gpus": [
                {
                    "index": 2,
                    "uuid": A,
                    "model": "NVIDIA H200",
                    "label": "GPU 2 slice 1",
                    "memory_bytes": 18e9,
                    "power_limit_watts": 700.0,
                },
            ]
        }
    }
    known, seen = gpus_of(facts_from(facts), [A, B])
    assert (known.label, known.model, known.memory_bytes) == ("GPU 2 slice 1", "NVIDIA H200", 18e9)
    assert (seen.uuid, seen.label, seen.model, seen.memory_bytes) == (B, "GPU-bbbbbbbb", "", None)


@pytest.mark.parametrize("environment", [None, {}, {"gpus": None}, {"gpus": []}])
def test_facts_without_gpus(environment: object) -> None:
    assert gpus_of(facts_from({"environment": environment}), ()) == ()


def test_damaged_facts_are_named() -> None:
    with pytest.raises(RunFolderError, match=r"environment\.gpus\[0\]"):
        facts_from({"environment": {"gpus": ["?"]}})


def facts_from(plain: dict[str, Any]) -> RunFacts:
    return parse_facts(plain, Path("run"))


def test_gpus_of_an_old_run(tmp_path: Path) -> None:
    folder = shutil.copytree(RUNS / "format1", tmp_path / "run")
    facts = json.loads((folder / "run.json").read_text())
    old = {"model": "NVIDIA TITAN X", "uuid": A, "bus": "0000:01:00.0"}
    facts["environment"]["gpus"] = [old, {**old, "uuid": None}]
    (folder / "run.json").write_text(json.dumps(facts))
    data = load(open_run(folder))
    assert [(gpu.uuid, gpu.label, gpu.memory_bytes) for gpu in data.gpus] == [
        (A, "GPU 0", None),
        ("GPU 1", "GPU 1", None),
    ]
    assert data.used_gpus == ()


def test_run_has_samples_and_allocators_of_its_gpus(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", Plan(seconds=10, gpus=1, idle_gpus=1)).folder)
    recorded = load(run)
    assert [gpu.label for gpu in recorded.gpus] == ["GPU 0", "GPU 1"]
    series = recorded.series
    assert len(series["gpu_power", gpu_uuid(0)]) == 51
    assert series["gpu_energy", gpu_uuid(0)].window.tolist() == [10.0]
    assert len(series["gpu_reserved", gpu_uuid(0)]) == 80
    assert ("gpu_reserved", gpu_uuid(1)) not in series


def test_gpu_without_facts_is_known_by_its_samples(tmp_path: Path) -> None:
    facts = {"environment": {"cpu": {"allowed": 4.0}}}
    plan = Plan(seconds=5, gpus=1, facts=facts)
    run = open_run(write_run(tmp_path / "run", plan).folder)
    assert [gpu.label for gpu in load(run).gpus] == ["GPU-74f7346c"]


def test_allocators_of_a_truncated_file(tmp_path: Path) -> None:
    paths = write_run(tmp_path / "run", Plan(seconds=10, gpus=1))
    (path,) = paths.events.glob("*.bin")
    path.write_bytes(path.read_bytes()[:-5000])
    (whole,) = read_file(path)
    assert 0 < len(allocator_series([whole])["gpu_reserved", gpu_uuid(0)]) < 80
