"""Planted: the whole validation set is evaluated after every 20 training steps.

Typical origin: frequent updates of the validation curve. No steps are made for half of the time.
`--fixed` evaluates every 400 steps.
"""

import os

import torch
from common import Clock, parse_options
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

CAUSE = "loop.evaluation"
DEVICE = "gpu"

SMOKE = os.environ.get("SMOKE") == "1"  # small and on the CPU, to test the script without a GPU
BATCH = int(os.environ.get("BATCH") or (4 if SMOKE else 24))
WIDTH = int(os.environ.get("WIDTH") or (128 if SMOKE else 1024))
LAYERS = int(os.environ.get("LAYERS") or (2 if SMOKE else 12))
LENGTH = 32 if SMOKE else 512
HEAD = 64
STEPS_BETWEEN = int(os.environ.get("STEPS_BETWEEN") or 20)
VALIDATION_BATCHES = int(os.environ.get("VALIDATION_BATCHES") or (10 if SMOKE else 60))


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


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    model.eval()
    right = torch.zeros((), device=device)
    for batch in loader:
        texts = batch.to(device, non_blocking=True)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            right += (model(texts[:, :-1]).argmax(2) == texts[:, 1:]).float().mean()
    model.train()
    return right.item() / len(loader)


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
    steps_between = 400 if options.fixed else STEPS_BETWEEN
    validation_loader = DataLoader(
        torch.randint(0, 256, (VALIDATION_BATCHES * BATCH, LENGTH + 1)),
        batch_size=BATCH,
        num_workers=4,
        pin_memory=True,
        persistent_workers=True,
    )
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
                evaluate(model, validation_loader, device)
            clock.step(len(texts))
            if clock.over():
                break
    clock.report()


if __name__ == "__main__":
    main()
