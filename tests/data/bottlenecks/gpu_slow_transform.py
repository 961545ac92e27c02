"""Planted: augmentation so heavy that no number of workers keeps up with the GPU.

Typical origin: PIL filters that were added one by one for accuracy. All cores rotate and blur, and
the GPU waits. `--fixed` only crops.
"""

import os
import random

import numpy as np
import torch
import torchvision
from common import Clock, parse_options
from PIL import Image, ImageEnhance, ImageFilter
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

CAUSE = "input.preparation"
DEVICE = "gpu"

SMOKE = os.environ.get("SMOKE") == "1"  # small and on the CPU, to test the script without a GPU
BATCH = int(os.environ.get("BATCH") or (8 if SMOKE else 128))
MODEL = os.environ.get("MODEL", "resnet18" if SMOKE else "resnet50")
WORKERS = int(os.environ.get("WORKERS") or (2 if SMOKE else min(16, os.cpu_count() or 1)))
SIDE = 32 if SMOKE else 224


def light(image: Image.Image) -> Image.Image:
    left, top = random.randint(0, 31), random.randint(0, 31)
    return image.crop((left, top, left + SIDE, top + SIDE))


def heavy(image: Image.Image) -> Image.Image:
    image = image.rotate(random.uniform(-20, 20), Image.Resampling.BICUBIC)
    image = image.filter(ImageFilter.GaussianBlur(random.uniform(1, 3)))
    image = ImageEnhance.Color(image).enhance(random.uniform(0.7, 1.3))
    return light(image)


class Photos(Dataset):
    def __init__(self, transform) -> None:
        rng = np.random.default_rng(0)
        self.pixels = rng.integers(0, 256, (256, SIDE + 32, SIDE + 32, 3), dtype=np.uint8)
        self.transform = transform

    def __len__(self) -> int:
        return 500_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.transform(Image.fromarray(self.pixels[index % len(self.pixels)]))
        return torch.from_numpy(np.array(image)), index % 1000


def main() -> None:
    options = parse_options(__doc__)
    device = torch.device("cpu" if SMOKE else "cuda")
    data = Photos(transform=light if options.fixed else heavy)
    loader = DataLoader(
        data,
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
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
