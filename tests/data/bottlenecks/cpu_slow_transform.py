"""Planted: a transform written as a Python loop over pixels.

Typical origin: a gamma correction copied from a notebook, where one image at a time was fast
enough. Both cores only transform images, and the cheap model waits for its batches.
"""

import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, Dataset

CAUSE = "input.preparation"
DEVICE = "cpu"

SIDE = 64
GAMMA = 0.8


def gamma_in_python(image: torch.Tensor) -> torch.Tensor:
    brighter = [(pixel / 255.0) ** GAMMA for pixel in image.flatten().tolist()]
    return torch.tensor(brighter).reshape(image.shape)


def gamma_in_torch(image: torch.Tensor) -> torch.Tensor:
    return (image / 255.0) ** GAMMA


class Images(Dataset):
    def __init__(self, transform) -> None:
        self.images = torch.randint(0, 256, (2000, 3, SIDE, SIDE), dtype=torch.uint8)
        self.labels = torch.randint(0, 10, (2000,))
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transform(self.images[index]), self.labels[index]


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 20, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(20, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    data = Images(transform=gamma_in_torch if options.fixed else gamma_in_python)
    loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=2)
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
