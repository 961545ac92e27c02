"""Planted: one of two ranks waits in every step, and the other rank waits for it.

Typical origin: the second machine reads its data from a slower disk. All ranks meet in the
all-reduce, so the slowest one sets the speed. Start: torchrun --standalone --nproc-per-node 2
"""

import gc
import time

import torch
import torch.distributed as dist
from common import Clock, parse_options
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

CAUSE = "ranks.straggler"
DEVICE = "cpu"
RANKS = 2

SIDE = 32
SLOW_RANK = 1
DELAY_S = 0.025


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


def all_over(clock: Clock) -> bool:
    """Let all ranks end together, or one would wait forever for the other ones."""
    over = torch.tensor(int(clock.over()))
    dist.all_reduce(over, op=dist.ReduceOp.MAX)
    return bool(over)


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sleeps = dist.get_rank() == SLOW_RANK and not options.fixed
    data = TensorDataset(torch.rand(320, 3, SIDE, SIDE), torch.randint(0, 10, (320,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = DistributedDataParallel(small_network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock = Clock(options.seconds)
    while not all_over(clock):
        for images, labels in loader:
            if sleeps:
                time.sleep(DELAY_S)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            clock.step(len(images))
    if dist.get_rank() == 0:
        clock.report()
    del model, optimizer, loss  # references to the process group may abort the exit
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
