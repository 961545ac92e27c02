"""A workload: what is trained, and every knob of it, as one frozen record.

The fields are the knobs. What a knob is for, what it may be and how it is shown stands with the
field, once: the command line, study files, checks and docs all read it here.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import BadWorkload

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adam", "adamw")
CACHES = ("as-is", "warm", "cold")
DEVICES = ("auto", "cpu", "cuda")
FRAMEWORKS = ("torch",)

DATA = ("random", "jpeg", "cifar100", "video", "text", "own")
"""Data sets by name. `own` is that of a user's workload."""
RESIDENT = "resident"
LOADER_ONLY = "loader-only"
PARTS = (RESIDENT, LOADER_ONLY)
"""What of a training can be run alone, of any data: `resident:jpeg`, `loader-only:own`."""

DEFAULT_SECONDS = 15.0
LEAST_STEPS = 16
"""A trial of so many seconds takes at least this many steps: less cannot be judged."""


@dataclass(frozen=True)
class Knob:
    """What can be said of a knob: for whom it is, and which values it may have."""

    help: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    or_module: bool = False
    """Whether a module of the user's, `package.module`, may stand for a choice."""


def _knob(
    default: Any,
    help: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    or_module: bool = False,
) -> Any:
    knob = Knob(help, choices, least, above, most, or_module)
    return dataclasses.field(default=default, metadata={"knob": knob})


@dataclass(frozen=True)
class Workload:
    """Model, data, framework and knobs. `model` is a name, or `FILE.py:FUNCTION` of a user."""

    model: str
    data: str = _knob(
        "",
        "random, jpeg, cifar100, video, text; resident (one batch that stays on the device) or "
        "loader-only (no compute), also of a data set: loader-only:jpeg.",
    )
    data_path: str | None = _knob(None, "Folder of your own JPEG class folders, CIFAR or videos.")
    framework: str = _knob(
        "torch",
        "What trains it; or an adapter of yours, package.module.",
        choices=FRAMEWORKS,
        or_module=True,
    )
    device: str = _knob("auto", "Where: a GPU if there is one.", choices=DEVICES)
    batch_size: int = _knob(32, "Samples in a batch, per rank.", least=1)
    accumulate: int = _knob(1, "Batches whose gradients make one step.", least=1)
    workers: int = _knob(0, "Processes that load data, per rank.", least=0)
    prefetch: int = _knob(2, "Batches that each worker holds ready.", least=1)
    pin: bool | None = _knob(None, "Pinned host memory; unsaid: with a GPU.")
    persistent: bool = _knob(True, "Keep the workers from one epoch to the next.")
    precision: str = _knob("fp32", "Numbers to compute in; fp16 with a scaler.", choices=PRECISIONS)
    channels_last: bool = _knob(False, "Images as NHWC in memory.")
    compile: bool = _knob(False, "Compile the model (torch.compile).")
    optimizer: str = _knob("sgd", "What steps.", choices=OPTIMIZERS)
    lr: float = _knob(0.01, "Learning rate.", above=0)
    momentum: float = _knob(0.9, "Of sgd.", least=0)
    weight_decay: float = _knob(0.0, "Of the optimizer.", least=0)
    image_size: int | None = _knob(None, "Pixels each way; unsaid: what the model wants.", least=1)
    frames: int | None = _knob(None, "Frames of a clip.", least=1)
    length: int | None = _knob(None, "Tokens of a text.", least=1)
    classes: int | None = _knob(None, "Classes to tell apart.", least=2)
    samples: int | None = _knob(None, "How large the data set is.", least=1)
    fraction: float = _knob(1.0, "Part of the data set that is used.", above=0, most=1)
    cache: str = _knob("as-is", "Files in the page cache: as they are, all, none.", choices=CACHES)
    ranks: int = _knob(1, "Processes that train together (DistributedDataParallel).", least=1)
    seed: int = _knob(0, "Of weights, data and their order.", least=0)
    epochs: int | None = _knob(None, "Train so many epochs,", least=1)
    steps: int | None = _knob(None, "or so many steps,", least=1)
    seconds: float | None = _knob(
        None,
        f"or so many seconds (unsaid: {DEFAULT_SECONDS:g}), but at least {LEAST_STEPS} steps.",
        above=0,
    )

    @property
    def part(self) -> str:
        """`resident`, `loader-only`, or nothing for a whole training."""
        head = self.data.partition(":")[0]
        return head if head in PARTS else ""

    @property
    def data_name(self) -> str:
        """The data set without the part; nothing where it is what the model usually gets."""
        return self.data.partition(":")[2] if self.part else self.data

    @property
    def is_own(self) -> bool:
        """Whether the model is a user's function rather than a name of ours."""
        return ":" in self.model

    @property
    def step_samples(self) -> int:
        """Samples in a step of one rank."""
        return self.batch_size * self.accumulate

    @property
    def global_batch(self) -> int:
        """Samples in a step of all ranks together."""
        return self.step_samples * self.ranks

    @property
    def short_name(self) -> str:
        """For a folder or a column: `resnet18`, or `train.workload` of a user."""
        place, _, function = self.model.rpartition(":")
        if not place:
            return self.model
        is_file = place.endswith(".py") or "/" in place
        return f"{Path(place).stem if is_file else place}.{function}"

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


