"""Planted: a checkpoint of model and optimizer every 30 steps.

Typical origin: frequent checkpoints after a job was once killed. `--fixed` writes one every 2000
steps.
"""

import os
import tempfile
from pathlib import Path

import torch
from common import Clock, parse_options
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

CAUSE = "loop.checkpoint"
DEVICE = "gpu"

SMOKE = os.environ.get("SMOKE") == "1"  # small and on the CPU, to test the script without a GPU
BATCH = int(os.environ.get("BATCH") or (4 if SMOKE else 48))
WIDTH = int(os.environ.get("WIDTH") or (128 if SMOKE else 512))
LAYERS = int(os.environ.get("LAYERS") or (2 if SMOKE else 12))
LENGTH = 32 if SMOKE else 512
HEAD = 64
STEPS_BETWEEN = int(os.environ.get("STEPS_BETWEEN") or 30)


class TextModel(nn.Module):
    """Predicts the next byte of a text from the previous bytes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, WIDTH // HEAD, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True
        )
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(text)))


def save_checkpoint(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)


def main() -> None:
    options = parse_options(__doc__)
    device = torch.device("cpu" if SMOKE else "cuda")
    data = torch.randint(0, 256, (20_000, LENGTH + 1))
    loader = DataLoader(
        data,
        batch_size=BATCH,
        shuffle=True,
        num_workers=4,
        pin_memory=True,
        persistent_workers=True,
        drop_last=True,
    )
    with device:
        model = TextModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    steps_between = 2000 if options.fixed else STEPS_BETWEEN
    folder = tempfile.TemporaryDirectory()
    steps = 0
    clock = Clock(options.seconds)
    while not clock.over():
        for batch in loader:
            texts = batch.to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                logits = model(texts[:, :-1])
                loss = cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            steps += 1
            if steps % steps_between == 0:
                save_checkpoint(Path(folder.name) / "latest.pt", model, optimizer)
            clock.step(len(texts))
            if clock.over():
                break
    clock.report()
    folder.cleanup()


if __name__ == "__main__":
    main()
