"""Fit a curve with a LightningModule.

The script trains without stepscope, and it defines a custom workload:

    python examples/workload_lightning/train.py
    stepscope trial examples/workload_lightning/train.py:workload --batch-size 128 --steps 50
"""

import argparse
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Regression(lightning.LightningModule):
    """A small network with its loss and its optimizer."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 1)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        points, values = batch
        loss = nn.functional.mse_loss(self.layers(points), values)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def curve(count: int, seed: int = 0) -> Dataset:
    """Return random points and the values of a smooth function."""
    points = torch.rand(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(points, torch.sin(6 * points).sum(dim=1, keepdim=True))


def workload(samples: int = 10_000, seed: int = 0) -> dict:
    """Return the model and the data; loss and optimizer are in the LightningModule."""
    return {"model": Regression(), "data": curve(samples, seed)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--samples", type=int, default=10_000)
    options = parser.parse_args()

    trainer = lightning.Trainer(max_epochs=options.epochs, logger=False, enable_checkpointing=False)
    parts = workload(samples=options.samples)
    trainer.fit(parts["model"], DataLoader(parts["data"], options.batch_size, shuffle=True))
    print(f"loss {trainer.callback_metrics['train_loss']:.4f}")


if __name__ == "__main__":
    main()
