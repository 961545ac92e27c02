"""Batches of any size from a few samples: correct bytes, and the largest samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import Dataset, IterableDataset, default_collate  # noqa: E402

from stepscope.errors import WorkloadError  # noqa: E402
from stepscope.workloads.frameworks.torch.batches import (  # noqa: E402
    Samples,
    bytes_in,
    samples_for,
    tensors_in,
)
from stepscope.workloads.frameworks.torch.models import Built, CustomParts, Shape  # noqa: E402
from stepscope.workloads.spec import make_workload  # noqa: E402

CPU, META = torch.device("cpu"), torch.device("meta")


class Listed(Dataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.seen.append(index)
        return self.samples[index]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield torch.zeros(4), 1


def of_user(data: Dataset[Any], collate: Any = None) -> Samples:
    built = Built(nn.Linear(1, 1), lambda model, batch: batch, CustomParts(data, collate))
    return samples_for(make_workload("cnn", {}), built, None)


def padded(samples: list[Any]) -> Any:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


def test_bytes_of_nested_structures() -> None:
    assert bytes_in(torch.zeros(3, 5)) == 60
    assert bytes_in(np.zeros(7, dtype=np.int16)) == 14
    assert bytes_in("text") == bytes_in(b"text") == 4
    assert bytes_in(5) == bytes_in(None) == 8
    assert bytes_in({"a": torch.zeros(2), "b": [torch.zeros(1), (torch.zeros(1), "ab")]}) == 18


def test_bytes_of_an_image() -> None:
    image = pytest.importorskip("PIL.Image")
    assert bytes_in(image.new("RGB", (20, 10))) == 600


def test_tensors_of_nested_structures() -> None:
    one, other = torch.zeros(1), torch.zeros(2)
    assert tensors_in({"a": one, "b": (other, "text")}) == [one, other, None]


def test_samples_of_a_built_in_model() -> None:
    workload = make_workload("cnn", {})
    built = Built(nn.Linear(1, 1), lambda model, batch: batch)
    samples = samples_for(workload, built, Shape("image", 7, size=48))
    assert samples.of is None and not samples.varies and samples.is_plain()
    assert samples.sample_bytes == 3 * 48 * 48 * 4 + 8
    inputs, targets = samples.on_host(100)
    assert inputs.shape == (100, 3, 48, 48) and targets.shape == (100,)
    assert int(targets.max()) < 7


def test_the_largest_sample_of_custom_data_is_used() -> None:
    lengths = [5, 9, 30, 7] * 10
    samples = of_user(Listed([torch.zeros(length) for length in lengths]), padded)
    assert samples.varies and samples.of == 40
    assert samples.on_host(6).shape == (6, 30)
    assert samples.sample_bytes == 120


def test_samples_from_the_whole_data_set_are_checked() -> None:
    data = Listed([torch.zeros(3)] * 990 + [torch.zeros(50)] * 10)
    samples = of_user(data, padded)
    assert samples.varies and samples.on_host(2).shape == (2, 50)
    assert len(data.seen) <= 128 and min(data.seen) == 0


def test_samples_of_equal_size_are_repeated_in_order() -> None:
    samples = of_user(Listed([(torch.full((2,), float(n)), n) for n in range(5)]))
    assert not samples.varies and samples.of == 5
    inputs, targets = samples.on_host(7)
    assert targets.tolist() == [0, 1, 2, 3, 4, 0, 1] and inputs[5].tolist() == [0.0, 0.0]


def test_an_endless_data_set() -> None:
    samples = of_user(Endless())
    assert samples.of is None and samples.sample_bytes == 24


def test_an_empty_data_set_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="The dataset is empty"):
        of_user(Listed([]))


@pytest.mark.parametrize(
    ("sample", "collate", "is_plain"),
    [
        ((torch.zeros(3), 1), default_collate, True),
        ({"a": torch.zeros(3), "b": torch.zeros(2, 2)}, default_collate, True),
        (torch.zeros(3), torch.cat, False),
        (torch.zeros(3), lambda batch: (torch.stack(batch), len(batch)), False),
        (torch.zeros(3), lambda batch: torch.zeros(()), False),
        ((torch.zeros(3), "text"), default_collate, False),
        (torch.zeros(3), list, False),
        (torch.zeros(3), lambda batch: torch.zeros(len(batch), len(batch)), False),
    ],
)
def test_a_batch_is_plain_if_it_has_one_row_per_sample(
    sample: Any, collate: Any, is_plain: bool
) -> None:
    assert Samples([sample], collate, None).is_plain() == is_plain


def test_a_batch_for_a_device_is_not_created_on_the_host() -> None:
    """The meta device has shapes but no memory."""
    samples = of_user(Listed([(torch.zeros(3, 8, 8), n) for n in range(5)]))
    inputs, targets = samples.on_device(1000, META, True, lambda batch: 1 / 0)
    assert inputs.shape == (1000, 3, 8, 8) and inputs.device == META
    assert inputs.is_contiguous(memory_format=torch.channels_last)
    assert targets.shape == (1000,) and targets.dtype == torch.int64
    inputs, _ = samples.on_device(1000, META, False, lambda batch: 1 / 0)
    assert inputs.is_contiguous()


def test_other_batches_are_created_on_the_host_and_moved() -> None:
    plain = of_user(Listed([torch.zeros(3)]))
    odd = of_user(Listed([torch.zeros(3)]), lambda batch: (torch.stack(batch), len(batch)))
    moved, count = plain.on_device(9, CPU, False, lambda batch: ("moved", len(batch)))
    assert (moved, count) == ("moved", 9)
    assert odd.on_device(9, META, False, lambda batch: ("moved", batch[1])) == ("moved", 9)


@pytest.mark.parametrize("size", [1, 4, 5, 6, 23])
def test_rows_are_repeated(size: int) -> None:
    from stepscope.workloads.frameworks.torch.batches import _repeated

    few = torch.arange(10).reshape(5, 2)
    rows = _repeated(few[: min(size, 5)], size, CPU, False)
    assert rows.shape == (size, 2)
    assert {tuple(row) for row in rows.tolist()} == {tuple(row) for row in few[:size].tolist()}
