"""Two Transformers of well-known sizes, in plain PyTorch, as workloads for stepscope.

stepscope trial examples/own_transformers/workloads.py:gpt2 --batch-size 8 --precision bf16
stepscope fit examples/own_transformers/workloads.py:bert --gpu-memory 15GiB --precision bf16
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import Dataset

IGNORED = -100
"""The label of a token that is not to be guessed."""


class Block(nn.Module):
    """Attention, then two linear layers, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        parts = self.attend(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        seen = scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=self.causal
        )
        return self.merge(seen.transpose(1, 2).reshape(batch, tokens, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.before_attention(x)))
        return x + self.drop(self.narrow(gelu(self.widen(self.before_mlp(x)))))


class Transformer(nn.Module):
    """Says for every token of a text which it should be: the next one, or the one left out."""

    def __init__(
        self,
        vocabulary: int,
        tokens: int,
        causal: bool,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, causal) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_small_weights)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.words(tokens) + self.places(places))
        return self.head(self.norm(self.blocks(x)))


class NextToken(Dataset):
    """Random texts, and what follows each of their tokens."""

    def __init__(self, vocabulary: int, tokens: int, count: int = 10_000) -> None:
        self.vocabulary, self.tokens, self.count = vocabulary, tokens, count

    def __len__(self) -> int:
        return self.count

    def text(self, index: int, tokens: int) -> torch.Tensor:
        return torch.randint(
            self.vocabulary, (tokens,), generator=torch.Generator().manual_seed(index)
        )

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = self.text(index, self.tokens + 1)
        return text[:-1], text[1:]


class HiddenTokens(NextToken):
    """Random texts with 15 % of their tokens hidden, and these."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = self.text(index, self.tokens)
        hidden = torch.rand(self.tokens, generator=torch.Generator().manual_seed(index)) < 0.15
        return text.masked_fill(hidden, 0), text.masked_fill(~hidden, IGNORED)


def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1)


def gpt2() -> dict:
    """As large as GPT-2: 124 million parameters, texts of 1024 tokens."""
    vocabulary, tokens = 50_257, 1024
    return {
        "model": Transformer(vocabulary, tokens, causal=True),
        "data": NextToken(vocabulary, tokens),
        "loss": loss,
        "optimizer": adamw,
    }


def bert() -> dict:
    """As large as BERT: 110 million parameters, texts of 512 tokens."""
    vocabulary, tokens = 30_522, 512
    return {
        "model": Transformer(vocabulary, tokens, causal=False),
        "data": HiddenTokens(vocabulary, tokens),
        "loss": loss,
        "optimizer": adamw,
    }


def _small_weights(layer: nn.Module) -> None:
    """As GPT-2 begins: with one matrix for words in and out, larger ones would shout."""
    if isinstance(layer, (nn.Linear, nn.Embedding)):
        nn.init.normal_(layer.weight, std=0.02)
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)
