"""One probe: the whole cycle of a training, what it reads on the way, and how it fails."""

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

from stepscope.errors import BadWorkload  # noqa: E402
from stepscope.workloads.frameworks.torch import probe  # noqa: E402
from stepscope.workloads.frameworks.torch.batches import samples_for  # noqa: E402
from stepscope.workloads.frameworks.torch.models import Built, Own  # noqa: E402
from stepscope.workloads.frameworks.torch.probe import GpuMeter, HeldWorkload, hold  # noqa: E402
from stepscope.workloads.probing import ProbeRequest, ProbeResult  # noqa: E402
from stepscope.workloads.spec import make_workload  # noqa: E402

MiB, GiB = 1 << 20, 1 << 30


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Texts(Dataset[Any]):
    """Of 4 to 19 numbers."""

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
    """A held workload of which every batch is noted: its size, and whether it is trained on."""

    def __init__(
        self, then: Callable[[int, bool], None] = lambda size, trains: None, **settings: Any
    ):
        self.seen: list[tuple[int, bool]] = []
        self.lengths: set[int] = set()
        self._then = then
        workload = make_workload("cnn", {"device": "cpu", **settings})
        built = Built(Mean(), self._loss, Own(Texts(), padded))
        samples = samples_for(workload, built, None)
        self.held = HeldWorkload(workload, built, samples, torch.device("cpu"))

    def _loss(self, model: Any, batch: Any) -> Any:
        self.seen.append((len(batch), model.training))
        self.lengths.add(batch.shape[1])
        self._then(len(batch), model.training)
        return model(batch)

    def probe(self, *batches: int, **more: Any) -> list[ProbeResult]:
        told: list[ProbeResult] = []
        self.held.probe(
            ProbeRequest(batches, **more), told.append, Path(tempfile.mkdtemp()) / "1.trace"
        )
        return told


def fails(at: Callable[[int, bool], bool], error: Exception) -> Callable[[int, bool], None]:
    def then(size: int, trains: bool) -> None:
        if at(size, trains):
            raise error

    return then


# What is done


def test_a_probe_goes_through_the_whole_cycle() -> None:
    trained = Trained()
    (told,) = trained.probe(10)
    steps, part, evaluation = [(10, True)] * 3, [(4, True)], [(10, False)]
    assert trained.seen == steps + part + evaluation + [(10, True)] * 2
    assert told.is_ok and len(told.step_s) == len(told.kept) == 5 and told.notes == ()


def test_without_the_cycle_there_are_only_steps() -> None:
    trained = Trained()
    assert len(trained.probe(10, 20, steps=2, cycle=False)) == 2
    assert trained.seen == [(10, True)] * 2 + [(20, True)] * 2


def test_the_smaller_batch_is_never_a_single_sample() -> None:
    trained = Trained()
    trained.probe(3, steps=1, again=1)
    trained.probe(2, steps=1, again=1)
    assert [size for size, _ in trained.seen] == [3, 2, 3, 3] + [2, 2, 2]


def test_samples_of_other_sizes_are_probed_by_the_largest() -> None:
    trained = Trained()
    assert trained.held.subject.varies and trained.held.subject.samples == 64
    trained.probe(10)
    assert trained.lengths == {19}


def test_accumulated_batches_make_one_step() -> None:
    trained = Trained(accumulate=3)
    (told,) = trained.probe(10, steps=2, cycle=False)
    assert len(trained.seen) == 6 and len(told.step_s) == 2


@pytest.mark.parametrize(
    ("settings", "states"),
    [
        ({"optimizer": "sgd", "momentum": 0.0}, 0),
        ({"optimizer": "sgd", "momentum": 0.9}, 1),
        ({"optimizer": "adam"}, 2),
    ],
)
def test_parts_are_counted(settings: dict[str, Any], states: int) -> None:
    (told,) = Trained(**settings).probe(10)
    parts = told.parts
    assert (parts.weights, parts.gradients, parts.inputs) == (12, 12, 10 * 19 * 4)
    assert states * 12 <= parts.optimizer <= states * 12 + 4  # Adam counts its steps
    assert told.allocated_peak >= max(told.kept) - 64 * MiB > 0


