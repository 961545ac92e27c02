"""Batches: from a loader, one that stays on the device, or of any size from a few samples for
probes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from stepscope.errors import TooFewSamples, WorkloadError
from stepscope.sensors import procfs
from stepscope.workloads.frameworks.torch.data import Data, build_data
from stepscope.workloads.frameworks.torch.models import Built, Shape
from stepscope.workloads.reporting import RankPlacement
from stepscope.workloads.spec import Workload

_NO_BATCH = object()
_KEPT_SAMPLES = 16
_CHECKED_SAMPLES = 128
"""Samples of a custom dataset that are checked for their size, evenly distributed over it."""
_CHECK_SECONDS = 3.0
_SAME_SIZE = 1.001
"""Samples count as equally large up to this ratio."""


class LoaderFeed:
    """Endless batches from a loader, shuffled in every epoch."""

    def __init__(self, loader: DataLoader[Any], per_step: int = 1) -> None:
        """Batches at the end of an epoch that do not fill a step are loaded but not returned."""
        self._loader: DataLoader[Any] | None = loader
        self._epoch = 0
        self._returned = 0
        self._iterator: Iterator[Any] | None = None
        self.batches_per_epoch: int | None = None
        with contextlib.suppress(TypeError):  # an IterableDataset without a length
            self.batches_per_epoch = len(loader) // per_step * per_step

    def next(self) -> Any:
        if self._iterator is None:
            self._iterator = self._begin_epoch()
        if self._returned == self.batches_per_epoch:
            for _ in self._iterator:
                pass
        batch = next(self._iterator, _NO_BATCH)
        if batch is _NO_BATCH:
            returned = self._returned
            self._epoch += 1
            self._iterator = self._begin_epoch()
            batch = next(self._iterator, _NO_BATCH)
            if batch is _NO_BATCH and returned:
                raise WorkloadError(
                    f"The dataset yielded {returned} batches in the first epoch and none in the "
                    "second",
                    "An IterableDataset must start from the beginning at each iter()",
                )
            if batch is _NO_BATCH:
                raise WorkloadError(
                    "The dataset yielded no full batch", "Use a smaller --batch-size"
                )
        self._returned += 1
        return batch

    def close(self) -> None:
        """Stop the workers now: at interpreter exit each of them may take five seconds."""
        self._iterator = None
        if self._loader is not None:
            self._loader._iterator = None
        self._loader = None

    def _begin_epoch(self) -> Iterator[Any]:
        assert self._loader is not None
        self._returned = 0
        if isinstance(self._loader.sampler, DistributedSampler):
            self._loader.sampler.set_epoch(self._epoch)
        return iter(self._loader)


class ResidentFeed:
    """Always the same batch, already on the device, to measure the computation alone."""

    def __init__(self, batch: Any, batches_per_epoch: int | None) -> None:
        self._batch = batch
        self.batches_per_epoch = batches_per_epoch

    def next(self) -> Any:
        return self._batch

    def close(self) -> None:
        self._batch = None


Feed = LoaderFeed | ResidentFeed
"""Source of batches. `next` waits for a batch."""


def make_loader(
    workload: Workload, placement: RankPlacement, data: Data, pin: bool
) -> DataLoader[Any]:
    """The loader for the shard of one rank, in an order that depends only on the seed."""
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(data.dataset, IterableDataset):
        # Also with one rank, so that two ranks see the same samples as one rank with both batches.
        sampler = DistributedSampler(
            data.dataset, placement.ranks, placement.rank, shuffle=True, seed=workload.seed
        )
        shard = len(sampler)
        if shard < workload.batch_size:
            total = len(data.dataset)  # type: ignore[arg-type]
            each = "" if workload.ranks == 1 else f", {shard} for each of {workload.ranks} ranks"
            raise TooFewSamples(
                f"The data has {total} samples{each}, fewer than one batch of "
                f"{workload.batch_size}",
                f"Use a --batch-size of at most {shard}, or more data",
            )
    return DataLoader(
        data.dataset,
        batch_size=workload.batch_size,
        sampler=sampler,
        num_workers=workload.workers,
        collate_fn=data.collate,
        pin_memory=pin,
        drop_last=True,
        persistent_workers=workload.persistent and workload.workers > 0,
        prefetch_factor=workload.prefetch if workload.workers else None,
        generator=torch.Generator().manual_seed(workload.seed),
    )


def mover(device: torch.device, channels_last: bool) -> Callable[[Any], Any]:
    """A function that moves a nested batch to the device; copies overlap if it is pinned."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        layout = layout_of(tensor) if channels_last else torch.preserve_format
        return tensor.to(device, non_blocking=True, memory_format=layout)

    def other(thing: Any) -> Any:
        return thing.to(device) if hasattr(thing, "to") else thing

    return lambda batch: map_tensors(batch, moved, other)


