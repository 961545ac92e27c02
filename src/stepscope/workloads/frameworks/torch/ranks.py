"""Processes that train together: started by torch's elastic launcher, joined here.

Ending needs care: a rank that destroys the group while another still uses it, or while the model's
hooks hold it, may abort at its exit. So the model goes first, then all wait for each other.
"""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

_PATIENCE = datetime.timedelta(minutes=10)


@contextmanager
def joined(ranks: int, device: torch.device) -> Iterator[None]:
    """A process group around the training, NCCL between GPUs and Gloo otherwise."""
    if ranks == 1:
        yield
        return
    if device.type == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", timeout=_PATIENCE)
    else:
        dist.init_process_group("nccl", timeout=_PATIENCE, device_id=device)
    yield  # not in a finally: a rank that failed must not wait for the others
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def distributed(model: nn.Module, ranks: int, device: torch.device) -> nn.Module:
    """The model whose gradients are averaged over the ranks."""
    if ranks == 1:
        return model
    ids = [device.index] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(model, device_ids=ids)


def without_sync(model: nn.Module) -> Any:
    """A context in which gradients are only added up: all batches of a step but the last."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return model.no_sync()
    return nullcontext()


def wait_for_all(ranks: int) -> None:
    if ranks > 1:
        dist.barrier()


def agreed(number: int, ranks: int, device: torch.device) -> int:
    """What the first rank says, known to all."""
    if ranks == 1:
        return number
    tensor = torch.tensor([number], dtype=torch.int64, device=device)
    dist.broadcast(tensor, 0)
    return int(tensor.item())
