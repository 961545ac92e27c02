"""Planted: a collate function that pads its batch number by number in Python.

Typical origin: signals of different lengths, and a first `collate_fn` written with lists. Each
sample is ready at once, but collating the batch takes longer than the step.
"""

import torch
from common import Clock, parse_options
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

CAUSE = "input.collation"
DEVICE = "cpu"

LONGEST = 12_000
Batch = tuple[torch.Tensor, torch.Tensor]


class Signals(Dataset):
    def __init__(self) -> None:
        lengths = torch.randint(LONGEST // 2, LONGEST, (600,)).tolist()
        self.signals = [torch.randn(length) for length in lengths]

    def __len__(self) -> int:
        return 4 * len(self.signals)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.signals[index % len(self.signals)], index % 10


def collate_in_python(samples: list[tuple[torch.Tensor, int]]) -> Batch:
    rows = []
    for signal, _ in samples:
        row = [0.0] * LONGEST
        for position, value in enumerate(signal.tolist()):
            row[position] = value
        rows.append(row)
    return torch.tensor(rows), torch.tensor([label for _, label in samples])


def collate_in_torch(samples: list[tuple[torch.Tensor, int]]) -> Batch:
    padded = pad_sequence([signal for signal, _ in samples], batch_first=True)
    padded = nn.functional.pad(padded, (0, LONGEST - padded.shape[1]))
    return padded, torch.tensor([label for _, label in samples])


def small_network() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 8, 9, stride=4),
        nn.ReLU(),
        nn.Conv1d(8, 32, 9, stride=4),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def main() -> None:
    options = parse_options(__doc__)
    torch.set_num_threads(1)
    collate = collate_in_torch if options.fixed else collate_in_python
    loader = DataLoader(Signals(), batch_size=32, shuffle=True, num_workers=2, collate_fn=collate)
    model = small_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock = Clock(options.seconds)
    while not clock.over():
        for signals, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(signals.unsqueeze(1)), labels)
            loss.backward()
            optimizer.step()
            clock.step(len(signals))
            if clock.over():
                break
    clock.report()


if __name__ == "__main__":
    main()
