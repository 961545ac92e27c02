"""What generated images and clips are made of: fields with structure at every scale.

A photograph has large shapes, edges and fine grain, and that is what decides how long it takes to
decode: noise would be slower and flat colour faster. Only whole numbers and a generator whose
stream is frozen are used, so that the same seed gives the same pixels on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.uint8]
Random = np.random.RandomState
"""The old generator, since its stream will never change (NEP 19)."""

SIDE = 1024
"""Of a field: pieces of it are cut out."""
_SMALLEST = 4
_SMOOTH, _ROUGH = (1, 2), (1, 1)
"""What each doubling of the resolution adds, against the one before."""


@dataclass(frozen=True)
class Fields:
    """`smooth` ones for shapes and light, `rough` ones for grain."""

    smooth: tuple[Plane, ...]
    rough: tuple[Plane, ...]


@lru_cache(maxsize=1)
def make_fields(seed: int, each: int = 4) -> Fields:
    """The fields that all images of a seed are cut from."""
    return Fields(
        tuple(fractal(Random([seed, 0, number]), *_SMOOTH) for number in range(each)),
        tuple(fractal(Random([seed, 1, number]), *_ROUGH) for number in range(each)),
    )


def fractal(random: Random, share: int, of: int, side: int = SIDE) -> Plane:
    """A square field, built by doubling a small one and adding finer detail each time."""
    swing = 4096
    field = random.randint(-swing, swing + 1, (_SMALLEST, _SMALLEST), dtype=np.int32)
    while len(field) < side:
        swing = swing * share // of
        field = _doubled(_doubled(field).T).T
        field += random.randint(-swing, swing + 1, field.shape, dtype=np.int32)
    low, high = field.min(), field.max()
    scaled: Plane = ((field - low) * 255 // (high - low)).astype(np.uint8)
    return scaled


def _doubled(field: NDArray[np.int32]) -> NDArray[np.int32]:
    """Twice as many rows, each a mean of its neighbours; the last is a neighbour of the first."""
    above, below = np.roll(field, 1, axis=0), np.roll(field, -1, axis=0)
    pairs = np.stack(((3 * field + above) >> 2, (3 * field + below) >> 2), axis=1)
    return pairs.reshape(-1, field.shape[1])


def piece(random: Random, fields: Sequence[Plane], height: int, width: int) -> Plane:
    """Somewhere in one of the fields, mirrored or not."""
    field = fields[random.randint(len(fields))]
    top = random.randint(field.shape[0] - height + 1)
    left = random.randint(field.shape[1] - width + 1)
    cut = field[top : top + height, left : left + width]
    return cut[:, ::-1] if random.randint(2) else cut


def mixed(smooth: Plane, rough: Plane, grain: int) -> Plane:
    """Both, with `grain` of 256 parts of the rough one."""
    both = smooth.astype(np.uint16) * (256 - grain) + rough.astype(np.uint16) * grain
    return (both >> 8).astype(np.uint8)
