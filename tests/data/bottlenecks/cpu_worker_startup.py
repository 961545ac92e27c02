"""Planted: every epoch restarts its workers, and each of them first parses an index.

Typical origin: a small dataset with short epochs, and a slow `worker_init_fn`.
"""

import json

import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

CAUSE = "input.worker_startup"
DEVICE = "cpu"

SIDE = 64


def write_index(entries: int) -> str:
    return json.dumps(
        [{"row": row, "label": row % 10, "tags": ["a", "b"]} for row in range(entries)]
    )


class IndexedImages(Dataset):
    def __init__(self) -> None:
        self.images = torch.rand(1500, 3, SIDE, SIDE)
        self.index_text = write_index(125_000)
        self.index: list[dict] = []

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self.images[row], self.index[row]["label"]


def parse_index(worker: int) -> None:
    data = get_worker_info().dataset
    data.index = json.loads(data.index_text)


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 24, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(24, 32, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    loader = DataLoader(
        IndexedImages(),
        batch_size=16,
        shuffle=True,
        num_workers=2,
        worker_init_fn=parse_index,
        persistent_workers=options.fixed,
    )
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
