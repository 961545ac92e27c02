"""The training step of one rank, and the training cycle that a probe runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stepscope.workloads.frameworks.contract import failure_kind
from stepscope.workloads.frameworks.torch.adapter import TorchFramework
from stepscope.workloads.frameworks.torch.device import Precision
from stepscope.workloads.frameworks.torch.models import Built, LossOf
from stepscope.workloads.spec import Workload

STEPS_AFTER_EVALUATION = 2
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_MIN_SMALLER_BATCH = 2
"""Batch normalization rejects a single sample, which has nothing to do with memory."""


class Phase(str, Enum):
    SMALLER_BATCH = "smaller batch"
    EVALUATION = "evaluation"
    STEP = "step after evaluation"


def rest_of_cycle(
    batch: int, steps_after: int = STEPS_AFTER_EVALUATION
) -> Iterator[tuple[Phase, int]]:
    """Yield the phases after the first steps of a training cycle, each with its batch size.

    They are the smaller last batch of an epoch, an evaluation, and more steps. Memory can run out
    in each of them.
    """
    smaller = max(_MIN_SMALLER_BATCH, round(batch * 2 / 5))  # any smaller batch will do
    if smaller < batch:
        yield Phase.SMALLER_BATCH, smaller
    yield Phase.EVALUATION, batch
    for _ in range(steps_after):
        yield Phase.STEP, batch


class Stepper:
    """Forward pass, backward pass and optimizer step of one rank."""

    def __init__(
        self, workload: Workload, built: Built, device: torch.device, precision: Precision
    ) -> None:
        self._precision = precision
        self._accumulate = workload.accumulate
        model = built.model.to(device)
        model.train()
        if workload.channels_last:
            for parameter in model.parameters():
                if parameter.dim() in (4, 5):
                    layout = torch.channels_last if parameter.dim() == 4 else torch.channels_last_3d
                    parameter.data = parameter.data.contiguous(memory_format=layout)
        if workload.compile:
            model = torch.compile(model)  # type: ignore[assignment]
        self.forward: nn.Module = _Forward(model, built.loss)
        """Maps a batch to its loss."""
        if workload.ranks > 1:  # gradients are averaged over the ranks
            ids = [device.index] if device.type == "cuda" else None
            self.forward = DistributedDataParallel(self.forward, device_ids=ids)
        parameters = [p for p in self.forward.parameters() if p.requires_grad]
        make = built.custom.optimizer if built.custom else None
        if make is None:
            options: dict[str, Any] = {"lr": workload.lr, "weight_decay": workload.weight_decay}
            if workload.optimizer == "sgd":
                options["momentum"] = workload.momentum
            make = partial(_OPTIMIZERS[workload.optimizer], **options)
        self.optimizer = make(parameters)
        self._loss: torch.Tensor | None = None

    def batch(self, batch: Any, last: bool) -> None:
        """Add the gradients of a batch. The last batch of a step synchronizes the ranks."""
        forward = self.forward
        is_local = isinstance(forward, DistributedDataParallel) and not last
        with forward.no_sync() if is_local else nullcontext():  # type: ignore[operator]
            with self._precision.autocast():
                loss = forward(batch)
            self._loss = loss.detach()
            part = loss / self._accumulate if self._accumulate > 1 else loss
            self._precision.scaler.scale(part).backward()

    def step(self) -> None:
        self._precision.scaler.step(self.optimizer)
        self._precision.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def evaluate(self, batch: Any) -> str | None:
        """Compute the loss of a batch without gradients and without changing the model.

        A custom step may not support evaluation. That has nothing to do with memory, so the error
        is returned as a note.
        """
        self.forward.eval()
        try:
            with torch.no_grad(), self._precision.autocast():
                self.forward(batch)
        except Exception as error:
            if failure_kind(TorchFramework(), error) != "error":
                raise
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            return f"the evaluation was skipped: {reason}"
        finally:
            self.forward.train()
        return None

    def last_loss(self) -> float | None:
        """Return the last loss. This synchronizes with the device: not for measured steps."""
        return None if self._loss is None else float(self._loss.float().mean().item())

    def state_bytes(self) -> dict[str, int]:
        """Return the memory that does not depend on the batch, by field of `Parts`."""
        module = self.forward
        states = (state for state in self.optimizer.state.values() if isinstance(state, dict))
        values = (value for state in states for value in state.values())
        return {
            "weights_bytes": sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
            "gradients_bytes": sum(p.nbytes for p in module.parameters() if p.requires_grad),
            "optimizer_bytes": sum(v.nbytes for v in values if isinstance(v, torch.Tensor)),
        }


class _Forward(nn.Module):
    """Model and loss as one module, so that DistributedDataParallel also covers a custom step."""

    def __init__(self, model: nn.Module, loss: LossOf) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self._loss(self.model, batch)
