"""One rank's training step, and the cycle of steps in which memory may run out."""

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

STEPS_AGAIN = 2
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}
_LEAST_PART = 2
"""One sample alone is refused by batch normalisation, which is no matter of memory."""


class Phase(str, Enum):
    SMALLER_BATCH = "smaller batch"
    EVALUATION = "evaluation"
    AGAIN = "again"


def rest_of_cycle(batch: int, again: int = STEPS_AGAIN) -> Iterator[tuple[Phase, int]]:
    """Each with the size of its batch: the last and smaller batch of an epoch, an evaluation, and
    steps again. Memory runs out in each of them."""
    part = max(_LEAST_PART, round(batch * 2 / 5))  # any part will do
    if part < batch:
        yield Phase.SMALLER_BATCH, part
    yield Phase.EVALUATION, batch
    for _ in range(again):
        yield Phase.AGAIN, batch


class Stepper:
    """Forward, backward and optimizer of one rank."""

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
        """From a batch to its loss."""
        if workload.ranks > 1:  # gradients are averaged over the ranks
            ids = [device.index] if device.type == "cuda" else None
            self.forward = DistributedDataParallel(self.forward, device_ids=ids)
        parameters = [p for p in self.forward.parameters() if p.requires_grad]
        make = built.own.optimizer if built.own else None
        if make is None:
            more: dict[str, Any] = {"lr": workload.lr, "weight_decay": workload.weight_decay}
            if workload.optimizer == "sgd":
                more["momentum"] = workload.momentum
            make = partial(_OPTIMIZERS[workload.optimizer], **more)
        self.optimizer = make(parameters)
        self._loss: torch.Tensor | None = None

    def batch(self, batch: Any, last: bool) -> None:
        """Add the gradients of a batch; the last of a step exchanges them between ranks."""
        forward = self.forward
        adds_up = isinstance(forward, DistributedDataParallel) and not last
        with forward.no_sync() if adds_up else nullcontext():  # type: ignore[operator]
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
        """The loss of a batch as a validation computes it; what is trained stays as it is.

        A step of a user's may not be made for evaluation. That is no matter of memory: it is
        returned as a note.
        """
        self.forward.eval()
        try:
            with torch.no_grad(), self._precision.autocast():
                self.forward(batch)
        except Exception as error:
            if failure_kind(TorchFramework(), error) != "error":
                raise
            said = (str(error).strip() or repr(error)).splitlines()[0]
            return f"evaluation was not tried: {said}"
        finally:
            self.forward.train()
        return None

    def last_loss(self) -> float | None:
        """What the loss was in the end. Waits for the device: not within the measured steps."""
        return None if self._loss is None else float(self._loss.float().mean().item())

    def state_bytes(self) -> dict[str, int]:
        """What stays from one step to the next, and the gradients that come in each."""
        module = self.forward
        states = (state for state in self.optimizer.state.values() if isinstance(state, dict))
        values = (value for state in states for value in state.values())
        return {
            "weights": sum(t.nbytes for t in (*module.parameters(), *module.buffers())),
            "gradients": sum(p.nbytes for p in module.parameters() if p.requires_grad),
            "optimizer": sum(value.nbytes for value in values if isinstance(value, torch.Tensor)),
        }


class _Forward(nn.Module):
    """Model and loss as one module, so that gradients are exchanged whatever a user's step does."""

    def __init__(self, model: nn.Module, loss: LossOf) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self._loss(self.model, batch)
