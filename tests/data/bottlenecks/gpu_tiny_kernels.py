"""Planted: a custom recurrent cell, unrolled in Python: thousands of kernels of microseconds.

Typical origin: the cell is not quite an LSTM, so it is written step by step instead of using
`nn.LSTM`. The GPU waits for each launch. `--fixed` replays forward and backward as CUDA graphs.
"""

import os

import torch
from common import Clock, parse_options
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

CAUSE = "gpu.launch"
DEVICE = "gpu"

SMOKE = os.environ.get("SMOKE") == "1"  # small and on the CPU, to test the script without a GPU
BATCH = int(os.environ.get("BATCH") or (4 if SMOKE else 256))
LENGTH = int(os.environ.get("LENGTH") or (8 if SMOKE else 128))
WIDTH = int(os.environ.get("WIDTH") or 128)
FEATURES = 64


class Recurrent(nn.Module):
    """An LSTM cell with coupled input and forget gates."""

    def __init__(self) -> None:
        super().__init__()
        self.from_input = nn.Linear(FEATURES, 3 * WIDTH)
        self.from_state = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        state = memory = series.new_zeros(len(series), WIDTH)
        for now in self.from_input(series).unbind(1):
            keep, write, show = (now + self.from_state(state)).chunk(3, 1)
            keep = torch.sigmoid(keep)
            memory = keep * memory + (1 - keep) * torch.tanh(write)
            state = torch.sigmoid(show) * torch.tanh(memory)
        return self.head(state)


def main() -> None:
    options = parse_options(__doc__)
    device = torch.device("cpu" if SMOKE else "cuda")
    torch.set_float32_matmul_precision("high")
    data = TensorDataset(torch.randn(4096, LENGTH, FEATURES), torch.randint(0, 10, (4096,)))
    loader = DataLoader(
        data,
        batch_size=BATCH,
        sampler=RandomSampler(data, True, 1_000_000),
        num_workers=6,
        pin_memory=True,
        persistent_workers=True,
        drop_last=True,
    )
    model = Recurrent().to(device)
    if options.fixed and not SMOKE:
        example = torch.randn(BATCH, LENGTH, FEATURES, device=device)
        model = torch.cuda.make_graphed_callables(model, (example,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    clock = Clock(options.seconds)
    while not clock.over():
        for batch in loader:
            series = batch[0].to(device, non_blocking=True)
            labels = batch[1].to(device, non_blocking=True)
            optimizer.zero_grad()
            loss = cross_entropy(model(series), labels)
            loss.backward()
            optimizer.step()
            clock.step(len(series))
            if clock.over():
                break
    clock.report()


if __name__ == "__main__":
    main()
