"""Planted: one image at a time through a ResNet-50.

Typical origin: `batch_size=1` is the DataLoader's default, or was set after running out of memory.
Each kernel uses a small part of the GPU. `--fixed` trains with 16 images.
"""

import os

import torch
import torchvision
from common import Clock, parse_options
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

CAUSE = "batch.small"
DEVICE = "gpu"

SMOKE = os.environ.get("SMOKE") == "1"  # small and on the CPU, to test the script without a GPU
BATCH = int(os.environ.get("BATCH") or (4 if SMOKE else 16))
MODEL = os.environ.get("MODEL", "resnet18" if SMOKE else "resnet50")
WORKERS = int(os.environ.get("WORKERS") or (2 if SMOKE else 12))
SIDE = 64 if SMOKE else 224


def main() -> None:
    options = parse_options(__doc__)
    device = torch.device("cpu" if SMOKE else "cuda")
    images = torch.randint(0, 256, (512, SIDE, SIDE, 3), dtype=torch.uint8)
    data = TensorDataset(images, torch.randint(0, 1000, (512,)))
    batch_size = BATCH if options.fixed else 1
    loader = DataLoader(
        data,
        batch_size=batch_size,
        sampler=RandomSampler(data, True, 500_000),
        num_workers=WORKERS,
        pin_memory=True,
        persistent_workers=True,
        drop_last=True,
    )
    model = torchvision.models.get_model(MODEL)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)
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
