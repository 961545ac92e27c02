"""Batches for the loop: from a loader, epoch after epoch, or one that stays on the device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from stepscope.errors import BadWorkload
from stepscope.workloads.frameworks.torch.parts import Data
from stepscope.workloads.reporting import Place
from stepscope.workloads.spec import Workload

_NOTHING = object()


class Feed(Protocol):
    """Where batches come from. `next` waits until there is one."""

    batches_per_epoch: int | None

    def next(self) -> Any: ...

    def close(self) -> None: ...


class LoaderFeed:
    """Goes through a loader, shuffled anew in every epoch, as long as it is asked."""

    def __init__(self, loader: DataLoader[Any], per_step: int = 1) -> None:
        """Batches that do not make a whole step at the end of an epoch are loaded, not given."""
        self._loader: DataLoader[Any] | None = loader
        self._epoch = 0
        self._given = 0
        self._iterator: Iterator[Any] | None = None
        batches = _batches_in(loader)
        self.batches_per_epoch = None if batches is None else batches // per_step * per_step

    def next(self) -> Any:
        if self._iterator is None:
            self._iterator = self._begin_epoch()
        if self._given == self.batches_per_epoch:
            for _ in self._iterator:
                pass
        batch = next(self._iterator, _NOTHING)
        if batch is _NOTHING:
            batch = self._first_of_next_epoch()
        self._given += 1
        return batch

    def _first_of_next_epoch(self) -> Any:
        had = self._given
        self._epoch += 1
        self._iterator = self._begin_epoch()
        batch = next(self._iterator, _NOTHING)
        if batch is not _NOTHING:
            return batch
        if had:
            raise BadWorkload(
                f"The data set gave {had} batches in its first pass, and none in its second",
                "An IterableDataset must start again at each iter()",
            )
        raise BadWorkload("The data set gave no whole batch", "Give a smaller --batch-size")

    def close(self) -> None:
        """End the workers now: left to the interpreter's end, each may take five seconds."""
        self._iterator = None
        if self._loader is not None:
            self._loader._iterator = None
        self._loader = None

    def _begin_epoch(self) -> Iterator[Any]:
        assert self._loader is not None
        self._given = 0
        if isinstance(self._loader.sampler, DistributedSampler):
            self._loader.sampler.set_epoch(self._epoch)
        return iter(self._loader)


class ResidentFeed:
    """One batch, on the device already: what is left is the pure rate of computing."""

    def __init__(self, batch: Any, batches_per_epoch: int | None) -> None:
        self._batch = batch
        self.batches_per_epoch = batches_per_epoch

    def next(self) -> Any:
        return self._batch

    def close(self) -> None:
        self._batch = None


def make_loader(workload: Workload, place: Place, data: Data, pin: bool) -> DataLoader[Any]:
    """The loader of one rank: its shard of the data, in an order that depends on the seed alone."""
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(data.dataset, IterableDataset):
        # With one rank too: then two ranks go through the same samples as one with both batches.
        sampler = DistributedSampler(
            data.dataset, place.ranks, place.rank, shuffle=True, seed=workload.seed
        )
        _check_size(workload, data.dataset, len(sampler))
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


def _check_size(workload: Workload, dataset: Dataset[Any], shard: int) -> None:
    if shard < workload.batch_size:
        total = len(dataset)  # type: ignore[arg-type]
        of_rank = "" if workload.ranks == 1 else f", {shard} for each of {workload.ranks} ranks"
        raise BadWorkload(
            f"The data has {total} samples{of_rank}: less than one batch of {workload.batch_size}",
            f"Give a --batch-size of at most {shard}, or more data",
        )


def _batches_in(loader: DataLoader[Any]) -> int | None:
    try:
        return len(loader)
    except TypeError:  # an IterableDataset without a length
        return None


def mover(device: torch.device, channels_last: bool) -> Callable[[Any], Any]:
    """A function that takes a batch, of any nesting, to the device; copies overlap if pinned."""

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
    """The same nesting with every tensor changed, and what else there is by `other`."""

    def mapped(thing: Any) -> Any:
        if isinstance(thing, torch.Tensor):
            return change(thing)
        if isinstance(thing, Mapping):
            changed = {key: mapped(value) for key, value in thing.items()}
            with contextlib.suppress(Exception):  # a BatchEncoding, say, stays one
                return type(thing)(changed)  # type: ignore[call-arg]
            return changed
        if isinstance(thing, tuple) and hasattr(thing, "_fields"):
            return type(thing)(*(mapped(value) for value in thing))
        if isinstance(thing, (list, tuple)):
            return type(thing)(mapped(value) for value in thing)
        return other(thing)

    return mapped(thing)


def layout_of(tensor: torch.Tensor) -> torch.memory_format:
    """Channels last, for a tensor that has any."""
    if tensor.dim() == 4:
        return torch.channels_last
    return torch.channels_last_3d if tensor.dim() == 5 else torch.preserve_format
