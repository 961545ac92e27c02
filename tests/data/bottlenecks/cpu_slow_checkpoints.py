"""Planted: a checkpoint every 25 steps, synced to disk each time.

Typical origin: frequent checkpoints after a job was once killed. Most of the saved data is a
pretrained embedding that never changes.
"""

import os
import tempfile
from pathlib import Path

import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CAUSE = "loop.checkpoint"
DEVICE = "cpu"

VOCABULARY, EMBEDDED, WORDS = 500_000, 64, 16


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with path.open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())


def network() -> nn.Module:
    pretrained = nn.Embedding.from_pretrained(torch.randn(VOCABULARY, EMBEDDED))
    return nn.Sequential(
        pretrained,
        nn.Flatten(),
        nn.Linear(WORDS * EMBEDDED, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


def train(seconds: float, steps_between: int, path: Path) -> None:
    torch.set_num_threads(1)
    data = TensorDataset(
        torch.randint(0, VOCABULARY, (20_000, WORDS)), torch.randint(0, 10, (20_000,))
    )
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    clock = Clock(seconds)
    steps = 0
    while not clock.over():
        for words, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(words), labels)
            loss.backward()
            optimizer.step()
            steps += 1
            if steps % steps_between == 0:
                save_checkpoint(path, model, optimizer)
            clock.step(len(words))
            if clock.over():
                break
    clock.report()


def main() -> None:
    options = parse_options(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        train(options.seconds, 1000 if options.fixed else 25, Path(folder) / "checkpoint.pt")


if __name__ == "__main__":
    main()
