"""CIFAR-100 in its "python version": the real files where they are, else the same format made up.

cifar-100-python/train, test    pickles: data (rows of 3072 bytes: red, green, blue planes),
                                fine_labels, coarse_labels, filenames, batch_label
cifar-100-python/meta           pickle: the names of the classes
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
TRAIN_ROWS, TEST_ROWS = 50_000, 10_000
_VERSION = 1
_SIDE = 32
_ROW_BYTES = 3 * _SIDE * _SIDE
_WANTED = f"It takes the folder {FOLDER} (of cifar-100-python.tar.gz, unpacked), or the one above"
_README = """These files have the format of CIFAR-100 (python version) but are not CIFAR-100.
stepscope generated them, to measure with. What is learnt from them means nothing.
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


def generated_cifar(
    train_rows: int = TRAIN_ROWS, test_rows: int = TEST_ROWS, seed: int = 0
) -> Path:
    """A folder of made-up files, as large as the real ones."""
    rows = train_rows + test_rows
    name = f"cifar100-generated-v{_VERSION}-seed{seed}-{train_rows}+{test_rows}"
    what = "A generated data set in the format of CIFAR-100"
    recipe = Recipe(name, what, _VERSION, rows, rows * _ROW_BYTES)
    made = reuse_or_make(recipe, lambda folder: _make(folder, train_rows, test_rows, seed))
    return made / FOLDER


def read_cifar(folder: Path, part: str = "train") -> Images:
    """The rows of a part, or BadWorkload where the file is something else."""
    path = folder / part
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


def _make(folder: Path, train_rows: int, test_rows: int, seed: int) -> None:
    (folder / "README.txt").write_text(_README, encoding="utf-8")
    inside = folder / FOLDER
    inside.mkdir()
    _dump(inside / "train", _batch("training batch 1 of 1", train_rows, seed, 3))
    _dump(inside / "test", _batch("testing batch 1 of 1", test_rows, seed, 4))
    names = {
        "fine_label_names": [f"class_{number:02d}" for number in range(CLASSES)],
        "coarse_label_names": [f"group_{number:02d}" for number in range(GROUPS)],
    }
    _dump(inside / "meta", names)


def _batch(name: str, rows: int, seed: int, stream: int) -> dict[str, Any]:
    """Pictures are small windows of a field, each in the colour of its class."""
    random, fields = Random([seed, stream]), make_fields(seed)
    labels = np.arange(rows) % CLASSES
    field = mixed(fields.smooth[0], fields.rough[0], 96)[::4, ::4]
    windows = sliding_window_view(field, (_SIDE, _SIDE))
    tops, lefts = random.randint(len(windows), size=(2, rows), dtype=np.int32)
    light = windows[tops, lefts].reshape(rows, 1, -1) // 2
    colours = random.randint(128, size=(CLASSES, 3, 1), dtype=np.uint8)
    return {
        "filenames": [f"generated_{number:06d}.png" for number in range(rows)],
        "batch_label": name,
        "fine_labels": labels.tolist(),
        "coarse_labels": (labels * GROUPS // CLASSES).tolist(),
        "data": (light + colours[labels]).reshape(rows, _ROW_BYTES),
    }


def _dump(path: Path, content: dict[str, Any]) -> None:
    with path.open("wb") as file:
        pickle.dump(content, file, protocol=2)