def test_a_model_of_ours_is_held_on_the_cpu_and_trained() -> None:
    held = hold(make_workload("cnn", {"device": "cpu", "precision": "bf16"}))
    assert held.subject.device == "cpu" and held.samples.of is None
    told: list[ProbeResult] = []
    held.probe(
        ProbeRequest((2,), steps=2, cycle=False), told.append, Path(tempfile.mkdtemp()) / "1.trace"
    )
    assert told[0].is_ok and told[0].parts.weights > 4 * held.subject.parameters - 1


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(BadWorkload, match="no GPU that PyTorch can use"):
        hold(make_workload("cnn", {"device": "cuda"}))


# How it fails


def test_a_batch_that_fails_is_the_last() -> None:
    trained = Trained(fails(lambda size, _: size == 20, ValueError("too many values to unpack")))
    told = trained.probe(10, 20, 30, cycle=False)
    assert [(each.batch, each.kind) for each in told] == [(10, "ok"), (20, "error")]
    assert told[-1].phase == "step 1" and "too many values to unpack" in told[-1].message
    assert told[-1].hint.startswith("A batch has the parts that a sample has")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "host_oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "host_oom"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "gpu_oom"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
        (BadWorkload("No classes", "Give some"), "workload"),
    ],
)
def test_failures_are_told_apart(error: Exception, kind: str) -> None:
    trained = Trained(fails(lambda size, trains: size == 4, error))
    (told,) = trained.probe(10)
    assert (told.kind, told.phase) == (kind, "smaller batch")
    assert told.message and len(told.step_s) == 3
    if kind == "workload":
        assert (told.message, told.hint) == ("No classes", "Give some")


def test_an_evaluation_that_is_not_meant_to_be_is_noted_and_left_out() -> None:
    trained = Trained(fails(lambda _, trains: not trains, ValueError("no labels\nin evaluation")))
    (told,) = trained.probe(10)
    assert told.is_ok and told.notes == ("evaluation was not tried: no labels",)
    assert trained.seen[-2:] == [(10, True)] * 2


def test_an_evaluation_without_memory_is_a_failure() -> None:
    trained = Trained(fails(lambda _, trains: not trains, MemoryError("no more")))
    (told,) = trained.probe(10)
    assert (told.kind, told.phase) == ("host_oom", "evaluation")


def test_an_error_without_words_is_named() -> None:
    (told,) = Trained(fails(lambda *_: True, AssertionError())).probe(10)
    assert told.message == "AssertionError"


def test_a_model_that_cannot_be_made_ready_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = Trained()

    def refuses(parameters: Any) -> Any:
        raise ValueError("no such optimizer")

    own = Own(Texts(), padded, refuses)
    trained.held = replace(trained.held, built=replace(trained.held.built, own=own))
    (told,) = trained.probe(10)
    assert (told.kind, told.phase, told.batch) == ("error", "the move to the device", 10)
    assert trained.held.subject.own_optimizer


# What PyTorch says

OOM = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of "
    "which 512.00 MiB is free. 15.00 GiB allowed; Of the allocated memory 13.00 GiB is allocated "
    "by PyTorch, and 1.50 GiB is reserved by PyTorch but unallocated. If reserved but ..."
)


def test_what_is_missing_is_read_from_what_pytorch_says() -> None:
    (told,) = Trained(fails(lambda *_: True, torch.OutOfMemoryError(OOM))).probe(10, cap=15 * GiB)
    assert (told.kind, told.wanted) == ("gpu_oom", 2 * GiB)
    assert told.missing == 2 * GiB - GiB // 2
    assert told.message == f"OutOfMemoryError: {OOM}"
    (told,) = Trained(fails(lambda *_: True, torch.OutOfMemoryError(OOM))).probe(10)
    assert told.missing == 2 * GiB - 512 * MiB


@pytest.mark.parametrize("text", ["CUDA out of memory.", "CUDA out of memory. Tried to allocate"])
def test_what_pytorch_does_not_say_is_not_known(text: str) -> None:
    (told,) = Trained(fails(lambda *_: True, torch.OutOfMemoryError(text))).probe(10)
    assert (told.kind, told.wanted, told.missing) == ("gpu_oom", None, None)


def test_a_history_becomes_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own words for it: a release is asked for first, and addresses come again."""
    history = [
        {"action": "free_completed", "addr": 7, "size": 5},  # made before the history began
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


def test_sizes_are_read_in_any_unit() -> None:
    said = [("bytes", 1), ("KiB", 1 << 10), ("MiB", MiB), ("GiB", GiB), ("TiB", 1 << 40)]
    for unit, size in said:
        assert probe._size(probe._WANTED, f"Tried to allocate 1.50 {unit}.") == int(1.5 * size)
