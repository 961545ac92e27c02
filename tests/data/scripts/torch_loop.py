"""A plain PyTorch loop with loader workers and an evaluation, without stepscope."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAMPLES, BATCH = 3, 1000, 64


def main(workers: int, start: str | None) -> None:
    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(SAMPLES, 3072), torch.randint(0, 10, (SAMPLES,)))
    train = DataLoader(
        data, BATCH, shuffle=True, num_workers=workers, multiprocessing_context=start
    )
    test = DataLoader(data, 250)
    model = torch.nn.Sequential(torch.nn.Linear(3072, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = torch.nn.CrossEntropyLoss()
    for epoch in range(EPOCHS):
        for images, labels in train:
            optimizer.zero_grad()
            loss(model(images), labels).backward()
            optimizer.step()
        with torch.no_grad():
            correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in test)
        print(f"epoch {epoch}: {correct}/{SAMPLES}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
