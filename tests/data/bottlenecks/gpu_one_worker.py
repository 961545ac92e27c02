"""Planted: one loader worker, although the GPU could process the batches of three.

Typical origin: `num_workers=1` copied from an example. One core prepares batches, fifteen are idle,
and the GPU waits. `--fixed` uses twelve workers.
"""

import os
import random

import numpy as np
import torch
import torchvision
from common import Clock, parse_options
from PIL import Image
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

CAUSE = "input.workers"
DEVICE = "gpu"

SMOKE = os.environ.get("SMOKE") == "1"  # small and on the CPU, to test the script without a GPU
BATCH = int(os.environ.get("BATCH") or (8 if SMOKE else 128))
MODEL = os.environ.get("MODEL", "resnet18" if SMOKE else "resnet50")
WORKERS = int(os.environ.get("WORKERS") or (2 if SMOKE else 12))
SIDE = 32 if SMOKE else 224


class Photos(Dataset):
    """A random resized crop: half a millisecond per image."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.pixels = rng.integers(0, 256, (256, SIDE + 32, SIDE + 32, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return 500_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = Image.fromarray(self.pixels[index % len(self.pixels)])
        left, top = random.randint(0, 31), random.randint(0, 31)
        box = (left, top, SIDE + 32 - top, SIDE + 32 - left)
        image = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
        return torch.from_numpy(np.array(image)), index % 1000


def main() -> None:
    options = parse_options(__doc__)
    device = torch.device("cpu" if SMOKE else "cuda")
    workers = WORKERS if options.fixed else 1
    loader = DataLoader(
        Photos(),
        batch_size=BATCH,
        shuffle=True,
        num_workers=workers,
        pin_memory=True,
        persistent_workers=True,
        drop_last=True,
    )
    model = torchvision.models.get_model(MODEL)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    clock = Clock(options.seconds)
    while not clock.over():
        for batch in loader:
            images = batch[0].to(device, non_blocking=True)
            labels = batch[1].to(device, non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = cross_entropy(model(images.permute(0, 3, 1, 2) / 255), labels)
            loss.backward()
            optimizer.step()
            clock.step(len(images))
            if clock.over():
                break
    clock.report()


if __name__ == "__main__":
    main()
