"""Which part a process plays in a training run, told from outside."""

from __future__ import annotations

TREE = "tree"
MAIN = "main"
WORKER = "worker"
OTHER = "other"

_LOADER_WORKER = "pt_data_worker"
"""The name PyTorch gives its loader workers, however they were started."""

_RANK_VARIABLES = (b"RANK", b"OMPI_COMM_WORLD_RANK", b"PMI_RANK", b"SLURM_PROCID")


def role_of(
    name: str, is_root: bool, trains: bool, rank: int | None, parent_rank: int | None
) -> str:
    """Main (the command, or what reported training steps), a rank, a loader worker, or other."""
    if name.startswith(_LOADER_WORKER):
        return WORKER
    if is_root:
        return MAIN
    if rank is not None and rank != parent_rank:
        return f"rank{rank}"
    return MAIN if trains else OTHER


def rank_in(environ: bytes) -> int | None:
    """The rank that a launcher gave a process, from its `/proc/PID/environ`."""
    variables = dict(part.partition(b"=")[::2] for part in environ.split(b"\0"))
    for name in _RANK_VARIABLES:
        value = variables.get(name, b"")
        if value.isdigit():
            return int(value)
    return None
