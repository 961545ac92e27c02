"""What a training is put together from: a model with its loss, and data of a shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import Dataset

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


@dataclass(frozen=True)
class Own:
    """What a user's function brings beside the model."""

    data: Dataset[Any]
    collate: Callable[[list[Any]], Any] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None
    notes: tuple[str, ...] = ()
    """What of it gave way to a knob, or is done otherwise than its user may think."""


@dataclass(frozen=True)
class Built:
    """A model, on the CPU, and how a batch becomes a loss."""

    model: nn.Module
    loss: LossOf
    own: Own | None = None


@dataclass(frozen=True)
class Data:
    """A data set, what can be said of it, and the files that it reads."""

    dataset: Dataset[Any]
    facts: dict[str, Any] = field(default_factory=dict)
    """For the record: name, samples, where from, generated or not."""
    files: tuple[Path, ...] = ()
    collate: Callable[[list[Any]], Any] | None = None
