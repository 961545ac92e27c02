"""Planted: two workers with eight threads each on a machine with two cores.

Typical origin: settings copied from a larger machine (`set_num_threads`, OMP_NUM_THREADS). Every
operation of a worker waits until all of its eight threads have run.
"""

import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, Dataset

CAUSE = "cpu.threads"
DEVICE = "cpu"

SIDE = 128


class NoisyImages(Dataset):
    def __init__(self) -> None:
        self.images = torch.rand(400, 3, SIDE, SIDE)

    def __len__(self) -> int:
        return 4 * len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index % len(self.images)]
        for shift in range(12):
            image = torch.sin(image + shift).abs().sqrt()
        return image[:, ::2, ::2].contiguous(), index % 10


def many_threads(worker: int) -> None:
    torch.set_num_threads(8)


def one_thread(worker: int) -> None:
    torch.set_num_threads(1)


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
    set_threads = one_thread if options.fixed else many_threads
    loader = DataLoader(NoisyImages(), batch_size=8, num_workers=2, worker_init_fn=set_threads)
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
