"""Train a small CNN on synthetic images in plain PyTorch, without any reference to stepscope.

The network is that of Table 1 in Torres et al. 2021 (89,450 parameters). The data follow their DT1:
up to 60,000 images of 32×32×3. Monitor it with

    stepscope run -- python examples/plain_loop/train.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

DT1 = 60_000


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    )


def synthetic_images(count: int) -> Dataset:
    """Return noise with a faint bar whose position is the class, so that it can be learned."""
    images, labels = torch.rand(count, 3, 32, 32), torch.randint(0, 10, (count,))
    for label in range(10):
        images[labels == label, :, 3 * label : 3 * label + 3, :] += 0.06
    return TensorDataset(images, labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fraction", type=float, default=1.0, help="fraction of the 60,000 images")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    count = int(DT1 * options.fraction)
    train = DataLoader(
        synthetic_images(count), options.batch_size, shuffle=True, num_workers=options.workers
    )
    test = DataLoader(synthetic_images(count // 5), 4 * options.batch_size)
    model = small_cnn().to(device)
    optimizer = torch.optim.Adam(model.parameters())
    criterion = nn.CrossEntropyLoss()
    for epoch in range(options.epochs):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss = criterion(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            correct = sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in test)
        print(f"epoch {epoch}: loss {loss.item():.3f}, accuracy {correct / (count // 5):.1%}")


if __name__ == "__main__":
    main()
