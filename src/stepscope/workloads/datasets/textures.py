"""Textures for generated images and clips: fields with structure at every scale.

A photograph has large shapes, edges and fine grain, which determine how long it takes to decode:
noise would be slower and flat color faster. Integer arithmetic and a generator with a frozen stream
produce the same pixels from the same seed on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.uint8]
Random = np.random.RandomState
"""The legacy generator: its stream will never change (NEP 19)."""

SIDE = 1024
"""Height and width of a field, from which pieces are cut."""
_SMALLEST = 4
_SMOOTH, _ROUGH = (1, 2), (1, 1)
"""Ratio of the detail that each doubling of the resolution adds to the detail before."""


@dataclass(frozen=True)
class Fields:
    """`smooth` fields for shapes and brightness, `rough` fields for grain."""

    smooth: tuple[Plane, ...]
    rough: tuple[Plane, ...]


@lru_cache(maxsize=1)
def make_fields(seed: int, each: int = 4) -> Fields:
    """The fields for all images of a seed."""
    return Fields(
        tuple(fractal(Random([seed, 0, number]), *_SMOOTH) for number in range(each)),
        tuple(fractal(Random([seed, 1, number]), *_ROUGH) for number in range(each)),
    )


def fractal(random: Random, numerator: int, denominator: int, side: int = SIDE) -> Plane:
    """A square field, made by repeatedly doubling a small one and adding finer detail."""
    amplitude = 4096
    field = random.randint(-amplitude, amplitude + 1, (_SMALLEST, _SMALLEST), dtype=np.int32)
    while len(field) < side:
        amplitude = amplitude * numerator // denominator
        field = _doubled(_doubled(field).T).T
        field += random.randint(-amplitude, amplitude + 1, field.shape, dtype=np.int32)
    low, high = field.min(), field.max()
    scaled: Plane = ((field - low) * 255 // (high - low)).astype(np.uint8)
    return scaled


def _doubled(field: NDArray[np.int32]) -> NDArray[np.int32]:
    """Twice as many rows, interpolated between adjacent rows; the last row is next to the first."""
    above, below = np.roll(field, 1, axis=0), np.roll(field, -1, axis=0)
    pairs = np.stack(((3 * field + above) >> 2, (3 * field + below) >> 2), axis=1)
    return pairs.reshape(-1, field.shape[1])


def piece(random: Random, fields: Sequence[Plane], height: int, width: int) -> Plane:
    """A random piece of one of the fields, mirrored at random."""
    field = fields[random.randint(len(fields))]
    top = random.randint(field.shape[0] - height + 1)
    left = random.randint(field.shape[1] - width + 1)
    cut = field[top : top + height, left : left + width]
    return cut[:, ::-1] if random.randint(2) else cut


def mixed(smooth: Plane, rough: Plane, grain: int) -> Plane:
    """A mixture in which `grain` of 256 parts are rough."""
    both = smooth.astype(np.uint16) * (256 - grain) + rough.astype(np.uint16) * grain
    return (both >> 8).astype(np.uint8)
