"""Class folders of JPEG images like those of ImageNet, generated once and reused.

Sizes vary around 500×375, some images are portraits, and a file has about 107 KiB. An image depends
only on its number, class and seed, so that datasets of different sizes share their files.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from stepscope.workloads.datasets.store import Recipe, complete_folders, reuse_or_generate
from stepscope.workloads.datasets.textures import Plane, Random, make_fields, mixed, piece

DEFAULT_COUNT = 1024
CLASSES = 10
_VERSION = 1
_QUALITY = 95
_FILE_BYTES = 110_000


def generated_jpegs(count: int = DEFAULT_COUNT, classes: int = CLASSES, seed: int = 0) -> Path:
    """A folder with this many images, evenly distributed over the classes."""
    classes = min(classes, count)
    family = f"jpeg-v{_VERSION}-seed{seed}-{classes}classes-"
    description = f"{count} JPEG images in {classes} class folders"
    recipe = Recipe(f"{family}{count}", description, _VERSION, count, count * _FILE_BYTES)
    return reuse_or_generate(recipe, lambda folder: _make(folder, count, classes, seed, family))


def _make(folder: Path, count: int, classes: int, seed: int, family: str) -> None:
    from PIL import Image

    earlier = complete_folders(family)
    for number in range(count):
        label = number % classes
        name = Path(f"class{label:04d}") / f"{number:07d}.jpg"
        (folder / name.parent).mkdir(exist_ok=True)
        for other in earlier:  # share the file with datasets of other sizes
            try:
                os.link(other / name, folder / name)
                break
            except OSError:
                continue
        else:
            planes = [Image.fromarray(np.ascontiguousarray(p)) for p in draw(seed, number, label)]
            Image.merge("YCbCr", planes).save(folder / name, "JPEG", quality=_QUALITY)


def draw(seed: int, number: int, label: int) -> tuple[Plane, Plane, Plane]:
    """The YCbCr planes of one image: shapes on a background, each with its own grain."""
    random, fields = Random([seed, 2, number]), make_fields(seed)
    long = int(500 + random.randint(-60, 61) + random.randint(-60, 61))
    short = long * int(random.randint(60, 91)) // 100
    height, width = (long, short) if random.randint(4) == 0 else (short, long)  # some portraits
    rough = piece(random, fields.rough, height, width)
    shapes = piece(random, fields.smooth, height, width) > random.randint(100, 156)
    front, ground = (
        mixed(piece(random, fields.smooth, height, width), rough, int(random.randint(64, 256)))
        for _ in range(2)
    )
    blue = piece(random, fields.smooth, height, width) // 6 + rough // 16
    red = piece(random, fields.smooth, height, width) // 6 + rough // 16
    hue = label * 37 % 64 // 4
    return (
        np.where(shapes, front, ground),
        blue + np.uint8(96 + hue),
        red + np.where(shapes, np.uint8(92), np.uint8(108)),
    )