KNOBS: dict[str, Knob] = {
    field.name: field.metadata["knob"]
    for field in dataclasses.fields(Workload)
    if "knob" in field.metadata
}
_TYPES: dict[str, Any] = typing.get_type_hints(Workload)


def knob_type(name: str) -> Any:
    """The type of a knob, `int | None` and the like."""
    return _TYPES[name]


def knob_default(name: str) -> Any:
    return next(f.default for f in dataclasses.fields(Workload) if f.name == name)


def make_workload(model: str, knobs: Mapping[str, Any]) -> Workload:
    """A checked workload; BadWorkload says what is wrong with it, in the user's terms."""
    for name in knobs:
        if name not in KNOBS:
            raise BadWorkload(f"There is no knob {name!r}", nearest(name, KNOBS))
    checked = {name: _checked(name, value) for name, value in knobs.items()}
    workload = Workload(model, **checked)
    _check_model(workload)
    _check_data(workload)
    _check_together(workload)
    return workload


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that lists the valid names most like a wrong one."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    close += [other for other in names if name and other.startswith(name) and other not in close]
    if close:
        return f"Did you mean {' or '.join(close[:5])}?"
    return f"There is: {', '.join(names)}"


def option_name(knob: str) -> str:
    return "--" + knob.replace("_", "-")


def _checked(name: str, value: Any) -> Any:
    """The value in the type of its knob, within its bounds."""
    kind = _TYPES[name]
    if value is None and type(None) in typing.get_args(kind):
        return None
    plain = next((k for k in typing.get_args(kind) if k is not type(None)), kind)
    wrong = BadWorkload(f"{option_name(name)} {value!r} is no {_KIND_NAMES[plain]}")
    if isinstance(value, bool) != (plain is bool):
        raise wrong
    if plain is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, plain):
        raise wrong
    _check_bounds(name, value)
    return value


_KIND_NAMES = {int: "whole number", float: "number", bool: "true or false", str: "text"}


def _check_bounds(name: str, value: Any) -> None:
    knob, option = KNOBS[name], option_name(name)
    is_module = knob.or_module and "." in value and value.replace(".", "").isidentifier()
    if knob.choices and value not in knob.choices and not is_module:
        raise BadWorkload(f"{option} {value} is not known", nearest(value, knob.choices))
    if isinstance(value, float) and not math.isfinite(value):
        raise BadWorkload(f"{option} {value} is not finite")
    if knob.least is not None and value < knob.least:
        raise BadWorkload(f"{option} {value} is too small", f"At least {knob.least:g}")
    if knob.above is not None and value <= knob.above:
        raise BadWorkload(f"{option} {value} is too small", f"More than {knob.above:g}")
    if knob.most is not None and value > knob.most:
        raise BadWorkload(f"{option} {value} is too large", f"At most {knob.most:g}")


def _check_model(workload: Workload) -> None:
    if not workload.model:
        raise BadWorkload("No model was named", "For example: stepscope trial cnn")
    place, _, function = workload.model.rpartition(":")
    if workload.is_own and not (place and function.isidentifier()):
        raise BadWorkload(
            f"{workload.model} names no function",
            "Give FILE.py:FUNCTION or package.module:FUNCTION",
        )


def _check_data(workload: Workload) -> None:
    name = workload.data_name
    if name and name not in DATA:
        raise BadWorkload(f"There is no data {name!r}", nearest(name, (*DATA, *PARTS)))
    if workload.is_own and name not in ("", "own"):
        raise BadWorkload(
            f"{workload.model} brings its own data", "Leave --data out, or give resident"
        )
    if not workload.is_own and name == "own":
        raise BadWorkload(
            f"{workload.model} has no data of its own", f"Give one of {', '.join(DATA[:-1])}"
        )


def _check_together(workload: Workload) -> None:
    lengths = [n for n in ("epochs", "steps", "seconds") if getattr(workload, n) is not None]
    if len(lengths) > 1:
        raise BadWorkload(
            f"{' and '.join(map(option_name, lengths))} were both given", "Give one of them"
        )
    if workload.cache != "as-is":
        if workload.part == RESIDENT:
            raise BadWorkload("A resident batch is read from no file", "Leave --cache out")
        if workload.is_own:
            raise BadWorkload(
                f"Which files {workload.model} reads is not known", "Leave --cache out"
            )
