"""Planted: nothing. Both cores compute, and the data is in memory.

`--fixed` changes nothing.
"""

import os

# Threads that spin while they wait for each other are ten times slower on a shared core.
os.environ["OMP_WAIT_POLICY"] = "passive"

import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CAUSE = "healthy"
DEVICE = "cpu"

FEATURES = 1024


def network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, FEATURES),
        nn.ReLU(),
        nn.Linear(FEATURES, FEATURES),
        nn.ReLU(),
        nn.Linear(FEATURES, 10),
    )


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(2)
    data = TensorDataset(torch.rand(8000, FEATURES), torch.randint(0, 10, (8000,)))
    loader = DataLoader(data, batch_size=128, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
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
