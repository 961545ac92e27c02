"""Planted: half a gigabyte per batch is copied from pageable memory while the GPU waits for it.

Typical origin: precomputed features, loaded as ready batches, with a plain `.to(device)`. `--fixed`
pins them and copies the next batch while the current one is used for training.
"""

import os
from collections.abc import Iterator

import torch
from common import Clock, parse_options
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

CAUSE = "gpu.transfer"
DEVICE = "gpu"

SMOKE = os.environ.get("SMOKE") == "1"  # small and on the CPU, to test the script without a GPU
ROWS = int(os.environ.get("ROWS") or (256 if SMOKE else 131_072))
WIDTH = int(os.environ.get("WIDTH") or (64 if SMOKE else 4096))
LAYERS = int(os.environ.get("LAYERS") or 3)
FEATURES = 1024


def ready_batches(pinned: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    batches = []
    for _ in range(3):
        rows = torch.randn(256, FEATURES).repeat(ROWS // 256, 1)
        labels = torch.randint(0, 10, (ROWS,))
        if pinned and not SMOKE:
            rows, labels = rows.pin_memory(), labels.pin_memory()
        batches.append((rows, labels))
    return batches


class Prefetcher:
    """Copies the next batch on a separate stream, into one of two buffers, one batch ahead."""

    def __init__(self, loader: DataLoader, device: torch.device) -> None:
        self.loader = loader
        self.stream = torch.cuda.Stream(device)
        self.buffers = [
            (torch.empty(ROWS, FEATURES, device=device), torch.empty(ROWS, device=device).long())
            for _ in range(2)
        ]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        training = torch.cuda.current_stream()
        ahead = None
        for number, (rows, labels) in enumerate(self.loader):
            buffers = self.buffers[number % 2]
            self.stream.wait_stream(training)  # the last step that read these buffers
            with torch.cuda.stream(self.stream):
                buffers[0].copy_(rows, non_blocking=True)
                buffers[1].copy_(labels, non_blocking=True)
                copied = self.stream.record_event()
            if ahead is not None:
                training.wait_event(ahead[1])
                yield ahead[0]
            ahead = (buffers, copied)
        if ahead is not None:
            training.wait_event(ahead[1])
            yield ahead[0]


def network() -> nn.Module:
    hidden = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS - 1)]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 10))


def main() -> None:
    options = parse_options(__doc__)
    device = torch.device("cpu" if SMOKE else "cuda")
    batches = ready_batches(pinned=options.fixed)
    loader = DataLoader(200 * batches, batch_size=None, num_workers=0)
    if options.fixed and not SMOKE:
        loader = Prefetcher(loader, device)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    clock = Clock(options.seconds)
    while not clock.over():
        for batch in loader:
            rows = batch[0].to(device)
            labels = batch[1].to(device)
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
