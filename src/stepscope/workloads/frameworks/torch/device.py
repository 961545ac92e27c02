"""The device of a rank: which one, how much of its memory, its precision; and the other ranks."""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from stepscope.errors import BadWorkload
from stepscope.workloads.reporting import RankPlacement
from stepscope.workloads.spec import LOADER_ONLY, Workload

_RANKS_TIMEOUT = datetime.timedelta(minutes=10)
_REDUCED = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(workload: Workload, place: RankPlacement) -> torch.device:
    """A GPU for each rank where there are GPUs, else the CPU for all. Who only loads needs none."""
    if workload.part == LOADER_ONLY:
        return torch.device("cpu")
    count = gpu_count(workload)
    if count == 0:
        return torch.device("cpu")
    if place.ranks > count:
        there = "is 1" if count == 1 else f"are {count}"
        raise BadWorkload(
            f"{place.ranks} ranks need as many GPUs, and there {there} here",
            f"Give --ranks {count}, or --device cpu",
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def gpu_count(workload: Workload) -> int:
    """How many it may use. Asks NVML: CUDA is not started."""
    count = torch.cuda.device_count() if workload.device != "cpu" else 0
    if workload.device == "cuda" and count == 0:
        raise BadWorkload(
            "There is no GPU that PyTorch can use here",
            "Leave --device out, or see: stepscope doctor",
        )
    return count


def cap_memory(device: torch.device, most: int | None) -> None:
    """Let the framework allocate no more than this, as if the GPU were smaller."""
    if most is None:
        return
    if device.type != "cuda":
        raise BadWorkload(
            "--gpu-memory limits a GPU, and this trial uses none", "Leave it out, or see --memory"
        )
    total = torch.cuda.get_device_properties(device).total_memory
    if most > total:
        raise BadWorkload(
            f"--gpu-memory asks for {most / 2**30:.1f} GiB of a GPU that has {total / 2**30:.1f}",
            "A larger GPU cannot be emulated",
        )
    torch.cuda.set_per_process_memory_fraction(most / total, device)


def versions(starts_cuda: bool = True) -> dict[str, str | None]:
    """Of what does the work. To ask for cuDNN's starts CUDA, and then no fork can use it."""
    try:
        torchvision = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        torchvision = None
    cudnn = torch.backends.cudnn.version() if starts_cuda else None  # type: ignore[no-untyped-call]
    return {
        "torch": str(torch.__version__),
        "torchvision": torchvision,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else str(cudnn),
    }


@dataclass(frozen=True)
class Precision:
    """How the forward pass computes, and what keeps small gradients from vanishing."""

    device: str
    reduced: torch.dtype | None
    scaler: Any

    def autocast(self) -> Any:
        if self.reduced is None:
            return nullcontext()
        return torch.autocast(self.device, self.reduced)


def set_precision(precision: str, device: torch.device) -> Precision:
    """fp32 is all of it: TF32, which PyTorch uses in convolutions unasked, only if asked for."""
    if precision == "tf32" and device.type == "cpu":
        raise BadWorkload("tf32 is a number of NVIDIA's GPUs", "Give --precision fp32 or bf16")
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    return Precision(device.type, _REDUCED.get(precision), scaler)


@contextmanager
def joined(ranks: int, device: torch.device) -> Iterator[None]:
    """A process group around the training, NCCL between GPUs and Gloo otherwise.

    Ending needs care: a rank that destroys the group while another still uses it, or while the
    model's hooks hold it, may abort at its exit. So the model goes first, then all wait.
    """
    if ranks == 1:
        yield
        return
    if device.type == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", timeout=_RANKS_TIMEOUT)
    else:
        dist.init_process_group("nccl", timeout=_RANKS_TIMEOUT, device_id=device)
    yield  # not in a finally: a rank that failed must not wait for the others
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def agreed(number: int, ranks: int, device: torch.device) -> int:
    if ranks == 1:
        return number
    tensor = torch.tensor([number], dtype=torch.int64, device=device)
    dist.broadcast(tensor, 0)
    return int(tensor.item())
