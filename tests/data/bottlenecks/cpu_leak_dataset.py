"""Planted: the dataset keeps every augmented sample in a cache that never hits.

Typical origin: a cache that was useful before samples were augmented. Now every sample is new, so
the worker only grows; the speed stays the same until memory is exhausted.
"""

import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, Dataset

CAUSE = "leak.host"
DEVICE = "cpu"

SIDE = 48


class CachedImages(Dataset):
    def __init__(self, keeps: bool) -> None:
        self.images = torch.rand(1000, 3, SIDE, SIDE)
        self.keeps = keeps
        self.cache: list[tuple[int, torch.Tensor]] = []

    def __len__(self) -> int:
        return 50 * len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index % len(self.images)]
        image = image + 0.01 * torch.randn(image.shape)
        if self.keeps:
            self.cache.append((index, image))
        return image, index % 10


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    data = CachedImages(keeps=not options.fixed)
    loader = DataLoader(data, batch_size=16, num_workers=1, persistent_workers=True)
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
