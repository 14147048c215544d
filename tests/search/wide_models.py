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


class Gru(nn.Module):
    """Two layers of GRU cells, each step of which reads the state of the last."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.GRUCell(width, width), nn.GRUCell(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = g = torch.zeros_like(x[:, 0])
        outputs = []
        for t in range(x.shape[1]):
            h = self.first(x[:, t], h)
            g = self.second(h, g)
            outputs.append(g)
        return torch.stack(outputs, 1).square().mean()


class Rwkv(nn.Module):
    """Time mixing of RWKV, unrolled: a numerator and a denominator that decay, with their running maximum."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.key, self.value, self.gate = (nn.Linear(width, width) for _ in range(3))
        self.decay, self.bonus = nn.Parameter(torch.rand(width)), nn.Parameter(torch.rand(width))
        self.mix, self.out = nn.Parameter(torch.rand(3, width)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        k, v, r = (torch.lerp(before, x, self.mix[i]) for i in range(3))
        key, value, gate = self.key(k), self.value(v), self.gate(r).sigmoid()
        above = below = torch.zeros_like(x[:, 0])
        largest, outputs, decay = torch.full_like(above, -1e3), [], -self.decay.exp()
        for t in range(x.shape[1]):
            most = torch.maximum(largest, key[:, t] + self.bonus)
            old, new = torch.exp(largest - most), torch.exp(key[:, t] + self.bonus - most)
            outputs.append((old * above + new * value[:, t]) / (old * below + new))
            most = torch.maximum(largest + decay, key[:, t])
            old, new = torch.exp(largest + decay - most), torch.exp(key[:, t] - most)
            above, below, largest = old * above + new * value[:, t], old * below + new, most
        return (x + self.out(gate * torch.stack(outputs, 1))).square().mean()


class Cell(nn.Module):
    """A cell of NASNet: every node adds two of the earlier ones, and the result concatenates all."""

    def __init__(self, width: int = 4, nodes: int = 5, cells: int = 3) -> None:
        super().__init__()
        self.nodes = nodes
        self.cells = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(width, width, 3 if i % 2 else 5, padding="same") for i in range(2 * nodes))
            for _ in range(cells)
        )
        self.narrow = nn.ModuleList(nn.Conv2d(width * (nodes + 2), width, 1) for _ in range(cells))

    def forward(self, x: Tensor) -> Tensor:
        before = x
        for cell, narrow in zip(self.cells, self.narrow, strict=True):
            states = [before, x]
            for i in range(self.nodes):
                left, right = states[(3 * i) % len(states)], states[(2 * i + 1) % len(states)]
                states.append(cell[2 * i](left).relu() + cell[2 * i + 1](right).relu())
            before, x = x, narrow(torch.cat(states, 1))
        return x.square().mean()


class HyperConnections(nn.Module):
    """Several residual streams; every block reads a mixture of all and adds to each."""

    def __init__(self, width: int = 16, streams: int = 3, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.read, self.write = (nn.Parameter(torch.rand(blocks, streams)) for _ in range(2))
        self.mixed = nn.Parameter(torch.rand(blocks, streams, streams))

    def forward(self, x: Tensor) -> Tensor:
        streams = [x for _ in range(self.read.shape[1])]
        for i, block in enumerate(self.blocks):
            y = block(sum((self.read[i, j] * stream for j, stream in enumerate(streams)), torch.zeros_like(x)))
            streams = [
                sum((self.mixed[i, j, k] * own for k, own in enumerate(streams)), self.write[i, j] * y)
                for j in range(len(streams))
            ]
        return torch.stack(streams).square().mean()


WIDE: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "scan": (Scan, (4, 4, 16)),
    "cells": (Cells, (4, 4, 8)),
    "dense": (DenseNet, (4, 4, 8, 8)),
    "unet": (UNet, (4, 4, 8, 8)),
    "gru": (Gru, (4, 4, 8)),
    "rwkv": (Rwkv, (4, 4, 16)),
    "cell": (Cell, (4, 4, 8, 8)),
    "hyper": (HyperConnections, (4, 4, 16)),
}
