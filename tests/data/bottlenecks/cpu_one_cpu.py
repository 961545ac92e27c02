"""Planted: the job may use one CPU although the machine has more.

Typical origin: a batch job without `--cpus-per-task`, or a container that is pinned to one core.
Training and the loader workers take turns on it.
"""

import os

import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, Dataset

CAUSE = "cpu.cores"
DEVICE = "cpu"

SIDE = 64


class NoisyImages(Dataset):
    """Preparation takes about as long as the step, so there is work for two cores."""

    def __init__(self) -> None:
        self.images = torch.rand(1000, 3, SIDE, SIDE)

    def __len__(self) -> int:
        return 4 * len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index % len(self.images)]
        for _ in range(8):
            image = (image + 0.01 * torch.randn(image.shape)).clamp(0.0, 1.0)
        return image, index % 10


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(24, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def main() -> None:
    options = parse_options(__doc__)
    if not options.fixed:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    loader = DataLoader(NoisyImages(), batch_size=32, shuffle=True, num_workers=2)
    model = small_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock = Clock(options.seconds)
    while not clock.over():
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            clock.step(len(images))
            if clock.over():
                break
    clock.report()


if __name__ == "__main__":
    main()
