"""Planted: the correct predictions of each byte value are counted with `.item()`, value by value.

Typical origin: a table of accuracies by class. The first `.item()` waits until the GPU has finished
all its work, and then the GPU waits for the host, 256 times in every step. `--fixed` counts on the
device and reads the counts every 100 steps.
"""

import os

import torch
from common import Clock, parse_options
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

CAUSE = "gpu.sync"
DEVICE = "gpu"

SMOKE = os.environ.get("SMOKE") == "1"  # small and on the CPU, to test the script without a GPU
BATCH = int(os.environ.get("BATCH") or (4 if SMOKE else 12))
WIDTH = int(os.environ.get("WIDTH") or (128 if SMOKE else 4096))
LAYERS = int(os.environ.get("LAYERS") or 2)
LENGTH = 32 if SMOKE else 512
VALUES = 256
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
    right = [0] * VALUES
    counts = torch.zeros(VALUES, dtype=torch.int64, device=device)
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
            labels = texts[:, 1:].flatten()
            hits = logits.detach().flatten(0, 1).argmax(1) == labels
            if options.fixed:
                counts.scatter_add_(0, labels, hits.long())
                steps += 1
                if steps % 100 == 0:
                    right = counts.tolist()
            else:
                for value in range(VALUES):
                    right[value] += (hits & (labels == value)).sum().item()
            clock.step(len(texts))
            if clock.over():
                break
    clock.report()


if __name__ == "__main__":
    main()
