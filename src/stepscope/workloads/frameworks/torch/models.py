"""Models by name: a small CNN, an LSTM for text, and the models of torchvision.

torchvision is imported only for its own models, since the import takes seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from stepscope.errors import WorkloadError
from stepscope.workloads.frameworks.torch.model_names import BUILT_IN
from stepscope.workloads.spec import Workload, option_name, unknown_model

LossOf = Callable[[nn.Module, Any], torch.Tensor]
"""Runs the forward pass on a batch, which is on the device of the model, and returns the loss."""


@dataclass(frozen=True)
class Shape:
    """The input and the classes of a model: images, clips (of frames) or texts (of tokens)."""

    kind: Literal["image", "clip", "tokens"]
    classes: int
    size: int = 0
    """Height and width in pixels of an image or a frame."""
    frames: int = 0
    sequence_length: int = 0
    """Tokens per text."""
    vocabulary: int = 0

    def batch_sizes(self, batch: int) -> tuple[int, ...]:
        if self.kind == "tokens":
            return (batch, self.sequence_length)
        frames = (self.frames,) if self.kind == "clip" else ()
        return (batch, 3, *frames, self.size, self.size)

    def __str__(self) -> str:
        if self.kind == "tokens":
            return f"texts of {self.sequence_length} tokens"
        pixels = f"of {self.size}×{self.size} pixels"
        clips = self.kind == "clip"
        return f"clips of {self.frames} frames {pixels}" if clips else f"images {pixels}"


@dataclass(frozen=True)
class CustomParts:
    """The parts of a custom workload other than the model and the loss."""

    data: Dataset[Any]
    collate: Callable[[list[Any]], Any] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    notes: tuple[str, ...] = ()
    """Parts that a setting replaces, or that may work differently than the user expects."""


@dataclass(frozen=True)
class Built:
    """A model on the CPU, and its loss."""

    model: nn.Module
    loss: LossOf
    custom: CustomParts | None = None


_CNN = Shape("image", classes=10, size=32)
_LSTM = Shape("tokens", classes=10, sequence_length=200, vocabulary=10_000)
_BUILT_IN_SHAPES = dict(zip(BUILT_IN, (_CNN, _LSTM), strict=True))
_IMAGENET_CLASSES, _KINETICS_CLASSES, _CIFAR_CLASSES = 1000, 400, 100
_DEFAULT_SIZE, _DEFAULT_FRAMES = 224, 16

_SHAPE_SETTINGS = {
    "image": ["image_size"],
    "clip": ["image_size", "frames"],
    "tokens": ["sequence_length"],
}
_AUXILIARY = {"inception_v3": 0.4, "googlenet": 0.3}
"""Weight of the auxiliary classifiers in the loss, as in the papers of these models."""


def model_names() -> list[str]:
    """All names, from the installed torchvision."""
    models = _torchvision("model_names")
    image_models = models.list_models(module=models)
    return sorted([*BUILT_IN, *image_models, *models.list_models(module=models.video)])


def shape_of(workload: Workload) -> Shape:
    """The input shape of the model: its default, changed by the settings."""
    default = _default_shape(workload.model)
    for setting in ("image_size", "frames", "sequence_length"):
        # Otherwise the record of the trial would name a setting that had no effect.
        if getattr(workload, setting) is not None and setting not in _SHAPE_SETTINGS[default.kind]:
            option = option_name(setting)
            raise WorkloadError(
                f"`{option}` has no effect on {workload.model}, which needs {default}",
                f"Remove {option}",
            )
    classes = _CIFAR_CLASSES if workload.data_name == "cifar100" else default.classes
    return dataclasses.replace(
        default,
        classes=workload.classes or classes,
        size=workload.image_size or default.size,
        frames=workload.frames or default.frames,
        sequence_length=workload.sequence_length or default.sequence_length,
    )


def build_model(workload: Workload, shape: Shape) -> Built:
    """The model with new weights, and its cross-entropy loss for batches (x, y)."""
    name = workload.model
    default = _default_shape(name)
    failure: Exception | None = None
    try:
        model = _make(name, shape)
        if shape != dataclasses.replace(default, classes=shape.classes) or workload.batch_size == 1:
            failure = _try_forward(model, shape, workload.batch_size)
    except (AssertionError, ValueError) as error:
        failure = error
    if failure is not None:
        reason = (str(failure).strip() or type(failure).__name__).splitlines()[0]
        raise WorkloadError(
            f"{name} cannot train with a batch of {workload.batch_size} {shape}: {reason}",
            f"Its default input is {default}",
        ) from None
    return Built(model, _classification_loss(_AUXILIARY.get(name, 0.0)))


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class TextLstm(nn.Module):
    """Classifies texts by the last hidden state of a two-layer LSTM."""

    def __init__(self, vocabulary: int, classes: int, width: int = 256, hidden: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True, dropout=0.5)
        self.classify = nn.Linear(hidden, classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(self.embedding(tokens))
        scores: torch.Tensor = self.classify(hidden[-1])
        return scores


def small_cnn(size: int, classes: int) -> nn.Module:
    """Table 1 of Torres et al. 2021: 89,450 parameters with 32×32 images of 10 classes."""
    side = max(((size - 2) // 2 - 2) // 2 - 2, 1)
    first = [nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    third = [nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()]
    dense = [nn.Linear(64 * side * side, 32), nn.ReLU(), nn.Linear(32, classes)]
    return nn.Sequential(*first, *second, *third, *dense)


def _make(name: str, shape: Shape) -> nn.Module:
    if name == "cnn":
        return small_cnn(shape.size, shape.classes)
    if name == "lstm":
        return TextLstm(shape.vocabulary, shape.classes)
    more: dict[str, dict[str, Any]] = {
        "vit": {"image_size": shape.size},
        "maxvit": {"input_size": (shape.size, shape.size)},
        "inception": {"init_weights": True},
        "googlenet": {"init_weights": True},
    }
    model: nn.Module = _torchvision(name).get_model(
        name, weights=None, num_classes=shape.classes, **more.get(name.partition("_")[0], {})
    )
    return model


def _classification_loss(auxiliary: float) -> LossOf:
    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        outputs = model(inputs)
        main, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = cross_entropy(main, labels)
        for other in others:
            loss = loss + auxiliary * cross_entropy(other, labels)
        return loss

    return loss_of


def _default_shape(name: str) -> Shape:
    if name in _BUILT_IN_SHAPES:
        return _BUILT_IN_SHAPES[name]
    models = _torchvision(name)
    is_clip = name in models.list_models(module=models.video)
    if not is_clip and name not in models.list_models(module=models):
        raise unknown_model(name, model_names())
    transforms = [weights.transforms.keywords for weights in models.get_model_weights(name)]
    crops = [keywords.get("crop_size", _DEFAULT_SIZE) for keywords in transforms]
    # The smallest crop of the published weights: larger ones were fine-tuned at 384 or 518.
    size = min((c if isinstance(c, int) else c[0] for c in crops), default=_DEFAULT_SIZE)
    if is_clip:
        return Shape("clip", classes=_KINETICS_CLASSES, size=size, frames=_DEFAULT_FRAMES)
    return Shape("image", classes=_IMAGENET_CLASSES, size=size)


def _try_forward(model: nn.Module, shape: Shape, batch: int) -> Exception | None:
    """Run the forward pass on the meta device, which has shapes only, and return the error.

    It takes about 0.1 s, so default shapes are checked by a test instead. Operators that the meta
    device does not support are ignored.
    """
    tensors = (*model.named_parameters(), *model.named_buffers())
    weights = {name: tensor.to("meta") for name, tensor in tensors}
    dtype = torch.int64 if shape.kind == "tokens" else torch.float32
    try:
        with torch.no_grad(), torch.device("meta"):
            inputs = torch.empty(shape.batch_sizes(batch), dtype=dtype)
            functional_call(model, weights, (inputs,))
    except NotImplementedError:
        return None
    except Exception as error:
        return error
    return None


def _torchvision(model: str) -> ModuleType:
    """The models of torchvision. Its import fails in many ways if it does not match PyTorch."""
    try:
        from torchvision import models
    except Exception as error:
        raise WorkloadError(
            f"{model!r} needs torchvision, which cannot be imported: {error}",
            f"Install the torchvision version that matches PyTorch {torch.__version__}, for "
            "example with pip install torch torchvision. Models without torchvision: "
            f"{', '.join(BUILT_IN)}",
        ) from None
    module: ModuleType = models
    return module
