"""A workload: a model with its data, framework and settings, as one frozen record.

The command line, study files, checks and docs all read the table of settings below.
"""

from __future__ import annotations

import dataclasses
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from stepscope.errors import WorkloadError
from stepscope.workloads.code_reference import is_reference, parse_reference
from stepscope.workloads.frameworks.registry import FRAMEWORKS, is_user_adapter
from stepscope.workloads.frameworks.torch.model_names import MODEL_NAMES, is_unknown

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
OPTIMIZERS = ("sgd", "adam", "adamw")
CACHES = ("as-is", "warm", "cold")
DEVICES = ("auto", "cpu", "cuda")

DATA = ("random", "jpeg", "cifar100", "video", "text", "custom")
"""Datasets by name. `custom` is the data of a custom workload."""
RESIDENT = "resident"
LOADER_ONLY = "loader-only"
PARTS = (RESIDENT, LOADER_ONLY)
"""Parts of a training that can run alone, with any data: `resident:jpeg`, `loader-only:custom`."""

NOT_FOR_FIT = ("batch_size", "epochs", "steps", "seconds")
"""Settings that `fit` determines itself or does not use."""

DEFAULT_SECONDS = 15.0
LEAST_STEPS = 16
"""Minimum number of steps of a trial that is limited by seconds: 15 of them have a measurable
duration, 7 of these may be dropped as warm-up, and the steadiness check needs at least 8."""

_IMAGE_SETS = """
    caltech101 caltech256 celeba cifar cifar10 coco emnist fashionmnist flowers102 food101 imagenet
    imagenet1k imagenet21k imagenette mnist places365 stl10 svhn tinyimagenet
"""
_VIDEO_SETS = "hmdb51 kinetics kinetics400 kinetics600 kinetics700 ucf101"
"""Well-known datasets that stepscope reads only from the user's class folders."""
_MIN_SIMILARITY = 0.6
_MAX_SUGGESTIONS = 5
_MIN_PREFIX = 3


@dataclass(frozen=True)
class Setting:
    help: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    above: float | None = None
    most: float | None = None
    also: Callable[[str], bool] = lambda value: False
    """Whether a value that is not one of the choices is valid."""


def _setting(default: Any, help: str, **valid: Any) -> Any:
    return dataclasses.field(default=default, metadata={"setting": Setting(help, **valid)})


@dataclass(frozen=True)
class Workload:
    """Model, data, framework and settings. `model` is a name or a reference to user code."""

    model: str
    data: str = _setting(
        "",
        "Dataset: random, jpeg, cifar100, video or text (default: one that suits the model). "
        "Special values: resident (one batch stays on the device) and loader-only (no "
        "computation), also with a dataset: loader-only:jpeg",
    )
    data_path: str | None = _setting(
        None, "Folder with your own data: class folders of images or videos, or CIFAR-100"
    )
    framework: str = _setting(
        "torch",
        "Framework, or your own adapter: FILE.py:NAME or package.module:NAME",
        choices=tuple(FRAMEWORKS),
        also=is_user_adapter,
    )
    device: str = _setting("auto", "Device (auto: a GPU if there is one)", choices=DEVICES)
    batch_size: int = _setting(32, "Batch size per rank", least=1)
    accumulate: int = _setting(1, "Gradient accumulation steps", least=1)
    workers: int = _setting(0, "Loader workers per rank", least=0)
    prefetch: int = _setting(2, "Batches prefetched by each worker", least=1)
    pin: bool | None = _setting(None, "Pin host memory (default: on with a GPU)")
    persistent: bool = _setting(True, "Keep loader workers alive between epochs")
    precision: str = _setting(
        "fp32", "Floating-point precision; fp16 uses a gradient scaler", choices=PRECISIONS
    )
    channels_last: bool = _setting(False, "Channels-last memory format (NHWC)")
    compile: bool = _setting(False, "Compile the model with torch.compile")
    optimizer: str = _setting("sgd", "Optimizer", choices=OPTIMIZERS)
    lr: float = _setting(0.01, "Learning rate", above=0)
    momentum: float = _setting(0.9, "Momentum (sgd only)", least=0)
    weight_decay: float = _setting(0.0, "Weight decay", least=0)
    image_size: int | None = _setting(
        None, "Image height and width in pixels (default: the model's)", least=1
    )
    frames: int | None = _setting(None, "Frames per clip (default: the model's)", least=1)
    sequence_length: int | None = _setting(None, "Tokens per text (default: the model's)", least=1)
    classes: int | None = _setting(
        None, "Number of classes (default: the model's, or 100 with cifar100)", least=2
    )
    samples: int | None = _setting(None, "Number of samples in the dataset", least=1)
    fraction: float = _setting(1.0, "Fraction of the dataset to use", above=0, most=1)
    page_cache: str = _setting(
        "as-is",
        "Page cache before training: as it is, warm (all files cached) or cold (none cached)",
        choices=CACHES,
    )
    ranks: int = _setting(1, "Number of training processes (DistributedDataParallel)", least=1)
    seed: int = _setting(0, "Random seed for weights, data and sample order", least=0)
    epochs: int | None = _setting(None, "Number of epochs", least=1)
    steps: int | None = _setting(None, "Number of steps", least=1)
    seconds: float | None = _setting(
        None,
        f"Duration in seconds, with at least {LEAST_STEPS} steps (default: {DEFAULT_SECONDS:g}, "
        "unless epochs or steps are set)",
        above=0,
    )

    @property
    def part(self) -> str:
        """`resident`, `loader-only`, or empty for a whole training."""
        head = self.data.partition(":")[0]
        return head if head in PARTS else ""

    @property
    def data_name(self) -> str:
        """The dataset without the part; empty for the default of the model."""
        return self.data.partition(":")[2] if self.part else self.data

    @property
    def is_custom(self) -> bool:
        """Whether the model is a function in user code."""
        return is_reference(self.model)

    @property
    def needs_gpu(self) -> bool:
        """Whether the device setting requires a GPU."""
        return self.device not in ("auto", "cpu")

    @property
    def step_samples(self) -> int:
        """Samples per step of one rank."""
        return self.batch_size * self.accumulate

    @property
    def global_batch(self) -> int:
        """Samples per step of all ranks."""
        return self.step_samples * self.ranks

    @property
    def short_name(self) -> str:
        """Name for a folder or a table column: `resnet18`, or `train.workload` for user code."""
        reference = parse_reference(self.model)
        if not reference.name:
            return self.model
        source = Path(reference.source).stem if reference.is_file else reference.source
        return f"{source}.{reference.name}"


