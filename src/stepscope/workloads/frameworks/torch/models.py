"""Models by name: the papers' small CNN, a recurrent one for text, and what torchvision has.

torchvision is imported only for its own models: it takes longer than a small model trains a step.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from stepscope.errors import BadWorkload
from stepscope.workloads.frameworks.torch.parts import Built, LossOf, Shape
from stepscope.workloads.spec import Workload, nearest, option_name

_CNN = Shape("image", classes=10, size=32)
_LSTM = Shape("tokens", classes=10, length=200, vocabulary=10_000)
_OURS = {"cnn": _CNN, "lstm": _LSTM}
_IMAGENET_CLASSES, _KINETICS_CLASSES, _CIFAR_CLASSES = 1000, 400, 100
_USUAL_SIZE, _USUAL_FRAMES = 224, 16

_SHAPE_KNOBS = {"image": ("image_size",), "clip": ("image_size", "frames"), "tokens": ("length",)}
_AUXILIARY = {"inception_v3": 0.4, "googlenet": 0.3}
"""What the heads at half height count in the loss, as in the papers of these models."""


def model_names() -> list[str]:
    """Every name that `build_model` knows."""
    models = _torchvision("model_names")
    return sorted([*_OURS, *_image_names(models), *_clip_names(models)])


def shape_of(workload: Workload) -> Shape:
    """What the model shall take: what it usually does, but for the knobs that say otherwise."""
    usual = _usual_shape(workload.model)
    _refuse_other_shapes(workload, usual)
    return dataclasses.replace(
        usual,
        classes=workload.classes or _classes(workload, usual),
        size=workload.image_size or usual.size if usual.size else 0,
        frames=workload.frames or usual.frames if usual.frames else 0,
        length=workload.length or usual.length if usual.length else 0,
    )


def build_model(workload: Workload, shape: Shape) -> Built:
    """The model with fresh weights, and the cross entropy of what it says of a batch (x, y)."""
    name = workload.model
    try:
        model = _make(name, shape)
    except (AssertionError, ValueError) as error:
        raise _too_odd(workload, shape, error) from None
    usual = dataclasses.replace(_usual_shape(name), classes=shape.classes)
    if shape != usual or workload.batch_size == 1:
        refused = _try_forward(model, _batch_shape(shape, workload.batch_size), shape.kind)
        if refused:
            raise _too_odd(workload, shape, refused)
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
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * side * side, 32),
        nn.ReLU(),
        nn.Linear(32, classes),
    )


def _make(name: str, shape: Shape) -> nn.Module:
    if name == "cnn":
        return small_cnn(shape.size, shape.classes)
    if name == "lstm":
        return TextLstm(shape.vocabulary, shape.classes)
    model: nn.Module = _torchvision(name).get_model(
        name, weights=None, num_classes=shape.classes, **_arguments(name, shape)
    )
    return model


def _arguments(name: str, shape: Shape) -> dict[str, Any]:
    """What some of torchvision's models must be told beside the number of classes."""
    by_family: dict[str, dict[str, Any]] = {
        "vit": {"image_size": shape.size},
        "maxvit": {"input_size": (shape.size, shape.size)},
        "inception": {"init_weights": True},
        "googlenet": {"init_weights": True},
    }
    return by_family.get(name.partition("_")[0], {})


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
    """What a model was made for."""
    if name in _OURS:
        return _OURS[name]
    models = _torchvision(name)
    if name in _clip_names(models):
        size = _usual_size(models, name)
        return Shape("clip", classes=_KINETICS_CLASSES, size=size, frames=_USUAL_FRAMES)
    if name in _image_names(models):
        return Shape("image", classes=_IMAGENET_CLASSES, size=_usual_size(models, name))
    raise BadWorkload(f"There is no model {name!r}", nearest(name, model_names()))


def _usual_size(models: ModuleType, name: str) -> int:
    """The smallest crop of its published weights: larger ones were tuned further, at 384 or 518."""
    crops = [
        weights.transforms.keywords.get("crop_size", _USUAL_SIZE)
        for weights in models.get_model_weights(name)
    ]
    return min((c if isinstance(c, int) else c[0] for c in crops), default=_USUAL_SIZE)


def _classes(workload: Workload, usual: Shape) -> int:
    return _CIFAR_CLASSES if workload.data_name == "cifar100" else usual.classes


def _refuse_other_shapes(workload: Workload, usual: Shape) -> None:
    """A knob that would change nothing is refused: it would be recorded as if it had."""
    for knob in ("image_size", "frames", "length"):
        if getattr(workload, knob) is not None and knob not in _SHAPE_KNOBS[usual.kind]:
            raise BadWorkload(
                f"{workload.model} takes {_in_words(usual)}, of which {option_name(knob)} says "
                "nothing",
                "Leave it out",
            )


def _batch_shape(shape: Shape, batch_size: int) -> tuple[int, ...]:
    if shape.kind == "tokens":
        return (batch_size, shape.length)
    if shape.kind == "clip":
        return (batch_size, 3, shape.frames, shape.size, shape.size)
    return (batch_size, 3, shape.size, shape.size)


def _try_forward(model: nn.Module, batch: tuple[int, ...], kind: str) -> Exception | None:
    """What PyTorch has against a batch. The meta device knows shapes and computes nothing.

    It takes some 0.1 s, so the usual shapes are left to a test. An operator that the meta device
    does not have tells nothing.
    """
    weights = {
        name: tensor.to("meta")
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    dtype = torch.int64 if kind == "tokens" else torch.float32
    try:
        with torch.no_grad(), torch.device("meta"):
            functional_call(model, weights, (torch.empty(batch, dtype=dtype),))
    except NotImplementedError:
        return None
    except Exception as error:
        return error
    return None


def _too_odd(workload: Workload, shape: Shape, error: Exception) -> BadWorkload:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return BadWorkload(
        f"{workload.model} cannot be trained on batches of {workload.batch_size} "
        f"{_in_words(shape)}",
        f"It was made for {_in_words(_usual_shape(workload.model))}. PyTorch says: {said}",
    )


def _in_words(shape: Shape) -> str:
    if shape.kind == "tokens":
        return f"texts of {shape.length} tokens"
    pixels = f"of {shape.size}×{shape.size} pixels"
    return (
        f"clips of {shape.frames} frames {pixels}" if shape.kind == "clip" else f"images {pixels}"
    )


def _image_names(models: ModuleType) -> list[str]:
    names: list[str] = models.list_models(module=models)
    return names


def _clip_names(models: ModuleType) -> list[str]:
    names: list[str] = models.list_models(module=models.video)
    return names


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
