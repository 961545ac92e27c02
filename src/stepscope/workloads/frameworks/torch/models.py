"""Models by name: the papers' small CNN, a recurrent one for text, and what torchvision has.

torchvision is imported only for its own models: it takes longer than a small model trains a step.
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

from stepscope.errors import BadWorkload
from stepscope.workloads.spec import Workload, nearest, option_name

LossOf = Callable[[nn.Module, Any], torch.Tensor]
"""Runs the model forward on a batch (on its device) and gives the loss to go backward from."""


@dataclass(frozen=True)
class Shape:
    """What a model takes and tells apart: images, clips (of frames) or texts (of tokens)."""

    kind: Literal["image", "clip", "tokens"]
    classes: int
    size: int = 0
    """Pixels each way, of an image or a frame."""
    frames: int = 0
    length: int = 0
    """Tokens of a text."""
    vocabulary: int = 0

    def batch_sizes(self, batch: int) -> tuple[int, ...]:
        if self.kind == "tokens":
            return (batch, self.length)
        frames = (self.frames,) if self.kind == "clip" else ()
        return (batch, 3, *frames, self.size, self.size)

    def __str__(self) -> str:
        if self.kind == "tokens":
            return f"texts of {self.length} tokens"
        pixels = f"of {self.size}×{self.size} pixels"
        clips = self.kind == "clip"
        return f"clips of {self.frames} frames {pixels}" if clips else f"images {pixels}"


@dataclass(frozen=True)
class Own:
    """What a user's function brings beside the model."""

    data: Dataset[Any]
    collate: Callable[[list[Any]], Any] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    notes: tuple[str, ...] = ()
    """What of it gave way to a setting, or is done otherwise than its user may think."""


@dataclass(frozen=True)
class Built:
    """A model, on the CPU, and how a batch becomes a loss."""

    model: nn.Module
    loss: LossOf
    own: Own | None = None


_CNN = Shape("image", classes=10, size=32)
_LSTM = Shape("tokens", classes=10, length=200, vocabulary=10_000)
_OURS = {"cnn": _CNN, "lstm": _LSTM}
_IMAGENET_CLASSES, _KINETICS_CLASSES, _CIFAR_CLASSES = 1000, 400, 100
_USUAL_SIZE, _USUAL_FRAMES = 224, 16

_SHAPE_SETTINGS = {"image": ["image_size"], "clip": ["image_size", "frames"], "tokens": ["length"]}
_AUXILIARY = {"inception_v3": 0.4, "googlenet": 0.3}
"""What the heads at half height count in the loss, as in the papers of these models."""


def model_names() -> list[str]:
    models = _torchvision("model_names")
    ours: list[str] = [*_OURS, *models.list_models(module=models)]
    return sorted([*ours, *models.list_models(module=models.video)])


def shape_of(workload: Workload) -> Shape:
    """What the model shall take: what it usually does, but for the settings that say otherwise."""
    usual = _usual_shape(workload.model)
    for setting in ("image_size", "frames", "length"):
        # One that would change nothing is refused: it would be recorded as if it had.
        if getattr(workload, setting) is not None and setting not in _SHAPE_SETTINGS[usual.kind]:
            raise BadWorkload(
                f"{workload.model} takes {usual}, of which {option_name(setting)} says nothing",
                "Leave it out",
            )
    of_data = _CIFAR_CLASSES if workload.data_name == "cifar100" else usual.classes
    return dataclasses.replace(
        usual,
        classes=workload.classes or of_data,
        size=workload.image_size or usual.size,
        frames=workload.frames or usual.frames,
        length=workload.length or usual.length,
    )


def build_model(workload: Workload, shape: Shape) -> Built:
    """The model with fresh weights, and the cross entropy of what it says of a batch (x, y)."""
    name = workload.model
    usual = _usual_shape(name)
    refused: Exception | None = None
    try:
        model = _make(name, shape)
        if shape != dataclasses.replace(usual, classes=shape.classes) or workload.batch_size == 1:
            refused = _try_forward(model, shape, workload.batch_size)
    except (AssertionError, ValueError) as error:
        refused = error
    if refused is not None:
        said = (str(refused).strip() or type(refused).__name__).splitlines()[0]
        raise BadWorkload(
            f"{name} cannot be trained on batches of {workload.batch_size} {shape}",
            f"It was made for {usual}. PyTorch says: {said}",
        ) from None
    return Built(model, _classification_loss(_AUXILIARY.get(name, 0.0)))


def parameters_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


class TextLstm(nn.Module):
    """Tells texts apart by what two layers of LSTM remember after the last token."""

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
        first, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = cross_entropy(first, labels)
        for other in others:
            loss = loss + auxiliary * cross_entropy(other, labels)
        return loss

    return loss_of


def _usual_shape(name: str) -> Shape:
    if name in _OURS:
        return _OURS[name]
    models = _torchvision(name)
    is_clip = name in models.list_models(module=models.video)
    if not is_clip and name not in models.list_models(module=models):
        raise BadWorkload(f"There is no model {name!r}", nearest(name, model_names()))
    transforms = [weights.transforms.keywords for weights in models.get_model_weights(name)]
    crops = [keywords.get("crop_size", _USUAL_SIZE) for keywords in transforms]
    # The smallest crop of its published weights: larger ones were tuned further, at 384 or 518.
    size = min((c if isinstance(c, int) else c[0] for c in crops), default=_USUAL_SIZE)
    if is_clip:
        return Shape("clip", classes=_KINETICS_CLASSES, size=size, frames=_USUAL_FRAMES)
    return Shape("image", classes=_IMAGENET_CLASSES, size=size)


def _try_forward(model: nn.Module, shape: Shape, batch: int) -> Exception | None:
    """What PyTorch has against a batch. The meta device knows shapes and computes nothing.

    It takes some 0.1 s, so the usual shapes are left to a test. An operator that the meta device
    does not have tells nothing.
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


def _torchvision(asked: str) -> ModuleType:
    """torchvision's models. It fails to import in many ways when it does not match PyTorch."""
    try:
        from torchvision import models
    except Exception as error:
        raise BadWorkload(
            f"{asked!r} needs torchvision, which cannot be imported: {error}",
            f"Install the one for PyTorch {torch.__version__}; without it there are "
            f"{' and '.join(_OURS)}",
        ) from None
    found: ModuleType = models
    return found
