"""Llama, as rows of published runs have it: root-mean-square norms, rotated positions, grouped heads, a gated network
(for ``published_prices.py``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from published_memory import Shape
from torch import Tensor, nn
from torch.nn import functional as F

# Columns and rows, as Megatron splits; what is between follows.
LLAMA = {
    "*.q": "n@tp",
    "*.k": "n@tp",
    "*.v": "n@tp",
    "*.gate": "n@tp",
    "*.up": "n@tp",
    "*.out": "k@tp",
    "*.down": "k@tp",
}


@dataclass(frozen=True, slots=True)
class Gated:
    """What a Llama has beside a ``Shape``: heads of keys and values, the width of the gated network, and of a head."""

    kv_heads: int
    width: int
    head_size: int


class LlamaLayer(nn.Module):
    """A layer of Llama."""

    def __init__(self, shape: Shape, gated: Gated) -> None:
        super().__init__()
        width, self.size = shape.width, gated.head_size
        self.repeats = shape.heads // gated.kv_heads
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, shape.heads * self.size, bias=False)
        self.k, self.v = (nn.Linear(width, gated.kv_heads * self.size, bias=False) for _ in range(2))
        self.out = nn.Linear(shape.heads * self.size, width, bias=False)
        self.gate, self.up = (nn.Linear(width, gated.width, bias=False) for _ in range(2))
        self.down = nn.Linear(gated.width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (part(y).unflatten(2, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (rotated(part, cos, sin) for part in (q, k))
        if self.repeats > 1:
            k, v = (part.repeat_interleave(self.repeats, 1) for part in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.between(x)
        found: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return found


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Llama(nn.Module):
    """Layers between an embedding and the scores of the next token."""

    def __init__(self, shape: Shape, gated: Gated) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaLayer(shape, gated) for _ in range(shape.layers))
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        size = (shape.sequence, gated.head_size)
        self.register_buffer("cos", torch.empty(size))
        self.register_buffer("sin", torch.empty(size))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.float().flatten(0, 1), labels.flatten())
