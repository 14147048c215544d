"""A model whose steps would make many values that depend on no input: rotary tables, ALiBi, a mask, positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LENGTH = 16, 2, 6


class Turning(nn.Module):
    """Attention by hand, with rotary tables from a buffer, a bias by distance, and a mask of the last two keys, each
    made anew in every layer; a buffer that counts calls, a decay that is made of it, dropout. It returns the loss and
    two views of values that depend on no input."""

    def __init__(self, layers: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10.0 ** -torch.arange(0, 8, 2).div(8.0), persistent=False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.slopes = torch.tensor([0.5, 0.25])  # no buffer
        self.qkv, self.out = (nn.ModuleList(nn.Linear(WIDTH, n * WIDTH) for _ in range(layers)) for n in (3, 1))
        self.dropout = dropout

    def tables(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = torch.arange(LENGTH).to(self.inv_freq.dtype)[:, None] * self.inv_freq
        both = torch.cat((angles, angles), -1)
        return both.cos().to(dtype), both.sin().to(dtype)

    def forward(self, x: Tensor) -> Any:
        self.calls.add_(1)
        cos, sin = self.tables(x.dtype)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
            position = torch.arange(LENGTH)
            distance = position[:, None] - position
            bias = -distance.abs() * self.slopes.to(x.dtype)[:, None, None]
            bias = bias.masked_fill((distance < 0) | (distance > 3), torch.finfo(x.dtype).min)
            seen = F.dropout(F.softmax(q @ k.transpose(-1, -2) + bias, -1), self.dropout)
            x = x + out((seen @ v).transpose(1, 2).flatten(2)) / self.calls
        x = x * self.scale[None, None]
        ends = torch.arange(LENGTH).mul(2)
        return x.square().mean(), ends[None], cos[0]


class Summing(Turning):
    """The same as a sum over samples, which passes and stages ask for: no count of calls, the loss alone."""

    def forward(self, x: Tensor) -> Any:
        cos, sin = self.tables(x.dtype)
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            q, k = (t * cos + torch.cat((-t[..., 4:], t[..., :4]), -1) * sin for t in (q, k))
            position = torch.arange(LENGTH)
            bias = (position[:, None] - position).abs() * 0.5
            seen = F.dropout(F.softmax(q @ k.transpose(-1, -2) - bias, -1), self.dropout)
            x = x + out((seen @ v).transpose(1, 2).flatten(2))
        return (x * self.scale[None, None]).square().mean()


def batch(step: int = 0) -> Tensor:
    return torch.randn(4, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def turning(**settings: float) -> Turning:
    torch.manual_seed(0)
    return Turning(**settings).double()
