"""Planted: two ranks exchange millions of gradients for very little computation.

Typical origin: a wide model, a small batch per rank, and a slow network between the ranks.
Start: torchrun --standalone --nproc-per-node 2
"""

import gc
from contextlib import nullcontext

import torch
import torch.distributed as dist
from common import Clock, parse_options
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

CAUSE = "ranks.communication"
DEVICE = "cpu"
RANKS = 2

WIDTH = 2048


def wide_network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))


def all_over(clock: Clock) -> bool:
    """Let all ranks end together, or one would wait forever for the other ones."""
    over = torch.tensor(int(clock.over()))
    dist.all_reduce(over, op=dist.ReduceOp.MAX)
    return bool(over)


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    accumulated = 8 if options.fixed else 1
    data = TensorDataset(torch.rand(512, WIDTH), torch.randint(0, 10, (512,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = DistributedDataParallel(wide_network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock = Clock(options.seconds)
    while not all_over(clock):
        for batch, (rows, labels) in enumerate(loader, start=1):
            exchanges = batch % accumulated == 0
            with nullcontext() if exchanges else model.no_sync():
                loss = nn.functional.cross_entropy(model(rows), labels)
                loss.backward()
            if exchanges:
                optimizer.step()
                optimizer.zero_grad()
            clock.step(len(rows))
    if dist.get_rank() == 0:
        clock.report()
    del model, optimizer, loss  # references to the process group may abort the exit
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