def map_tensors(
    thing: Any,
    change: Callable[[torch.Tensor], torch.Tensor],
    other: Callable[[Any], Any] = lambda thing: thing,
) -> Any:
    """Apply `change` to every tensor of a nested structure, and `other` to everything else."""

    def mapped(thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return change(thing)
        if isinstance(thing, Mapping):
            changed = {key: mapped(value) for key, value in thing.items()}
            with contextlib.suppress(Exception):  # keeps types such as BatchEncoding
                return type(thing)(changed)  # type: ignore[call-arg]
            return changed
        if isinstance(thing, tuple) and hasattr(thing, "_fields"):
            return type(thing)(*(mapped(value) for value in thing))
        if isinstance(thing, (list, tuple)):
            return type(thing)(mapped(value) for value in thing)
        return other(thing)

    return mapped(thing)


def layout_of(tensor: torch.Tensor) -> torch.memory_format:
    """The channels-last format for a tensor with channels."""
    if tensor.dim() == 4:
        return torch.channels_last
    return torch.channels_last_3d if tensor.dim() == 5 else torch.preserve_format


def first_samples(batch: Any, size: int, part: int) -> Any | None:
    """A copy of the first samples; None if the batch is not made of tensors with one row each."""
    tensors = tensors_in(batch)
    if not tensors or any(t is None or t.dim() == 0 or t.shape[0] != size for t in tensors):
        return None
    return map_tensors(batch, lambda tensor: tensor[:part].clone())


@dataclass(frozen=True)
class Samples:
    """A few samples and the function that makes a batch from them."""

    samples: Sequence[Any]
    collate: Callable[[list[Any]], Any]
    of: int | None
    """Size of the dataset, if it limits the batch size."""
    varies: bool = False

    @property
    def sample_bytes(self) -> int:
        """Bytes that one more sample adds to a batch on the host."""
        one, three = bytes_in(self.on_host(1)), bytes_in(self.on_host(3))
        return max(1, (three - one) // 2 or one)

    def on_host(self, size: int) -> Any:
        return self.collate([self.samples[i % len(self.samples)] for i in range(size)])

    def is_plain(self) -> bool:
        """Whether a batch consists only of tensors with one row per sample."""
        two, three = tensors_in(self.on_host(2)), tensors_in(self.on_host(3))
        return len(two) == len(three) > 0 and all(
            a is not None
            and b is not None
            and a.dim() > 0
            and (a.shape[0], b.shape[0]) == (2, 3)
            and a.shape[1:] == b.shape[1:]
            for a, b in zip(two, three, strict=True)
        )

    def on_device(
        self, size: int, device: torch.device, channels_last: bool, move: Callable[[Any], Any]
    ) -> Any:
        """A batch on the device.

        A plain batch is expanded on the device from a few samples, which is fast and allocates the
        same device memory as in training.
        """
        if device.type == "cpu" or not self.is_plain():
            needed, available = size * self.sample_bytes, procfs.meminfo().available
            if available is not None and 2 * needed > available:  # or the kernel kills
                raise MemoryError(f"a batch of {needed >> 20:,} MiB does not fit in host memory")
            return move(self.on_host(size))
        few = self.on_host(min(size, len(self.samples)))
        return map_tensors(few, lambda tensor: _repeated(tensor, size, device, channels_last))


def samples_for(workload: Workload, built: Built, shape: Shape | None) -> Samples:
    """Random samples of the model's shape, or the largest samples of a custom dataset."""
    if built.custom is None:
        assert shape is not None
        random = replace(workload, data="", data_path=None, samples=_KEPT_SAMPLES, fraction=1.0)
        dataset = build_data(replace(random, page_cache="as-is"), shape).dataset
        kept = [dataset[i] for i in range(_KEPT_SAMPLES)]
        return Samples(kept, default_collate, None)
    dataset, collate = built.custom.data, built.custom.collate or default_collate
    of: int | None = None
    if isinstance(dataset, IterableDataset):
        source: Iterable[Any] = islice(iter(dataset), _CHECKED_SAMPLES)
    else:
        of = len(dataset)  # type: ignore[arg-type]
        count = min(of, _CHECKED_SAMPLES)
        source = (dataset[number * of // count] for number in range(count))
    deadline = time.monotonic() + _CHECK_SECONDS
    checked: list[Any] = []
    for sample in source:
        checked.append(sample)
        if time.monotonic() > deadline:
            break
    if not checked:
        raise WorkloadError("The dataset is empty", "Return data with at least one sample")
    sizes = [bytes_in(sample) for sample in checked]
    largest = max(sizes)
    if largest > _SAME_SIZE * min(sizes):
        return Samples([checked[sizes.index(largest)]], collate, of, varies=True)
    return Samples(checked[:_KEPT_SAMPLES], collate, of)


def bytes_in(thing: Any) -> int:
    """Bytes of all tensors, arrays and strings in a nested structure."""
    if isinstance(thing, torch.Tensor):
        return thing.nbytes
    if isinstance(thing, Mapping):
        return sum(map(bytes_in, thing.values()))
    if isinstance(thing, (str, bytes)):
        return len(thing)
    if hasattr(thing, "nbytes"):
        return int(thing.nbytes)
    if isinstance(thing, (list, tuple)):
        return sum(map(bytes_in, thing))
    if hasattr(thing, "getbands"):  # a Pillow image
        width, height = thing.size
        return 3 * width * height or 8
    return 8


def tensors_in(thing: Any) -> list[torch.Tensor | None]:
    """The tensors in a nested structure; None for each other value."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, Mapping):
        thing = tuple(thing.values())
    if isinstance(thing, (list, tuple)):
        return [tensor for part in thing for tensor in tensors_in(part)]
    return [None]


def _repeated(
    few: torch.Tensor, size: int, device: torch.device, channels_last: bool
) -> torch.Tensor:
    """Repeat the rows in one new tensor, allocated like a copied batch."""
    layout = layout_of(few) if channels_last else torch.contiguous_format
    if layout == torch.preserve_format:
        layout = torch.contiguous_format
    batch = torch.empty(
        (size, *few.shape[1:]), dtype=few.dtype, device=device, memory_format=layout
    )
    copied = min(size, few.shape[0])
    batch[:copied].copy_(few[:copied])
    while copied < size:  # double the filled part each time
        more = min(copied, size - copied)
        batch[copied : copied + more].copy_(batch[:more])
        copied += more
    return batch
