"""Planted: the logits of every step are kept on the device, about 200 MB per second.

Typical origin: outputs are collected in a list, to be evaluated at the end of the epoch. `--fixed`
keeps one number per step.
"""

import os

import torch
from common import Clock, parse_options
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

CAUSE = "leak.gpu"
DEVICE = "gpu"

SMOKE = os.environ.get("SMOKE") == "1"  # small and on the CPU, to test the script without a GPU
BATCH = int(os.environ.get("BATCH") or (4 if SMOKE else 24))
WIDTH = int(os.environ.get("WIDTH") or (128 if SMOKE else 1024))
LAYERS = int(os.environ.get("LAYERS") or (2 if SMOKE else 12))
LENGTH = 32 if SMOKE else 512
HEAD = 64


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
    kept = []
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
            kept.append(loss.detach() if options.fixed else logits.detach())
            clock.step(len(texts))
            if clock.over():
                break
    clock.report()


if __name__ == "__main__":
    main()
