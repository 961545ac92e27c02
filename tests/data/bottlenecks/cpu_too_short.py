"""Planted: nothing. Training ends after five steps, too early for a diagnosis.

Typical origin: a smoke test. `--fixed` changes nothing.
"""

import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CAUSE = "too_short"
DEVICE = "cpu"

FEATURES = 1024
STEPS = 5


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
    data = TensorDataset(torch.rand(STEPS * 128, FEATURES), torch.randint(0, 10, (STEPS * 128,)))
    loader = DataLoader(data, batch_size=128, shuffle=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock = Clock(options.seconds)
    for rows, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        clock.step(len(rows))
    clock.report()


if __name__ == "__main__":
    main()
