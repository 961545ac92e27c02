"""Short clips in class folders, like those of UCF101, decoded on access with PyAV.

Generated clips are moving textures: 320×240 pixels, 25 frames per second, three to seven seconds,
MPEG-4 in AVI.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepscope.errors import WorkloadError
from stepscope.workloads.datasets.store import Recipe, reuse_or_generate
from stepscope.workloads.datasets.textures import Plane, Random, make_fields, mixed, piece

SUFFIXES = (".avi", ".mp4", ".mkv", ".webm", ".mov")
DEFAULT_COUNT = 40
CLASSES = 10
WIDTH, HEIGHT, RATE = 320, 240, 25
_VERSION = 1
_SHORTEST, _LONGEST = 3 * RATE, 7 * RATE
_BITS_PER_SECOND = 600_000
_CLIP_BYTES = 500_000
_RANGE = 256
"""Range in pixels over which a window moves on its texture."""


def generated_clips(count: int = DEFAULT_COUNT, classes: int = CLASSES, seed: int = 0) -> Path:
    """A folder with this many clips, evenly distributed over the classes."""
    _av()
    classes = min(classes, count)
    name = f"video-v{_VERSION}-seed{seed}-{classes}classes-{count}"
    description = f"{count} clips in {classes} class folders"
    recipe = Recipe(name, description, _VERSION, count, count * _CLIP_BYTES)
    return reuse_or_generate(recipe, lambda folder: _make(folder, count, classes, seed))


def read_window(
    path: str | os.PathLike[str], frames: int, pick: Callable[[int], int]
) -> NDArray[np.uint8]:
    """Consecutive frames of a clip: frames × height × width × color.

    `pick(n)` chooses one of n possible start frames. The last frame of a short clip is repeated.
    """
    av = _av()
    try:
        with av.open(os.fspath(path)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1  # the loader workers already run in parallel
            rate = stream.average_rate or 0
            length = stream.frames or (container.duration or 0) / 1_000_000 * rate
            begin = pick(max(int(length) - frames, 0) + 1)
            first = int((stream.start_time or 0) + begin / (rate or RATE) / stream.time_base)
            if begin:
                container.seek(first, stream=stream)  # seeks to the key frame before it
            window: list[NDArray[np.uint8]] = []
            for frame in container.decode(stream):
                if begin and frame.pts is not None and frame.pts < first:
                    continue
                window.append(frame.to_ndarray(format="rgb24"))
                if len(window) == frames:
                    break
        return np.stack(window + window[-1:] * (frames - len(window)))
    except (av.FFmpegError, OSError, ValueError, IndexError) as error:
        raise WorkloadError(
            f"Cannot decode {path} as a video: {error}",
            "Remove or replace the file",
        ) from error


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise WorkloadError("Video data needs PyAV", "Install it with: pip install av") from None
    return av


def _make(folder: Path, count: int, classes: int, seed: int) -> None:
    av = _av()
    for number in range(count):
        class_folder = folder / f"class{number % classes:04d}"
        class_folder.mkdir(exist_ok=True)
        with av.open(str(class_folder / f"{number:05d}.avi"), "w") as container:
            stream = container.add_stream("mpeg4", rate=RATE)
            context = stream.codec_context
            context.width, context.height, context.pix_fmt = WIDTH, HEIGHT, "yuv420p"
            context.bit_rate, context.thread_count = _BITS_PER_SECOND, 1
            for planes in _frames(Random([seed, 5, number]), seed):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(planes, format="yuv420p")))
            container.mux(stream.encode())


def _frames(random: Random, seed: int) -> list[Plane]:
    """The planes of each frame in one array: brightness, then both colors at half resolution."""
    fields = make_fields(seed)
    ground = piece(random, fields.smooth, HEIGHT + _RANGE, WIDTH + _RANGE)
    grain = piece(random, fields.rough, HEIGHT + _RANGE, WIDTH + _RANGE)
    grounds, grains = _Drift(random), _Drift(random)
    colors = [
        piece(random, fields.smooth, HEIGHT // 2, WIDTH // 2) // 4 + np.uint8(96) for _ in range(2)
    ]
    below = np.concatenate([color.reshape(-1, WIDTH) for color in colors])
    return [
        np.concatenate((mixed(grounds.cut(ground, time), grains.cut(grain, time), 96), below))
        for time in range(random.randint(_SHORTEST, _LONGEST + 1))
    ]


class _Drift:
    """A window that moves back and forth over a texture, by up to two pixels per frame."""

    def __init__(self, random: Random) -> None:
        self._start = random.randint(2 * _RANGE, size=2)
        self._speed = random.randint(-8, 9, size=2)

    def cut(self, field: Plane, time: int) -> Plane:
        top, left = _RANGE - abs((self._start + self._speed * time // 4) % (2 * _RANGE) - _RANGE)
        return field[top : top + HEIGHT, left : left + WIDTH]
