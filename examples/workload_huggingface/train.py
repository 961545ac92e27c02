"""Classify token sequences with a small BERT from Hugging Face Transformers.

The model is created from a configuration and the tokens are synthetic, so nothing is downloaded.
The script trains without stepscope, and it defines a custom workload:

    python examples/workload_huggingface/train.py
    stepscope trial examples/workload_huggingface/train.py:workload --sequence-length 128 --steps 50
"""

import argparse

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

VOCABULARY = 5_000


class Sentences(Dataset):
    """Random tokens; each class uses its own part of the vocabulary."""

    def __init__(self, count: int, length: int, classes: int, seed: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(classes, (count,), generator=random)
        part = VOCABULARY // classes
        tokens = torch.randint(part, (count, length), generator=random)
        self.tokens = tokens + part * self.labels[:, None]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        return {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "labels": self.labels[index],
        }


def small_bert(length: int, classes: int) -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=length,
            num_labels=classes,
        )
    )


def workload(length: int = 64, classes: int = 4, samples: int = 4_000, seed: int = 0) -> dict:
    """No loss is needed: the model computes it from the labels of the batch."""
    return {
        "model": small_bert(length, classes),
        "data": Sentences(samples, length, classes, seed),
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4_000)
    options = parser.parse_args()

    parts = workload(samples=options.samples)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = parts["model"].to(device)
    optimizer = parts["optimizer"](model.parameters())
    for epoch in range(options.epochs):
        for batch in DataLoader(parts["data"], options.batch_size, shuffle=True):
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
