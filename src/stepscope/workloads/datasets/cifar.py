"""CIFAR-100 (python version): the real files if they are available, else generated ones.

cifar-100-python/train    a pickle: data (rows of 3072 bytes: red, green, blue planes), fine_labels,
                          coarse_labels, filenames, batch_label

The files `test` and `meta` are neither read nor generated.
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

from stepscope.errors import WorkloadError
from stepscope.workloads.datasets.store import Recipe, data_home, reuse_or_generate
from stepscope.workloads.datasets.textures import Random, make_fields, mixed

FOLDER = "cifar-100-python"
CLASSES, GROUPS = 100, 20
ROWS = 50_000
_VERSION, _SEED = 2, 0
_SIDE = 32
_ROW_BYTES = 3 * _SIDE * _SIDE
_EXPECTED = (
    f"Use the folder {FOLDER} from the unpacked cifar-100-python.tar.gz, or its parent folder"
)
_README = """This file has the format of CIFAR-100 (python version) but is not CIFAR-100.
stepscope generated it for measurements. A model trained on it is meaningless.
"""


@dataclass(frozen=True)
class Images:
    """Images as number × height × width × color, and their classes."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]


def find_cifar(given: str | None) -> Path | None:
    """The folder of the real files, in the given path or in the data store; None if not found."""
    if given is None:
        stored = data_home() / FOLDER
        return stored if (stored / "train").is_file() else None
    path = Path(given).expanduser()
    for folder in (path, path / FOLDER):
        if (folder / "train").is_file():
            return folder
    raise WorkloadError(f"No CIFAR-100 data found in {path}", _EXPECTED)


def generated_cifar(rows: int = ROWS) -> Path:
    """A folder with a generated file, by default as large as the real one."""
    name = f"cifar100-generated-v{_VERSION}-{rows}"
    description = f"{rows} images in the format of CIFAR-100"
    recipe = Recipe(name, description, _VERSION, rows, rows * _ROW_BYTES)
    return reuse_or_generate(recipe, lambda folder: _make(folder, rows)) / FOLDER


def read_cifar(folder: Path) -> Images:
    """Return the training images, or raise a WorkloadError if the file has another format."""
    path = folder / "train"
    try:
        with path.open("rb") as file:
            stored = _DataUnpickler(file, encoding="latin1").load()
        rows = np.asarray(stored["data"], np.uint8).reshape(-1, 3, _SIDE, _SIDE)
        labels = np.asarray(stored["fine_labels"], np.int64)
    except Exception as error:  # a damaged pickle may raise anything
        raise WorkloadError(f"Cannot read {path} as CIFAR-100: {error}", _EXPECTED) from error
    if not len(rows) or len(rows) != len(labels) or labels.min() < 0:
        raise WorkloadError(
            f"{path} is not valid CIFAR-100: {len(rows)} images, {len(labels)} labels", _EXPECTED
        )
    return Images(np.ascontiguousarray(rows.transpose(0, 2, 3, 1)), labels)


class _DataUnpickler(pickle.Unpickler):
    """Allows arrays, lists and strings only, so that a dataset cannot run code.

    Modules are not compared, since those of numpy differ between its versions.
    """

    _allowed: dict[str, Any] = {  # noqa: RUF012
        "_reconstruct": np.empty(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
        "encode": codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        if name not in self._allowed:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return self._allowed[name]


def _make(folder: Path, rows: int) -> None:
    """Images are small windows of a texture, tinted with the color of their class."""
    random, fields = Random([_SEED, 3]), make_fields(_SEED)
    labels = np.arange(rows) % CLASSES
    field = mixed(fields.smooth[0], fields.rough[0], 96)[::4, ::4]
    windows = sliding_window_view(field, (_SIDE, _SIDE))
    tops, lefts = random.randint(len(windows), size=(2, rows), dtype=np.int32)
    light = windows[tops, lefts].reshape(rows, 1, -1) // 2
    colors = random.randint(128, size=(CLASSES, 3, 1), dtype=np.uint8)
    content = {
        "filenames": [f"generated_{number:06d}.png" for number in range(rows)],
        "batch_label": "training batch 1 of 1",
        "fine_labels": labels.tolist(),
        "coarse_labels": (labels * GROUPS // CLASSES).tolist(),
        "data": (light + colors[labels]).reshape(rows, _ROW_BYTES),
    }
    (folder / "README.txt").write_text(_README, encoding="utf-8")
    (folder / FOLDER).mkdir()
    with (folder / FOLDER / "train").open("wb") as file:
        pickle.dump(content, file, protocol=2)
