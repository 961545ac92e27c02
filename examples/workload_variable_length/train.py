"""Classify sequences of different lengths, with a custom step and a custom collate function.

The script trains without stepscope, and it defines a custom workload:

    python examples/workload_variable_length/train.py
    stepscope trial examples/workload_variable_length/train.py:workload --batch-size 64 --steps 50
"""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset

TOKENS = 100
SHORTEST, LONGEST = 5, 60


class Sequences(Dataset):
    """Random tokens; every second token encodes the class."""

    def __init__(self, count: int, classes: int, seed: int = 0) -> None:
        self.count, self.classes, self.seed = count, classes, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        random = torch.Generator().manual_seed(self.seed + index)
        label = index % self.classes
        length = int(torch.randint(SHORTEST, LONGEST, (1,), generator=random))
        tokens = torch.randint(1, TOKENS, (length,), generator=random)
        tokens[::2] = label + 1
        return tokens, label


class Reader(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 32, padding_idx=0)
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.head = nn.Linear(64, classes)

    def forward(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(
            self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        _, (last, _) = self.lstm(packed)
        return self.head(last[-1])


def collate(samples: list[tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """Pad the sequences of a batch to the longest one."""
    tokens, labels = zip(*samples, strict=True)
    return {
        "tokens": pad_sequence(list(tokens), batch_first=True),
        "lengths": torch.tensor([len(each) for each in tokens]),
        "labels": torch.tensor(labels),
    }


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the loss of a batch, which is on the same device as the model."""
    return nn.functional.cross_entropy(model(batch["tokens"], batch["lengths"]), batch["labels"])


def workload(classes: int = 4, samples: int = 4_000, seed: int = 0) -> dict:
    """Batches are not pairs (x, y), so there is a `step` instead of a `loss`."""
    return {
        "model": Reader(classes),
        "step": step,
        "data": Sequences(samples, classes, seed),
        "collate": collate,
        "optimizer": lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4_000)
    options = parser.parse_args()

    parts = workload(samples=options.samples)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = parts["model"].to(device)
    optimizer = parts["optimizer"](model.parameters())
    loader = DataLoader(parts["data"], options.batch_size, shuffle=True, collate_fn=collate)
    for epoch in range(options.epochs):
        for batch in loader:
            loss = step(model, {name: tensor.to(device) for name, tensor in batch.items()})
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
