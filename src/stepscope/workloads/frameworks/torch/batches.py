"""Batches: from a loader, epoch after epoch; one that stays on the device; or of any size from a
few samples, for probes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, default_collate

from stepscope.errors import BadWorkload, TooFewSamples
from stepscope.sensors import procfs
from stepscope.workloads.frameworks.torch.data import Data, build_data
from stepscope.workloads.frameworks.torch.models import Built, Shape
from stepscope.workloads.reporting import RankPlacement
from stepscope.workloads.spec import Workload

_NOTHING = object()
_HELD = 16
"""Samples of ours: they are all alike."""
_SEEN = 128
"""Samples of a user's that are looked at, spread over the data set,"""
_SEEN_S = 3.0
"""for no longer than this."""
_ALIKE = 1.001


class LoaderFeed:
    """Goes through a loader, shuffled anew in every epoch, as long as it is asked."""

    def __init__(self, loader: DataLoader[Any], per_step: int = 1) -> None:
        """Batches that do not make a whole step at the end of an epoch are loaded, not given."""
        self._loader: DataLoader[Any] | None = loader
        self._epoch = 0
        self._given = 0
        self._iterator: Iterator[Any] | None = None
        self.batches_per_epoch: int | None = None
        with contextlib.suppress(TypeError):  # an IterableDataset without a length
            self.batches_per_epoch = len(loader) // per_step * per_step

    def next(self) -> Any:
        if self._iterator is None:
            self._iterator = self._begin_epoch()
        if self._given == self.batches_per_epoch:
            for _ in self._iterator:
                pass
        batch = next(self._iterator, _NOTHING)
        if batch is _NOTHING:
            had = self._given
            self._epoch += 1
            self._iterator = self._begin_epoch()
            batch = next(self._iterator, _NOTHING)
            if batch is _NOTHING and had:
                raise BadWorkload(
                    f"The data set gave {had} batches in its first pass, and none in its second",
                    "An IterableDataset must start again at each iter()",
                )
            if batch is _NOTHING:
                raise BadWorkload("The data set gave no whole batch", "Give a smaller --batch-size")
        self._given += 1
        return batch

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


Feed = LoaderFeed | ResidentFeed
"""Where batches come from. `next` waits until there is one."""


def make_loader(workload: Workload, place: RankPlacement, data: Data, pin: bool) -> DataLoader[Any]:
    """The loader of one rank: its shard of the data, in an order that depends on the seed alone."""
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(data.dataset, IterableDataset):
        # With one rank too: then two ranks go through the same samples as one with both batches.
        sampler = DistributedSampler(
            data.dataset, place.ranks, place.rank, shuffle=True, seed=workload.seed
        )
        shard = len(sampler)
        if shard < workload.batch_size:
            total = len(data.dataset)  # type: ignore[arg-type]
            each = "" if workload.ranks == 1 else f", {shard} for each of {workload.ranks} ranks"
            raise TooFewSamples(
                f"The data has {total} samples{each}: less than one batch of {workload.batch_size}",
                f"Give a --batch-size of at most {shard}, or more data",
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


def first_samples(batch: Any, size: int, part: int) -> Any | None:
    """A copy of them, so that the rest can go; None where it is not plain what a sample is."""
    found = tensors_in(batch)
    if not found or any(t is None or t.dim() == 0 or t.shape[0] != size for t in found):
        return None
    return map_tensors(batch, lambda tensor: tensor[:part].clone())


@dataclass(frozen=True)
class Samples:
    """A few samples and what makes a batch of them."""

    samples: Sequence[Any]
    collate: Callable[[list[Any]], Any]
    of: int | None
    """How many the data set has, where that says how large a batch can be."""
    varies: bool = False

    @property
    def sample_bytes(self) -> int:
        """What one more sample adds to a batch on the host."""
        one, three = bytes_in(self.on_host(1)), bytes_in(self.on_host(3))
        return max(1, (three - one) // 2 or one)

    def on_host(self, size: int) -> Any:
        return self.collate([self.samples[i % len(self.samples)] for i in range(size)])

    def is_plain(self) -> bool:
        """Whether a batch is nothing but tensors with a row for each sample, in one nesting."""
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
        """A batch where it is trained on. Of a plain one, nothing larger than a few samples is made
        on the host: it takes no time, and the device allocates what it does in training."""
        if device.type == "cpu" or not self.is_plain():
            needed, available = size * self.sample_bytes, procfs.meminfo().available
            if available is not None and 2 * needed > available:  # or the kernel ends somebody
                mib = f"{needed >> 20:,} MiB"
                raise MemoryError(f"a batch of {mib} is more than the host bears")
            return move(self.on_host(size))
        few = self.on_host(min(size, len(self.samples)))
        return map_tensors(few, lambda tensor: _repeated(tensor, size, device, channels_last))


def samples_for(workload: Workload, built: Built, shape: Shape | None) -> Samples:
    """Of our data any will do, as long as it has the shape; of a user's the largest are found."""
    if built.own is None:
        assert shape is not None
        random = replace(workload, data="", data_path=None, samples=_HELD, fraction=1.0)
        dataset = build_data(replace(random, cache="as-is"), shape).dataset
        held = [dataset[i] for i in range(_HELD)]
        return Samples(held, default_collate, None)
    dataset, collate = built.own.data, built.own.collate or default_collate
    of: int | None = None
    if isinstance(dataset, IterableDataset):
        source: Iterable[Any] = islice(iter(dataset), _SEEN)
    else:
        of = len(dataset)  # type: ignore[arg-type]
        seen_of = min(of, _SEEN)
        source = (dataset[number * of // seen_of] for number in range(seen_of))
    until = time.monotonic() + _SEEN_S
    seen: list[Any] = []
    for sample in source:
        seen.append(sample)
        if time.monotonic() > until:
            break
    if not seen:
        raise BadWorkload("The data set gave no sample", "Its items are what is trained on")
    sizes = [bytes_in(sample) for sample in seen]
    largest = max(sizes)
    if largest > _ALIKE * min(sizes):
        return Samples([seen[sizes.index(largest)]], collate, of, varies=True)
    return Samples(seen[:_HELD], collate, of)


def bytes_in(thing: Any) -> int:
    """Bytes of all tensors, arrays and texts in something nested."""
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
    if hasattr(thing, "getbands"):  # a picture of Pillow
        width, height = thing.size
        return 3 * width * height or 8
    return 8


def tensors_in(thing: Any) -> list[torch.Tensor | None]:
    """The tensors in something nested; None for each thing that is none."""
    if isinstance(thing, torch.Tensor):
        return [thing]
    if isinstance(thing, Mapping):
        thing = tuple(thing.values())
    if isinstance(thing, (list, tuple)):
        return [found for part in thing for found in tensors_in(part)]
    return [None]


def _repeated(
    few: torch.Tensor, size: int, device: torch.device, channels_last: bool
) -> torch.Tensor:
    """Rows over and over, in one new tensor, as a copy of a whole batch would have made it."""
    layout = layout_of(few) if channels_last else torch.contiguous_format
    if layout == torch.preserve_format:
        layout = torch.contiguous_format
    batch = torch.empty(
        (size, *few.shape[1:]), dtype=few.dtype, device=device, memory_format=layout
    )
    copied = min(size, few.shape[0])
    batch[:copied].copy_(few[:copied])
    while copied < size:  # what is there already is copied further, twice as much each time
        more = min(copied, size - copied)
        batch[copied : copied + more].copy_(batch[:more])
        copied += more
    return batch
