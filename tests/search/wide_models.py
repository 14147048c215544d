"""Small models whose cost graphs are wide: every step or block reads what many others made."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Scan(nn.Module):
    """A selective state space, unrolled over time as Mamba is without its kernels."""

    def __init__(self, width: int = 16, state: int = 8) -> None:
        super().__init__()
        self.inner, self.mixed = nn.Linear(width, 2 * width), nn.Linear(width, 1 + 2 * state)
        self.step, self.out = nn.Linear(1, width), nn.Linear(width, width)
        self.decay, self.skip = nn.Parameter(torch.rand(width, state)), nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h, gate = self.inner(x).chunk(2, -1)
        step, b, c = self.mixed(h).split([1, self.decay.shape[1], self.decay.shape[1]], -1)
        step = F.softplus(self.step(step))
        kept, added = torch.exp(step[..., None] * -self.decay), (step * h)[..., None] * b[:, :, None]
        state, outputs = torch.zeros_like(added[:, 0]), []
        for t in range(x.shape[1]):
            state = kept[:, t] * state + added[:, t]
            outputs.append((state @ c[:, t, :, None])[..., 0])
        return (x + self.out((torch.stack(outputs, 1) + h * self.skip) * F.silu(gate))).square().mean()


class Cells(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(width, width), nn.LSTMCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = c = g = d = torch.zeros_like(x[:, 0])
        outputs = []
        for t in range(x.shape[1]):
            h, c = self.first(x[:, t], (h, c))
            g, d = self.second(h, (g, d))
            outputs.append(g)
        return torch.stack(outputs, 1).square().mean()


class DenseNet(nn.Module):
    def __init__(self, blocks: int = 5, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(width * (i + 1), width, 3, padding=1) for i in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for block in self.blocks:
            features.append(block(torch.cat(features, 1)).relu())
        return torch.cat(features, 1).square().mean()


class UNet(nn.Module):
    """The way up reads what each level of the way down made."""

    def __init__(self, width: int = 4, depth: int = 2) -> None:
        super().__init__()
        levels = range(depth)
        self.down = nn.ModuleList(nn.Conv2d(width << i, width << (i + 1), 3, padding=1) for i in levels)
        self.up = nn.ModuleList(nn.Conv2d(3 * width << i, width << i, 3, padding=1) for i in reversed(levels))

    def forward(self, x: Tensor) -> Tensor:
        levels = []
        for block in self.down:
            levels.append(x)
            x = F.max_pool2d(block(x).relu(), 2)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), levels.pop()], 1)).relu()
        return x.square().mean()


WIDE: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "scan": (Scan, (4, 4, 16)),
    "cells": (Cells, (4, 4, 8)),
    "dense": (DenseNet, (4, 4, 8, 8)),
    "unet": (UNet, (4, 4, 8, 8)),
}
