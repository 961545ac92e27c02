"""Two transformers with the sizes of GPT-2 and BERT, in plain PyTorch, as custom workloads.

stepscope trial examples/workload_transformers/workloads.py:gpt2 --batch-size 8 --precision bf16
stepscope fit examples/workload_transformers/workloads.py:bert --gpu-memory 15GiB --precision bf16
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.utils.data import Dataset

IGNORED = -100
"""Label of tokens that do not contribute to the loss."""


class Block(nn.Module):
    """Self-attention and a two-layer MLP, each with a residual connection."""

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
        attended = scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=self.causal
        )
        return self.merge(attended.transpose(1, 2).reshape(batch, tokens, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.before_attention(x)))
        return x + self.drop(self.narrow(gelu(self.widen(self.before_mlp(x)))))


class Transformer(nn.Module):
    """Predicts the next token (causal) or the masked tokens of a text."""

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
    """Random texts, labeled with the next token at each position."""

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
    """Random texts with 15% of the tokens masked, labeled with the masked tokens."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        text = self.text(index, self.tokens)
        hidden = torch.rand(self.tokens, generator=torch.Generator().manual_seed(index)) < 0.15
        return text.masked_fill(hidden, 0), text.masked_fill(~hidden, IGNORED)


def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1)


def gpt2() -> dict:
    """A model of the size of GPT-2: 124 million parameters, 1024 tokens per text."""
    vocabulary, tokens = 50_257, 1024
    return {
        "model": Transformer(vocabulary, tokens, causal=True),
        "data": NextToken(vocabulary, tokens),
        "loss": loss,
        "optimizer": adamw,
    }


def bert() -> dict:
    """A model of the size of BERT: 110 million parameters, 512 tokens per text."""
    vocabulary, tokens = 30_522, 512
    return {
        "model": Transformer(vocabulary, tokens, causal=False),
        "data": HiddenTokens(vocabulary, tokens),
        "loss": loss,
        "optimizer": adamw,
    }


def _small_weights(layer: nn.Module) -> None:
    """Initialize as GPT-2 does: tied embeddings need small weights."""
    if isinstance(layer, (nn.Linear, nn.Embedding)):
        nn.init.normal_(layer.weight, std=0.02)
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)
