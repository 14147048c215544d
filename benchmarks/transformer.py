"""The transformer that ``step_time.py`` measures: ordinary PyTorch for one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model and of one whole batch."""

    width: int
    layers: int = 4
    head_width: int = 64
    vocab: int = 4096
    batch: int = 8
    time: int = 128


class Attention(nn.Module):
    """Causal self-attention. Rows of ``qkv`` are laid out as (3, heads, head_width); the number of heads is read off
    its output, so that the same code runs on some of the heads."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.head_width = head_width
        self.qkv: nn.Module = nn.Linear(width, 3 * width)
        self.out: nn.Module = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads.transpose(1, 2) for heads in self.qkv(x).unflatten(2, (3, -1, self.head_width)).unbind(2))
        mixed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head_width)
        self.up: nn.Module = nn.Linear(width, 4 * width)
        self.down: nn.Module = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        y: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return y


class Transformer(nn.Module):
    """``ids`` and ``labels``, both [batch, time] -> the mean cross entropy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens: nn.Module = nn.Embedding(shape.vocab, shape.width)
        self.positions = nn.Embedding(shape.time, shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.head_width) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head: nn.Module = nn.Linear(shape.width, shape.vocab, bias=False)
        self.loss: nn.Module = nn.CrossEntropyLoss()
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.loss(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
        return loss
