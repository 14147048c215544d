"""A model of many equal blocks."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

LAYERS, WIDTH, VOCABULARY = 9, 2048, 512


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Deep(nn.Module):
    """``skips``: what the middle block makes is added at the end, too."""

    def __init__(self, layers: int = LAYERS, width: int = WIDTH, *, skips: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head, self.skips = nn.Linear(width, VOCABULARY), skips

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        middle = x
        for number, layer in enumerate(self.layers):
            x = layer(x)
            middle = x if number == len(self.layers) // 2 else middle
        x = x + middle if self.skips else x
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
