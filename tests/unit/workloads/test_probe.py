"""One probe: the training cycle, its measurements, and its failures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

from stepscope.errors import WorkloadError  # noqa: E402
from stepscope.workloads.frameworks.torch import probe  # noqa: E402
from stepscope.workloads.frameworks.torch.batches import samples_for  # noqa: E402
from stepscope.workloads.frameworks.torch.models import Built, CustomParts  # noqa: E402
from stepscope.workloads.frameworks.torch.probe import (  # noqa: E402
    GpuMeter,
    LoadedWorkload,
    load_workload,
)
from stepscope.workloads.probing import ProbeRequest, ProbeResult  # noqa: E402
from stepscope.workloads.spec import make_workload  # noqa: E402

MiB, GiB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Texts(Dataset[Any]):
    """Samples of 4 to 19 numbers."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.ones(4 + index % 16)


def padded(samples: list[Any]) -> Any:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, batch: Any) -> Any:
        return batch.mean() * self.scale.sum()


class Trained:
    """A loaded workload that records each batch: its size, and whether it is trained on."""

    def __init__(
        self, then: Callable[[int, bool], None] = lambda size, trains: None, **settings: Any
    ):
        self.seen: list[tuple[int, bool]] = []
        self.lengths: set[int] = set()
        self._then = then
        workload = make_workload("cnn", {"device": "cpu", **settings})
        built = Built(Mean(), self._loss, CustomParts(Texts(), padded))
        samples = samples_for(workload, built, None)
        self.loaded = LoadedWorkload(workload, built, samples, torch.device("cpu"))

    def _loss(self, model: Any, batch: Any) -> Any:
        self.seen.append((len(batch), model.training))
        self.lengths.add(batch.shape[1])
        self._then(len(batch), model.training)
        return model(batch)

    def probe(self, *batches: int, **more: Any) -> list[ProbeResult]:
        results: list[ProbeResult] = []
        self.loaded.probe(
            ProbeRequest(batches, **more), results.append, Path(tempfile.mkdtemp()) / "1.trace"
        )
        return results


def fails(at: Callable[[int, bool], bool], error: Exception) -> Callable[[int, bool], None]:
    def then(size: int, trains: bool) -> None:
        if at(size, trains):
            raise error

    return then


# The training cycle


def test_a_probe_runs_the_full_cycle() -> None:
    trained = Trained()
    (result,) = trained.probe(10)
    steps, part, evaluation = [(10, True)] * 3, [(4, True)], [(10, False)]
    assert trained.seen == steps + part + evaluation + [(10, True)] * 2
    assert result.is_ok and result.notes == ()
    assert len(result.step_s) == len(result.allocated_bytes) == 5


def test_without_the_cycle_there_are_only_steps() -> None:
    trained = Trained()
    assert len(trained.probe(10, 20, steps=2, cycle=False)) == 2
    assert trained.seen == [(10, True)] * 2 + [(20, True)] * 2


def test_the_smaller_batch_is_never_a_single_sample() -> None:
    trained = Trained()
    trained.probe(3, steps=1, steps_after=1)
    trained.probe(2, steps=1, steps_after=1)
    assert [size for size, _ in trained.seen] == [3, 2, 3, 3] + [2, 2, 2]


def test_samples_of_different_sizes_are_probed_with_the_largest() -> None:
    trained = Trained()
    assert trained.loaded.subject.variable_size and trained.loaded.subject.samples == 64
    trained.probe(10)
    assert trained.lengths == {19}


def test_accumulated_batches_are_one_step() -> None:
    trained = Trained(accumulate=3)
    (result,) = trained.probe(10, steps=2, cycle=False)
    assert len(trained.seen) == 6 and len(result.step_s) == 2


@pytest.mark.parametrize(
    ("settings", "states"),
    [
        ({"optimizer": "sgd", "momentum": 0.0}, 0),
        ({"optimizer": "sgd", "momentum": 0.9}, 1),
        ({"optimizer": "adam"}, 2),
    ],
)
def test_parts_are_measured(settings: dict[str, Any], states: int) -> None:
    (result,) = Trained(**settings).probe(10)
    parts = result.parts
    assert (parts.weights_bytes, parts.gradients_bytes, parts.inputs_bytes) == (12, 12, 10 * 19 * 4)
    assert states * 12 <= parts.optimizer_bytes <= states * 12 + 4  # Adam has a step counter
    assert result.allocated_peak_bytes >= max(result.allocated_bytes) - 64 * MiB > 0


def test_a_built_in_model_is_loaded_on_the_cpu_and_trained() -> None:
    loaded = load_workload(make_workload("cnn", {"device": "cpu", "precision": "bf16"}))
    assert loaded.subject.device == "cpu" and loaded.samples.of is None
    results: list[ProbeResult] = []
    request = ProbeRequest((2,), steps=2, cycle=False)
    loaded.probe(request, results.append, Path(tempfile.mkdtemp()) / "1.trace")
    (result,) = results
    assert result.is_ok and result.parts.weights_bytes > 4 * loaded.subject.parameters - 1


