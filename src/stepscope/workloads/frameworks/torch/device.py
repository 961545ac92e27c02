"""Device, memory limit, precision and process group of a rank."""

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

from stepscope.errors import GpuUnavailable, WorkloadError
from stepscope.workloads.reporting import RankPlacement
from stepscope.workloads.spec import LOADER_ONLY, Workload

_RANKS_TIMEOUT = datetime.timedelta(minutes=10)
_REDUCED = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(workload: Workload, placement: RankPlacement) -> torch.device:
    """One GPU per rank if there are GPUs, otherwise the CPU. Loading alone does not need a GPU."""
    if workload.part == LOADER_ONLY:
        return torch.device("cpu")
    count = gpu_count(workload)
    if count == 0:
        return torch.device("cpu")
    if placement.ranks > count:
        available = "1 is" if count == 1 else f"{count} are"
        raise GpuUnavailable(
            f"`--ranks {placement.ranks}` needs {placement.ranks} GPUs, but only {available} "
            "available",
            f"Use --ranks {count} or --device cpu",
        )
    device = torch.device("cuda", placement.local_rank)
    torch.cuda.set_device(device)
    return device


def gpu_count(workload: Workload) -> int:
    """Number of GPUs that the workload may use. Asks NVML and does not initialize CUDA."""
    count = torch.cuda.device_count() if workload.device != "cpu" else 0
    if workload.device == "cuda" and count == 0:
        raise GpuUnavailable(
            "PyTorch cannot use a GPU on this machine",
            "Remove --device, or run `stepscope doctor` to see why",
        )
    return count


def cap_memory(device: torch.device, limit: int | None) -> None:
    """Limit the bytes that PyTorch may allocate, as if the GPU were smaller."""
    if limit is None:
        return
    if device.type != "cuda":
        raise GpuUnavailable(
            "`--gpu-memory` needs a GPU, and this trial does not use one",
            "Remove it, or use --memory to limit host memory",
        )
    total = torch.cuda.get_device_properties(device).total_memory
    if limit > total:
        raise GpuUnavailable(
            f"`--gpu-memory` is {limit / 2**30:.1f} GiB, but the GPU has {total / 2**30:.1f} GiB",
            "Use a smaller limit: a larger GPU cannot be emulated",
        )
    torch.cuda.set_per_process_memory_fraction(limit / total, device)


def versions(starts_cuda: bool = True) -> dict[str, str | None]:
    """Versions of the libraries. The query for cuDNN initializes CUDA, which rules out forks."""
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
    """Autocast data type and gradient scaler."""

    device: str
    reduced: torch.dtype | None
    scaler: Any

    def autocast(self) -> Any:
        if self.reduced is None:
            return nullcontext()
        return torch.autocast(self.device, self.reduced)


def set_precision(precision: str, device: torch.device) -> Precision:
    """Set the precision. fp32 disables TF32, which PyTorch uses in convolutions by default."""
    if precision == "tf32" and device.type == "cpu":
        raise WorkloadError(
            "`--precision tf32` needs an NVIDIA GPU", "Use --precision fp32 or --precision bf16"
        )
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    return Precision(device.type, _REDUCED.get(precision), scaler)


@contextmanager
def process_group(ranks: int, device: torch.device) -> Iterator[None]:
    """A process group for the training: NCCL between GPUs, Gloo otherwise.

    A rank that destroys the group while another rank or a hook of the model still uses it may abort
    at exit. The model is therefore released first, and then the ranks wait for each other.
    """
    if ranks == 1:
        yield
        return
    if device.type == "cpu":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", timeout=_RANKS_TIMEOUT)
    else:
        dist.init_process_group("nccl", timeout=_RANKS_TIMEOUT, device_id=device)
    yield  # without `finally`, since a rank that failed must not wait for the other ranks
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def broadcast(number: int, ranks: int, device: torch.device) -> int:
    """Return the number of rank 0."""
    if ranks == 1:
        return number
    tensor = torch.tensor([number], dtype=torch.int64, device=device)
    dist.broadcast(tensor, 0)
    return int(tensor.item())
