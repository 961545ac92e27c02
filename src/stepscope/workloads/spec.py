"""A workload: what is trained, with its settings, as one frozen record.

The table of settings below is the only one: the command line, study files, checks and docs read it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stepscope.errors import BadWorkload
from stepscope.workloads.code_place import is_place, parse_place
from stepscope.workloads.frameworks.registry import FRAMEWORKS, is_user_adapter

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adam", "adamw")
CACHES = ("as-is", "warm", "cold")
DEVICES = ("auto", "cpu", "cuda")

DATA = ("random", "jpeg", "cifar100", "video", "text", "own")
"""Data sets by name. `own` is that of a user's workload."""
RESIDENT = "resident"
LOADER_ONLY = "loader-only"
PARTS = (RESIDENT, LOADER_ONLY)
"""What of a training can be run alone, of any data: `resident:jpeg`, `loader-only:own`."""

NOT_FOR_FIT = ("batch_size", "epochs", "steps", "seconds")
"""Settings that `fit` finds out, or has no use for."""

DEFAULT_SECONDS = 15.0
LEAST_STEPS = 16
"""A trial of so many seconds takes at least this many steps: fifteen of them have a length, seven
may be cut as warm-up, and the other eight are one more than it takes to judge whether they are
steady."""


@dataclass(frozen=True)
class Setting:
    help: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    also: Callable[[str], bool] = lambda value: False
    """Tells other values that may stand for a choice."""


def _setting(default: Any, help: str, **valid: Any) -> Any:
    return dataclasses.field(default=default, metadata={"setting": Setting(help, **valid)})


@dataclass(frozen=True)
class Workload:
    """Model, data, framework and settings. `model` is a name, or `FILE.py:FUNCTION` of a user."""

    model: str
    data: str = _setting(
        "",
        "random, jpeg, cifar100, video, text; resident (one batch that stays on the device) or "
        "loader-only (no compute), also of a data set: loader-only:jpeg.",
    )
    data_path: str | None = _setting(
        None, "Folder of your own JPEG class folders, CIFAR or videos."
    )
    framework: str = _setting(
        "torch",
        "Framework, or your own adapter: FILE.py:NAME or package.module:NAME.",
        choices=tuple(FRAMEWORKS),
        also=is_user_adapter,
    )
    device: str = _setting("auto", "Where: a GPU if there is one.", choices=DEVICES)
    batch_size: int = _setting(32, "Samples in a batch, per rank.", least=1)
    accumulate: int = _setting(1, "Batches whose gradients make one step.", least=1)
    workers: int = _setting(0, "Processes that load data, per rank.", least=0)
    prefetch: int = _setting(2, "Batches that each worker holds ready.", least=1)
    pin: bool | None = _setting(None, "Pinned host memory; unsaid: with a GPU.")
    persistent: bool = _setting(True, "Keep the workers from one epoch to the next.")
    precision: str = _setting(
        "fp32", "Numbers to compute in; fp16 with a scaler.", choices=PRECISIONS
    )
    channels_last: bool = _setting(False, "Images as NHWC in memory.")
    compile: bool = _setting(False, "Compile the model (torch.compile).")
    optimizer: str = _setting("sgd", "What steps.", choices=OPTIMIZERS)
    lr: float = _setting(0.01, "Learning rate.", above=0)
    momentum: float = _setting(0.9, "Of sgd.", least=0)
    weight_decay: float = _setting(0.0, "Of the optimizer.", least=0)
    image_size: int | None = _setting(
        None, "Pixels each way; unsaid: what the model wants.", least=1
    )
    frames: int | None = _setting(None, "Frames of a clip.", least=1)
    length: int | None = _setting(None, "Tokens of a text.", least=1)
    classes: int | None = _setting(None, "Classes to tell apart.", least=2)
    samples: int | None = _setting(None, "How large the data set is.", least=1)
    fraction: float = _setting(1.0, "Part of the data set that is used.", above=0, most=1)
    cache: str = _setting(
        "as-is", "Files in the page cache: as they are, all, none.", choices=CACHES
    )
    ranks: int = _setting(1, "Processes that train together (DistributedDataParallel).", least=1)
    seed: int = _setting(0, "Of weights, data and their order.", least=0)
    epochs: int | None = _setting(None, "Train so many epochs,", least=1)
    steps: int | None = _setting(None, "or so many steps,", least=1)
    seconds: float | None = _setting(
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
        return is_place(self.model)

    @property
    def needs_gpu(self) -> bool:
        """Whether a GPU was asked for by name."""
        return self.device not in ("auto", "cpu")

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
        place = parse_place(self.model)
        if not place.name:
            return self.model
        return f"{Path(place.source).stem if place.is_file else place.source}.{place.name}"


SETTINGS: dict[str, Setting] = {
    field.name: field.metadata["setting"]
    for field in dataclasses.fields(Workload)
    if "setting" in field.metadata
}
_TYPES: dict[str, Any] = typing.get_type_hints(Workload)
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Workload)}
_TYPE_WORDS = {int: "whole number", float: "number", bool: "true or false", str: "text"}


