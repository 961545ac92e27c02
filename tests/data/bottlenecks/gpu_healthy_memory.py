"""Planted: nothing. Element-wise layers move gigabytes through the memory of the GPU in each step.

Matrix products are negligible, so memory bandwidth sets the speed. `--fixed` changes nothing.
"""

import os

import torch
from common import Clock, parse_options
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

CAUSE = "gpu.bandwidth"
DEVICE = "gpu"

SMOKE = os.environ.get("SMOKE") == "1"  # small and on the CPU, to test the script without a GPU
BATCH = int(os.environ.get("BATCH") or (64 if SMOKE else 2048))
WIDTH = int(os.environ.get("WIDTH") or (128 if SMOKE else 65_536))
LAYERS = int(os.environ.get("LAYERS") or (2 if SMOKE else 12))
FEATURES = 64


class Gate(nn.Module):
    """Scales and shifts each feature, and gates it by its own value."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x * self.gain.to(x.dtype) + self.shift.to(x.dtype))


def main() -> None:
    options = parse_options(__doc__)
    device = torch.device("cpu" if SMOKE else "cuda")
    data = TensorDataset(torch.randn(100_000, FEATURES), torch.randint(0, 10, (100_000,)))
    loader = DataLoader(
        data,
        batch_size=BATCH,
        sampler=RandomSampler(data, True, 20_000_000),
        num_workers=8,
        pin_memory=True,
        persistent_workers=True,
        drop_last=True,
    )
    model = nn.Sequential(
        nn.Linear(FEATURES, WIDTH), *(Gate() for _ in range(LAYERS)), nn.Linear(WIDTH, 10)
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    clock = Clock(options.seconds)
    while not clock.over():
        for batch in loader:
            rows = batch[0].to(device, non_blocking=True)
            labels = batch[1].to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = cross_entropy(model(rows), labels)
            loss.backward()
            optimizer.step()
            clock.step(len(rows))
            if clock.over():
                break
    clock.report()


if __name__ == "__main__":
    main()
