"""Planted: a batch of one sample, so that each step is mostly overhead.

Typical origin: `batch_size` is left at its default of 1. A deep and narrow network takes the same
time for one row as for many: a step mostly calls operations and computes little.
"""

import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CAUSE = "batch.small"
DEVICE = "cpu"

LAYERS = 40
WIDTH = 64


def deep_network() -> nn.Module:
    blocks = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.ReLU())
        for _ in range(LAYERS)
    ]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 10))


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(20_000, WIDTH), torch.randint(0, 10, (20_000,)))
    loader = DataLoader(data, batch_size=8 if options.fixed else 1, shuffle=True)
    model = deep_network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    clock = Clock(options.seconds)
    while not clock.over():
        for rows, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(rows), labels)
            loss.backward()
            optimizer.step()
            clock.step(len(rows))
            if clock.over():
                break
    clock.report()


if __name__ == "__main__":
    main()
