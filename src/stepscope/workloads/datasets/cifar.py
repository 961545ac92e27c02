"""CIFAR-100 in its "python version": the real files where they are, else the same format made up.

cifar-100-python/train    a pickle: data (rows of 3072 bytes: red, green, blue planes), fine_labels,
                          coarse_labels, filenames, batch_label

The files `test` and `meta` beside it are not read, and not made up.
"""

from __future__ import annotations

import codecs
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from stepscope.errors import BadWorkload
from stepscope.workloads.datasets.store import Recipe, data_home, reuse_or_make
from stepscope.workloads.datasets.textures import Random, make_fields, mixed

FOLDER = "cifar-100-python"
CLASSES, GROUPS = 100, 20
ROWS = 50_000
_VERSION, _SEED = 2, 0
_SIDE = 32
_ROW_BYTES = 3 * _SIDE * _SIDE
_WANTED = f"It takes the folder {FOLDER} (of cifar-100-python.tar.gz, unpacked), or the one above"
_README = """This file has the format of CIFAR-100 (python version) but is not CIFAR-100.
stepscope generated it, to measure with. What is learnt from it means nothing.
"""


@dataclass(frozen=True)
class Images:
    """Pictures as rows × height × width × colour, and the class of each."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


def find_cifar(given: str | None) -> Path | None:
    """The folder of the real files: the user's, or one in the store. None: there is none."""
    if given is None:
        kept = data_home() / FOLDER
        return kept if (kept / "train").is_file() else None
    place = Path(given).expanduser()
    for folder in (place, place / FOLDER):
        if (folder / "train").is_file():
            return folder
    raise BadWorkload(f"There is no CIFAR-100 in {place}", _WANTED)


def generated_cifar(rows: int = ROWS) -> Path:
    """A folder with a made-up file, as large as the real one."""
    name = f"cifar100-generated-v{_VERSION}-{rows}"
    what = "A generated data set in the format of CIFAR-100"
    recipe = Recipe(name, what, _VERSION, rows, rows * _ROW_BYTES)
    return reuse_or_make(recipe, lambda folder: _make(folder, rows)) / FOLDER


def read_cifar(folder: Path) -> Images:
    """The images to train with, or BadWorkload where the file is something else."""
    path = folder / "train"
    try:
        with path.open("rb") as file:
            stored = _DataUnpickler(file, encoding="latin1").load()
        rows = np.asarray(stored["data"], np.uint8).reshape(-1, 3, _SIDE, _SIDE)
        labels = np.asarray(stored["fine_labels"], np.int64)
    except Exception as error:  # a damaged pickle may raise anything
        raise BadWorkload(f"{path} cannot be read as CIFAR-100: {error}", _WANTED) from error
    if not len(rows) or len(rows) != len(labels) or labels.min() < 0:
        raise BadWorkload(f"{path} has {len(rows)} images and {len(labels)} labels", _WANTED)
    return Images(np.ascontiguousarray(rows.transpose(0, 2, 3, 1)), labels)


class _DataUnpickler(pickle.Unpickler):
    """Arrays, lists and texts only: a data set has no business to call anything else.

    Modules are not looked at, since numpy's have moved between its versions.
    """

    _allowed: dict[str, Any] = {  # noqa: RUF012
        "_reconstruct": np.empty(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
        "encode": codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self._allowed:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return self._allowed[name]


def _make(folder: Path, rows: int) -> None:
    """Pictures are small windows of a field, each in the colour of its class."""
    random, fields = Random([_SEED, 3]), make_fields(_SEED)
    labels = np.arange(rows) % CLASSES
    field = mixed(fields.smooth[0], fields.rough[0], 96)[::4, ::4]
    windows = sliding_window_view(field, (_SIDE, _SIDE))
    tops, lefts = random.randint(len(windows), size=(2, rows), dtype=np.int32)
    light = windows[tops, lefts].reshape(rows, 1, -1) // 2
    colours = random.randint(128, size=(CLASSES, 3, 1), dtype=np.uint8)
    content = {
        "filenames": [f"generated_{number:06d}.png" for number in range(rows)],
        "batch_label": "training batch 1 of 1",
        "fine_labels": labels.tolist(),
        "coarse_labels": (labels * GROUPS // CLASSES).tolist(),
        "data": (light + colours[labels]).reshape(rows, _ROW_BYTES),
    }
    (folder / "README.txt").write_text(_README, encoding="utf-8")
    (folder / FOLDER).mkdir()
    with (folder / FOLDER / "train").open("wb") as file:
        pickle.dump(content, file, protocol=2)
