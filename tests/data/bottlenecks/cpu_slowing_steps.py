"""Planted: the losses of all steps are kept, and every step averages all of them.

Typical origin: a smoothed loss for the progress bar, computed the simple way. The first hundred
steps are fast, but the thousandth is not.
"""

import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CAUSE = "loop.slowdown"
DEVICE = "cpu"

SIDE = 32


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


def smoothed(history: list[torch.Tensor]) -> tuple[float, float]:
    average = spread = 0.0
    for losses in history:
        average = 0.9 * average + 0.1 * losses.mean().item()
        spread = 0.9 * spread + 0.1 * losses.std().item()
    return average, spread


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    data = TensorDataset(torch.rand(4000, 3, SIDE, SIDE), torch.randint(0, 10, (4000,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = small_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock = Clock(options.seconds)
    history: list[torch.Tensor] = []
    while not clock.over():
        for images, labels in loader:
            optimizer.zero_grad()
            losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
            losses.mean().backward()
            optimizer.step()
            if not options.fixed:
                history.append(losses.detach())
                smoothed(history)
            clock.step(len(images))
            if clock.over():
                break
    clock.report()


if __name__ == "__main__":
    main()
