"""Classify noisy sine waves in plain PyTorch.

The script trains without stepscope, and it defines a custom workload:

    python examples/workload_plain_loop/train.py
    stepscope trial examples/workload_plain_loop/train.py:workload --batch-size 64 --steps 50
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

LENGTH = 256


class Waves(Dataset):
    """Sine waves with noise; the class is the number of periods."""

    def __init__(self, count: int, classes: int, seed: int = 0) -> None:
        self.count, self.classes, self.seed = count, classes, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        label = index % self.classes
        noise = torch.rand(LENGTH, generator=torch.Generator().manual_seed(self.seed + index))
        turns = torch.linspace(0, label + 1, LENGTH) + noise[0]
        return (torch.sin(2 * math.pi * turns) + noise).view(1, LENGTH), label


def small_net(classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 16, 9, stride=2),
        nn.ReLU(),
        nn.Conv1d(16, 32, 9, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(8),
        nn.Flatten(),
        nn.Linear(32 * 8, classes),
    )


def workload(classes: int = 8, samples: int = 10_000, seed: int = 0) -> dict:
    """Return the model, loss and data; `--samples 500` is passed as `samples`."""
    return {
        "model": small_net(classes),
        "loss": nn.CrossEntropyLoss(),
        "data": Waves(samples, classes, seed),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=10_000)
    options = parser.parse_args()

    parts = workload(samples=options.samples)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, loss_of = parts["model"].to(device), parts["loss"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(options.epochs):
        for waves, labels in DataLoader(parts["data"], options.batch_size, shuffle=True):
            loss = loss_of(model(waves.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
