"""Batches of any size from a few samples, for probes: what matters of them is their size.

Samples of different sizes are represented by the largest that was seen: a batch of those is the
worst that training can meet.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from stepscope.errors import BadWorkload
from stepscope.workloads.frameworks.torch.data import build_data
from stepscope.workloads.frameworks.torch.feed import layout_of, map_tensors
from stepscope.workloads.frameworks.torch.parts import Built, Shape
from stepscope.workloads.spec import Workload

_HELD = 16
"""Samples of ours: they are all alike."""
_SEEN = 128
"""Samples of a user's that are looked at, spread over the data set,"""
_SEEN_S = 3.0
"""for no longer than this."""
_ALIKE = 1.001


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
            _refuse_to_fill_the_host(size * self.sample_bytes)
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
    return _largest_of(built.own.data, built.own.collate or default_collate)


def _largest_of(dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> Samples:
    seen = list(_looked_at(dataset))
    if not seen:
        raise BadWorkload("The data set gave no sample", "Its items are what is trained on")
    of = None if isinstance(dataset, IterableDataset) else len(dataset)  # type: ignore[arg-type]
    sizes = [bytes_in(sample) for sample in seen]
    largest = max(sizes)
    if largest > _ALIKE * min(sizes):
        return Samples([seen[sizes.index(largest)]], collate, of, varies=True)
    return Samples(seen[:_HELD], collate, of)


def _refuse_to_fill_the_host(size: int) -> None:
    """A batch that is put together on the host, before the kernel ends somebody for it."""
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    if found and 2 * size > 1024 * int(found[1]):
        raise MemoryError(f"a batch of {size >> 20:,} MiB is more than the host bears")


def _looked_at(dataset: Any) -> Iterable[Any]:
    """Some samples, from all over the data set, as long as it does not take too long."""
    until = time.monotonic() + _SEEN_S
    if isinstance(dataset, IterableDataset):
        source: Iterable[Any] = islice(iter(dataset), _SEEN)
    else:
        count = len(dataset)
        source = (dataset[i * count // min(count, _SEEN)] for i in range(min(count, _SEEN)))
    for sample in source:
        yield sample
        if time.monotonic() > until:
            return


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
    width, height = getattr(thing, "size", None) or (0, 0) if _is_picture(thing) else (0, 0)
    return 3 * width * height or 8


def _is_picture(thing: Any) -> bool:
    return hasattr(thing, "getbands")


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
