"""The PyTorch adapter. It imports torch only in `load`: the launcher does not need it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from stepscope.errors import WorkloadError
from stepscope.workloads.frameworks import contract
from stepscope.workloads.frameworks.contract import AllocatorStats, Framework
from stepscope.workloads.reporting import RankPlacement, RankReport
from stepscope.workloads.spec import Workload

_GPU_NAMES = ("CUDA", "CUBLAS", "CUDNN")
_NO_GPU_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
_NO_HOST_MEMORY = ("DefaultCPUAllocator: ", "Cannot allocate memory", "Caught MemoryError")
_NO_ENGINE = "unable to find an engine to execute this computation"
"""cuDNN's message when no algorithm works, which may be because each one ran out of memory."""


class TorchFramework(Framework):
    name = "PyTorch"
    capabilities = contract.Capabilities(
        devices=("cpu", "cuda"),
        precisions=("fp32", "tf32", "bf16", "fp16"),
        custom_files=True,
        profiling=True,
        memory_cap=True,
        cycle=True,
        probes=True,
    )

    def load(self) -> None:
        try:
            import stepscope.workloads.frameworks.torch.loop  # noqa: F401
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "torchvision"):
                raise
            raise WorkloadError(
                f"{error.name} is not installed for {sys.executable}",
                "Install it with: pip install torch torchvision",
            ) from None

    def train(self, workload: Workload, placement: RankPlacement, report: RankReport) -> None:
        from stepscope.workloads.frameworks.torch.loop import train

        train(workload, placement, report)

    def launch(self, ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
        """PyTorch's elastic launcher on this machine, without restarts."""
        options = (
            f"--nnodes=1 --nproc-per-node={ranks} --rdzv-backend=c10d "
            "--rdzv-endpoint=127.0.0.1:0 --local-addr=127.0.0.1 --max-restarts=0 "
            "--monitor-interval=0.1"
        )
        launcher = [sys.executable, "-m", "torch.distributed.run", *options.split()]
        return [*launcher, "-m", module, *arguments]

    def load_for_probes(self) -> bool:
        # Without this, torch.cuda.is_available() initializes CUDA, and then no fork can use it.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        from stepscope.workloads.frameworks.torch.probe import warm_up

        return warm_up()

    def build(self, workload: Workload) -> contract.BuiltWorkload:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        from stepscope.workloads.frameworks.torch.probe import load_workload

        return load_workload(workload)

    def is_out_of_memory(self, error: BaseException, memory: contract.Memory) -> bool:
        """Libraries that PyTorch calls report it with their own messages."""
        text = str(error)
        if memory == "host":
            return isinstance(error, MemoryError) or any(w in text for w in _NO_HOST_MEMORY)
        is_gpu = type(error).__name__ == "OutOfMemoryError" or any(n in text for n in _GPU_NAMES)
        if is_gpu and any(words in text for words in _NO_GPU_MEMORY):
            return True
        stats = self.allocator_stats() if _NO_ENGINE in text else None
        return stats is not None and stats.ooms > 0

    def allocator_stats(self) -> AllocatorStats | None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_initialized():
            return None
        stats = torch.cuda.memory_stats()
        return AllocatorStats(
            torch.cuda.max_memory_allocated(),
            torch.cuda.max_memory_reserved(),
            int(stats.get("num_alloc_retries", 0)),
            int(stats.get("num_ooms", 0)),
        )
