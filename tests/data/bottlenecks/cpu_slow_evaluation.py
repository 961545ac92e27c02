"""Planted: the whole validation set is evaluated after every 20 training steps.

Typical origin: epochs over a small training set are short, and evaluation runs at the end of each
epoch. No steps are made for half of the time.
"""

import torch
from common import Clock, parse_options
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CAUSE = "loop.evaluation"
DEVICE = "cpu"

SIDE = 32


def random_images(count: int) -> TensorDataset:
    return TensorDataset(torch.rand(count, 3, SIDE, SIDE), torch.randint(0, 10, (count,)))


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 48, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, 10),
    )


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = sum(int((model(images).argmax(1) == labels).sum()) for images, labels in loader)
    model.train()
    return right / len(loader.dataset)


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    epochs_between = 50 if options.fixed else 1
    train_loader = DataLoader(random_images(20 * 32), batch_size=32, shuffle=True)
    validation_loader = DataLoader(random_images(1500), batch_size=50)
    model = small_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock = Clock(options.seconds)
    epoch = 0
    while not clock.over():
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            clock.step(len(images))
            if clock.over():
                break
        epoch += 1
        if epoch % epochs_between == 0:
            evaluate(model, validation_loader)
    clock.report()


if __name__ == "__main__":
    main()
