"""Planted: one loader worker, although preparation takes about five times as long as a step.

Typical origin: `num_workers=1` copied from an example. The worker keeps one core busy, training
waits for it, and the second core is mostly idle.
"""

import zlib

import numpy as np
import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, Dataset

CAUSE = "input.workers"
DEVICE = "cpu"

SIDE = 64


class CompressedImages(Dataset):
    """Images compressed in memory; each takes some milliseconds to decompress and normalize."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        pixels = rng.integers(0, 32, (400, 3, 2 * SIDE, 2 * SIDE), dtype=np.uint8)
        self.packed = [zlib.compress(image.tobytes(), 1) for image in pixels]

    def __len__(self) -> int:
        return 4 * len(self.packed)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raw = zlib.decompress(self.packed[index % len(self.packed)])
        image = np.frombuffer(raw, np.uint8).reshape(3, 2 * SIDE, 2 * SIDE).astype(np.float32)
        image = (image - image.mean()) / (image.std() + 1e-6)
        smooth = np.sqrt(np.abs(np.fft.ifft2(np.fft.fft2(image))))
        return torch.from_numpy(smooth[:, ::2, ::2].astype(np.float32)), index % 10


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    workers = 2 if options.fixed else 1
    loader = DataLoader(CompressedImages(), batch_size=24, shuffle=True, num_workers=workers)
    model = small_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock = Clock(options.seconds)
    while not clock.over():
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            clock.step(len(images))
            if clock.over():
                break
    clock.report()


if __name__ == "__main__":
    main()
