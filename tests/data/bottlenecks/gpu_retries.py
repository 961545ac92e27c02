"""Planted: a limit on GPU memory that makes the allocator empty its cache in every step.

Typical origin: the GPU is shared, so the script is limited to the memory of its tensors plus a
third. But the allocator caches memory per stream, and this script trains two models on two streams:
memory that one stream has cached is not available to the other, so allocations fail, the cache is
emptied, and they are retried. `--fixed` sets no limit.
"""

import contextlib
import os

import torch
from common import Clock, parse_options
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

CAUSE = "memory.gpu"
DEVICE = "gpu"

SMOKE = os.environ.get("SMOKE") == "1"  # small and on the CPU, to test the script without a GPU
BATCH = int(os.environ.get("BATCH") or (4 if SMOKE else 24))
WIDTH = int(os.environ.get("WIDTH") or (128 if SMOKE else 1024))
LAYERS = int(os.environ.get("LAYERS") or (2 if SMOKE else 4))
LIMIT = float(os.environ.get("LIMIT") or 1.35)
LENGTH = 32 if SMOKE else 512
HEAD = 64


class TextModel(nn.Module):
    """Predicts the next byte of a text from the previous bytes."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            WIDTH, WIDTH // HEAD, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True
        )
        self.embedding = nn.Embedding(256, WIDTH)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embedding(text)))


def limit_memory(times_needed: float) -> None:
    """Limit the memory to this multiple of the peak so far."""
    if SMOKE:
        return
    needed = torch.cuda.max_memory_allocated()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()  # memory that is already cached would stay above the limit
    torch.cuda.set_per_process_memory_fraction(times_needed * needed / total)


def backward(model: nn.Module, texts: torch.Tensor) -> None:
    with torch.autocast(texts.device.type, dtype=torch.bfloat16):
        logits = model(texts[:, :-1])
        loss = cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())
    loss.backward()


class SecondStream:
    """Start work after what is queued, and let later work wait for it."""

    def __init__(self) -> None:
        self.stream = None if SMOKE else torch.cuda.Stream()

    @contextlib.contextmanager
    def __call__(self):
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def wait_for_step(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())


def main() -> None:
    options = parse_options(__doc__)
    device = torch.device("cpu" if SMOKE else "cuda")
    data = torch.randint(0, 256, (20_000, LENGTH + 1))
    loader = DataLoader(
        data,
        batch_size=BATCH,
        shuffle=True,
        num_workers=4,
        pin_memory=True,
        persistent_workers=True,
        drop_last=True,
    )
    with device:
        first, second = TextModel(), TextModel()
    both = [*first.parameters(), *second.parameters()]
    optimizer = torch.optim.AdamW(both, lr=1e-4, fused=True)
    second_stream = SecondStream()
    steps = 0
    clock = Clock(options.seconds)
    while not clock.over():
        for batch in loader:
            texts = batch.to(device, non_blocking=True)
            optimizer.zero_grad()
            second_stream.wait_for_step()
            backward(first, texts)
            with second_stream():
                backward(second, texts)
            optimizer.step()
            steps += 1
            if steps == 2 and not options.fixed:
                limit_memory(times_needed=LIMIT)
            clock.step(len(texts))
            if clock.over():
                break
    clock.report()


if __name__ == "__main__":
    main()
