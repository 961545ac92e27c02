"""How ranks are started. Imports no torch: the process that becomes the launcher needs none."""

from __future__ import annotations

import sys


def launcher_command(ranks: int, module: str, arguments: list[str]) -> list[str]:
    """How the elastic launcher starts a module as ranks on this machine, without restarts."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
        "--local-addr=127.0.0.1",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        "-m",
        module,
        *arguments,
    ]