SETTINGS: dict[str, Setting] = {
    field.name: field.metadata["setting"]
    for field in dataclasses.fields(Workload)
    if "setting" in field.metadata
}
_TYPES: dict[str, Any] = typing.get_type_hints(Workload)
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Workload)}
_TYPE_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


def setting_type(name: str) -> Any:
    """The annotated type, such as `int | None`."""
    return _TYPES[name]


def setting_default(name: str) -> Any:
    return _DEFAULTS[name]


def option_name(setting: str) -> str:
    return "--" + setting.replace("_", "-")


def switches() -> set[str]:
    """The options of Boolean settings, which have no value."""
    names = [name for name in SETTINGS if bool in (_TYPES[name], *typing.get_args(_TYPES[name]))]
    return {word for name in names for word in (option_name(name), f"--no-{option_name(name)[2:]}")}


def trial_command(model: str, options: Mapping[str, Any]) -> list[str]:
    """The command line of a trial with these settings and limits."""
    words = ["stepscope", "trial", model]
    for name, value in options.items():
        option = option_name(name)
        if isinstance(value, bool):
            words.append(option if value else f"--no-{option[2:]}")
        else:
            text = str(value)
            words += [option, text.removesuffix(".0") if isinstance(value, float) else text]
    return words


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """The valid names that a wrong name was probably meant to be; empty if none is similar."""
    lower = name.lower()
    ratios = {each: SequenceMatcher(None, lower, each.lower()).ratio() for each in sorted(known)}
    best = max(ratios.values(), default=0.0)
    close = [each for each, ratio in ratios.items() if ratio == best >= _MIN_SIMILARITY]
    if len(name) >= _MIN_PREFIX:
        close += [each for each in ratios if each.lower().startswith(lower) and each not in close]
    return close[:_MAX_SUGGESTIONS]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for an unknown name: similar valid names, or else all of them."""
    names = sorted(known)
    close = close_names(name, names)
    return did_you_mean(close) if close else f"Valid values: {', '.join(names)}"


def did_you_mean(names: Sequence[str]) -> str:
    """A hint for an unknown name, with the valid names that are similar."""
    *others, last = map(repr, names)
    return f"Did you mean {', '.join(others)} or {last}?" if others else f"Did you mean {last}?"


def make_workload(
    model: str, settings: Mapping[str, Any], allow_unknown_model: bool = False
) -> Workload:
    """Return a checked workload, or raise a WorkloadError that names the wrong setting.

    `allow_unknown_model` is for records of trials that may have run with another torchvision.
    """
    for name in settings:
        if name not in SETTINGS:
            raise WorkloadError(f"Unknown setting {name!r}", nearest(name, SETTINGS))
    workload = Workload(model, **{name: _checked(name, settings[name]) for name in settings})
    data = workload.data_name
    if not model:
        raise WorkloadError("No model given", "For example: stepscope trial cnn")
    reference = parse_reference(model)
    if workload.is_custom and not (reference.source and reference.name.isidentifier()):
        raise WorkloadError(
            f"{model!r} does not name a function",
            "Use FILE.py:FUNCTION or package.module:FUNCTION",
        )
    if not allow_unknown_model:
        check_model(model, workload.framework)
    if data and data not in DATA:
        raise WorkloadError(f"Unknown dataset {data!r}", _data_hint(data))
    if workload.is_custom and data not in ("", "custom"):
        raise WorkloadError(
            f"{model} has its own data", "Remove --data, or use --data resident or loader-only"
        )
    if not workload.is_custom and data == "custom":
        valid = ", ".join(sorted(DATA[:-1]))
        raise WorkloadError(
            f"`--data custom` needs a custom workload, and {model} is not one",
            f"Valid values: {valid}",
        )
    durations = [n for n in ("epochs", "steps", "seconds") if getattr(workload, n) is not None]
    if len(durations) > 1:
        *first, last = (f"`{option_name(name)}`" for name in durations)
        options = f"{', '.join(first)} and {last}"
        raise WorkloadError(f"{options} are mutually exclusive", "Use only one of them")
    if workload.page_cache != "as-is" and workload.part == RESIDENT:
        raise WorkloadError("A resident batch is not read from files", "Remove --page-cache")
    if workload.page_cache != "as-is" and workload.is_custom:
        raise WorkloadError(
            f"`--page-cache` has no effect on {model}: the files that it reads are not known",
            "Remove --page-cache",
        )
    return workload


def check_model(model: str, framework: str) -> None:
    """Raise a WorkloadError if the framework has no model of this name, without importing it."""
    if framework == "torch" and not is_reference(model) and is_unknown(model):
        raise unknown_model(model, MODEL_NAMES)


def unknown_model(name: str, known: Iterable[str]) -> WorkloadError:
    close = close_names(name, known)
    hint = (
        "Use cnn, lstm, a torchvision model for images or videos such as resnet50, "
        "or your own function: FILE.py:FUNCTION"
    )
    if "." in name and all(part.isidentifier() for part in name.split(".")):
        source, _, function = name.rpartition(".")
        kind = "file" if source.endswith(".py") else "module"
        hint = f"To use a function in a {kind}, write '{source}:{function}'"
    elif close:
        hint = did_you_mean(close)
    return WorkloadError(f"Unknown model {name!r}", hint)


def _data_hint(name: str) -> str:
    close = close_names(name, (*DATA, *PARTS))
    hint = f"Valid values: {', '.join(sorted(DATA))} (or resident:…, loader-only:…)"
    if close:
        hint = did_you_mean(close)
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    for kind, files, sets in (("jpeg", "images", _IMAGE_SETS), ("video", "videos", _VIDEO_SETS)):
        if plain in sets.split():
            use = f"use --data {kind} with --data-path DIR"
            own = f"To read your own {files} from class folders, {use}"
            hint = f"{hint} {own}" if close else own
    return hint


def _checked(name: str, value: Any) -> Any:
    setting, option, kind = SETTINGS[name], f"`{option_name(name)}`", _TYPES[name]
    if value is None and type(None) in typing.get_args(kind):
        return None
    plain = next((k for k in typing.get_args(kind) if k is not type(None)), kind)
    if plain is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, plain) or isinstance(value, bool) != (plain is bool):
        raise WorkloadError(f"{option} must be {_TYPE_NAMES[plain]}, got {value!r}")
    if setting.choices and value not in setting.choices and not setting.also(value):
        hint = f"Valid values: {', '.join(sorted(setting.choices))}"
        if (name, value) == ("device", "gpu"):
            hint = did_you_mean(["cuda"])
        raise WorkloadError(f"Unknown {name.replace('_', ' ')} {value!r}", hint)
    if isinstance(value, float) and not math.isfinite(value):
        raise WorkloadError(f"{option} must be finite, got {value!r}")
    if setting.least is not None and value < setting.least:
        raise WorkloadError(f"{option} must be at least {setting.least:g}, got {value!r}")
    if setting.above is not None and value <= setting.above:
        raise WorkloadError(f"{option} must be greater than {setting.above:g}, got {value!r}")
    if setting.most is not None and value > setting.most:
        raise WorkloadError(f"{option} must be at most {setting.most:g}, got {value!r}")
    return value