def setting_type(name: str) -> Any:
    """Of `int | None` and the like, all of it."""
    return _TYPES[name]


def setting_default(name: str) -> Any:
    return _DEFAULTS[name]


def option_name(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def switches() -> set[str]:
    """The options of settings that take no value."""
    names = [name for name in SETTINGS if bool in (_TYPES[name], *typing.get_args(_TYPES[name]))]
    return {word for name in names for word in (option_name(name), f"--no-{option_name(name)[2:]}")}


def trial_command(model: str, options: Mapping[str, Any]) -> list[str]:
    """What runs a trial of a model with these settings and limits, word by word."""
    words = ["stepscope", "trial", model]
    for name, value in options.items():
        option = option_name(name)
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        else:
            text = str(value)
            words += [option, text.removesuffix(".0") if isinstance(value, float) else text]
    return words


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint that lists the valid names most like a wrong one."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    close += [other for other in names if name and other.startswith(name) and other not in close]
    if close:
        return f"Did you mean {' or '.join(close[:5])}?"
    return f"There is: {', '.join(names)}"


def make_workload(model: str, settings: Mapping[str, Any]) -> Workload:
    """A checked workload; BadWorkload says what is wrong with it, in the user's terms."""
    for name in settings:
        if name not in SETTINGS:
            raise BadWorkload(f"There is no setting {name!r}", nearest(name, SETTINGS))
    workload = Workload(model, **{name: _checked(name, settings[name]) for name in settings})
    data = workload.data_name
    if not model:
        raise BadWorkload("No model was named", "For example: stepscope trial cnn")
    place = parse_place(model)
    if workload.is_own and not (place.source and place.name.isidentifier()):
        raise BadWorkload(
            f"{model} names no function", "Give FILE.py:FUNCTION or package.module:FUNCTION"
        )
    if data and data not in DATA:
        raise BadWorkload(f"There is no data {data!r}", nearest(data, (*DATA, *PARTS)))
    if workload.is_own and data not in ("", "own"):
        raise BadWorkload(f"{model} brings its own data", "Leave --data out, or give resident")
    if not workload.is_own and data == "own":
        raise BadWorkload(f"{model} has no data of its own", f"Give one of {', '.join(DATA[:-1])}")
    lengths = [n for n in ("epochs", "steps", "seconds") if getattr(workload, n) is not None]
    if len(lengths) > 1:
        given = " and ".join(map(option_name, lengths))
        raise BadWorkload(f"{given} were both given", "Give one of them")
    if workload.cache != "as-is" and workload.part == RESIDENT:
        raise BadWorkload("A resident batch is read from no file", "Leave --cache out")
    if workload.cache != "as-is" and workload.is_own:
        raise BadWorkload(f"Which files {model} reads is not known", "Leave --cache out")
    return workload


def _checked(name: str, value: Any) -> Any:
    setting, option, kind = SETTINGS[name], option_name(name), _TYPES[name]
    if value is None and type(None) in typing.get_args(kind):
        return None
    plain = next((k for k in typing.get_args(kind) if k is not type(None)), kind)
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, plain) or isinstance(value, bool) != (plain is bool):
        raise BadWorkload(f"{option} {value!r} is no {_TYPE_WORDS[plain]}")
    if setting.choices and value not in setting.choices and not setting.also(value):
        raise BadWorkload(f"{option} {value} is not known", nearest(value, setting.choices))
    if isinstance(value, float) and not math.isfinite(value):
        raise BadWorkload(f"{option} {value} is not finite")
    if setting.least is not None and value < setting.least:
        raise BadWorkload(f"{option} {value} is too small", f"At least {setting.least:g}")
    if setting.above is not None and value <= setting.above:
        raise BadWorkload(f"{option} {value} is too small", f"More than {setting.above:g}")
    if setting.most is not None and value > setting.most:
        raise BadWorkload(f"{option} {value} is too large", f"At most {setting.most:g}")
    return value
