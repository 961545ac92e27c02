"""Train a small CNN on images from slow storage. Nothing in here knows stepscope.

python examples/demo/train.py                # the training loop loads every image itself
python examples/demo/train.py --workers 2    # two loader workers load them in the background
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

READ_S = 0.0015  # latency of one read, as on a network file system


class RemoteImages(Dataset):
    """Images on storage that takes 1.5 ms to answer each read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(READ_S)
        label = index % 10
        image = torch.rand(3, 32, 32)
        image[:, 3 * label : 3 * label + 3, :] += 0.2  # something to learn
        return image, label


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 6 * 6, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    torch.manual_seed(0)
    loader = DataLoader(
        RemoteImages(1600), batch_size=32, shuffle=True, num_workers=options.workers
    )
    model = small_cnn()
    optimizer = torch.optim.Adam(model.parameters())
    for epoch in range(1, options.epochs + 1):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
