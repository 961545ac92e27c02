"""The device of a rank: which one, how much of its memory, in what numbers it computes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from stepscope.errors import BadWorkload
from stepscope.workloads.reporting import Place
from stepscope.workloads.spec import LOADER_ONLY, Workload

_REDUCED = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_device(workload: Workload, place: Place) -> torch.device:
    """A GPU for each rank where there are GPUs, else the CPU for all. Who only loads needs none."""
    if workload.part == LOADER_ONLY:
        return torch.device("cpu")
    count = torch.cuda.device_count() if workload.device != "cpu" else 0
    if workload.device == "cuda" and count == 0:
        raise BadWorkload(
            "There is no GPU that PyTorch can use here",
            "Leave --device out, or see: stepscope doctor",
        )
    if count == 0:
        return torch.device("cpu")
    if place.ranks > count:
        raise BadWorkload(
            f"{place.ranks} ranks need as many GPUs, and there {_is_are(count)} here",
            f"Give --ranks {count}, or --device cpu",
        )
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    return device


def _is_are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"


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


def memory_facts(device: torch.device, cap: int | None) -> dict[str, Any] | None:
    """What the allocator of a GPU says at the end of the steps."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    return {
        "allocated_peak": torch.cuda.max_memory_allocated(device),
        "reserved_peak": torch.cuda.max_memory_reserved(device),
        "retries": int(stats.get("num_alloc_retries", 0)),
        "cap": cap,
    }


def describe_device(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {"device": str(device), "device_name": name}


def versions(starts_cuda: bool = True) -> dict[str, str | None]:
    """Of what does the work. To ask for cuDNN's starts CUDA, and then no fork can use it."""
    try:
        torchvision = metadata.version("torchvision")
    except metadata.PackageNotFoundError:
        torchvision = None
    return {
        "torch": str(torch.__version__),
        "torchvision": torchvision,
        "cuda": torch.version.cuda,
        "cudnn": _cudnn() if starts_cuda else None,
    }


def _cudnn() -> str | None:
    version = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return None if version is None else str(version)


@dataclass(frozen=True)
class Numbers:
    """In which numbers the forward pass computes, and what keeps small gradients from vanishing."""

    device: str
    reduced: torch.dtype | None
    scaler: Any

    def autocast(self) -> Any:
        if self.reduced is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device, self.reduced)


def set_numbers(precision: str, device: torch.device) -> Numbers:
    """fp32 is all of it: TF32, which PyTorch uses in convolutions unasked, only if asked for."""
    if precision == "tf32" and device.type == "cpu":
        raise BadWorkload("tf32 is a number of NVIDIA's GPUs", "Give --precision fp32 or bf16")
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    return Numbers(device.type, _REDUCED.get(precision), scaler)
