"""Planted: every step writes histograms of all weights to a log and syncs it to disk.

Typical origin: logging that was added to debug a diverging run and never removed.
"""

import json
import os
import tempfile
from typing import TextIO

import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CAUSE = "loop.logging"
DEVICE = "cpu"

SIDE = 32


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(48, 128, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(128, 128, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(10),
    )


def log_histograms(log: TextIO, step: int, loss: torch.Tensor, model: nn.Module) -> None:
    histograms = {
        name: torch.histc(weights.detach(), bins=4096).tolist()
        for name, weights in model.named_parameters()
    }
    log.write(json.dumps({"step": step, "loss": loss.item(), "weights": histograms}) + "\n")
    log.flush()
    os.fsync(log.fileno())


def train(seconds: float, steps_between: int, log: TextIO) -> None:
    torch.set_num_threads(1)
    data = TensorDataset(torch.rand(4000, 3, SIDE, SIDE), torch.randint(0, 10, (4000,)))
    loader = DataLoader(data, batch_size=16, shuffle=True)
    model = small_network()
    model(data[:1][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock = Clock(seconds)
    step = 0
    while not clock.over():
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            step += 1
            if step % steps_between == 0:
                log_histograms(log, step, loss, model)
            clock.step(len(images))
            if clock.over():
                break
    clock.report()


def main() -> None:
    options = parse_options(__doc__)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as log:
        train(options.seconds, 50 if options.fixed else 1, log)


if __name__ == "__main__":
    main()