def test_a_missing_gpu_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(WorkloadError, match="PyTorch cannot use a GPU"):
        load_workload(make_workload("cnn", {"device": "cuda"}))


# Failures


def test_a_failed_batch_ends_the_probe() -> None:
    trained = Trained(fails(lambda size, _: size == 20, ValueError("too many values to unpack")))
    results = trained.probe(10, 20, 30, cycle=False)
    assert [(each.batch, each.kind) for each in results] == [(10, "ok"), (20, "error")]
    assert results[-1].phase == "step 1" and "too many values to unpack" in results[-1].message
    assert results[-1].hint.startswith("A batch has the same parts as a sample")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "host_oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "host_oom"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "gpu_oom"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
        (WorkloadError("No classes", "Pass some"), "workload"),
    ],
)
def test_kinds_of_failures(error: Exception, kind: str) -> None:
    trained = Trained(fails(lambda size, trains: size == 4, error))
    (result,) = trained.probe(10)
    assert (result.kind, result.phase) == (kind, "smaller batch")
    assert result.message and len(result.step_s) == 3
    if kind == "workload":
        assert (result.message, result.hint) == ("No classes", "Pass some")


def test_an_unsupported_evaluation_is_skipped_with_a_note() -> None:
    trained = Trained(fails(lambda _, trains: not trains, ValueError("no labels\nin evaluation")))
    (result,) = trained.probe(10)
    assert result.is_ok and result.notes == ("the evaluation was skipped: no labels",)
    assert trained.seen[-2:] == [(10, True)] * 2


def test_an_evaluation_that_runs_out_of_memory_fails() -> None:
    trained = Trained(fails(lambda _, trains: not trains, MemoryError("no more")))
    (result,) = trained.probe(10)
    assert (result.kind, result.phase) == ("host_oom", "evaluation")


def test_an_error_without_a_message_is_named() -> None:
    (result,) = Trained(fails(lambda *_: True, AssertionError())).probe(10)
    assert result.message == "AssertionError"


def test_an_error_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained()

    def fails_to_build(parameters: Any) -> Any:
        raise ValueError("no such optimizer")

    own = CustomParts(Texts(), padded, fails_to_build)
    trained.loaded = replace(trained.loaded, built=replace(trained.loaded.built, custom=own))
    (result,) = trained.probe(10)
    assert (result.kind, result.phase, result.batch) == ("error", "move to device", 10)
    assert trained.loaded.subject.custom_optimizer


# Messages of PyTorch

OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of "
    "which 512.00 MiB is free. 15.00 GiB allowed; Of the allocated memory 13.00 GiB is allocated "
    "by PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated. If reserved but ..."
)


def test_the_shortfall_is_parsed_from_the_message() -> None:
    (result,) = Trained(fails(lambda *_: True, torch.OutOfMemoryError(OOM))).probe(10, cap=15 * GiB)
    assert (result.kind, result.requested_bytes) == ("gpu_oom", 2 * GiB)
    assert result.shortfall_bytes == 2 * GiB - GiB // 2
    assert result.message == f"OutOfMemoryError: {OOM}"
    (result,) = Trained(fails(lambda *_: True, torch.OutOfMemoryError(OOM))).probe(10)
    assert result.shortfall_bytes == 2 * GiB - 512 * MiB


@pytest.mark.parametrize("text", ["CUDA out of memory.", "CUDA out of memory. Tried to allocate"])
def test_missing_sizes_are_unknown(text: str) -> None:
    (result,) = Trained(fails(lambda *_: True, torch.OutOfMemoryError(text))).probe(10)
    assert (result.kind, result.requested_bytes, result.shortfall_bytes) == ("gpu_oom", None, None)


def test_a_memory_history_is_converted_to_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events as PyTorch records them: a free has two events, and addresses are reused."""
    history = [
        {"action": "free_completed", "addr": 7, "size": 5},  # allocated before the history
        {"action": "segment_alloc", "addr": 0, "size": 2 * MiB},
        {"action": "alloc", "addr": 10, "size": 512},
        {"action": "alloc", "addr": 20, "size": 1024},
        {"action": "free_requested", "addr": 10, "size": 512},
        {"action": "free_completed", "addr": 10, "size": 512},
        {"action": "alloc", "addr": 10, "size": 2048},
        {"action": "free_completed", "addr": 10, "size": 2048},
        {"action": "snapshot", "addr": 0, "size": 0},
    ]
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_snapshot", lambda device: {"device_traces": [[], history]})
    monkeypatch.setattr(memory, "_record_memory_history", lambda *_: None)
    assert GpuMeter(torch.device("cuda", 1)).events() == [512, 1024, ~0, 2048, ~2]


def test_sizes_are_parsed_in_any_unit() -> None:
    units = [("bytes", 1), ("KiB", 1 << 10), ("MiB", MiB), ("GiB", GiB), ("TiB", 1 << 40)]
    for unit, size in units:
        assert probe._size(probe._REQUESTED, f"Tried to allocate 1.50 {unit}.") == int(1.5 * size)
