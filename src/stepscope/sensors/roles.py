"""Which part a process plays in a training run, told from outside."""

from __future__ import annotations

from collections.abc import Mapping

TREE = "tree"
MAIN = "main"
WORKER = "worker"
OTHER = "other"

_LOADER_WORKER = "pt_data_worker"
"""The name PyTorch gives its loader workers, however they were started."""

_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


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


def rank_in(environment: Mapping[str, str]) -> int | None:
    """The rank that a launcher gave a process."""
    for name in _RANK_VARIABLES:
        value = environment.get(name, "")
        if value.isdigit():
            return int(value)
    return None
