"""What dropout costs: a training step without it, with PyTorch's own, with masks that no plan changes. One process, one
thread; the least of several steps, taken in turn."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw


class Block(nn.Module):
    """A transformer block that drops its attention probabilities and both branches."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(p)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        weights = self.drop((q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1))
        x = x + self.drop(self.out((weights @ v).transpose(1, 2).reshape(batch, length, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.between(x)))))


class Blocks(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(256, 4, p) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sw.init_ranks()
    x = torch.randn(8, 256, 256)
    plain, dropped = Blocks(0.0), Blocks(0.1)

    def split(model: nn.Module) -> Callable[[], Tensor]:
        par = sw.parallelize(model, sw.plan(model, x, 1, search="sharding_propagation"))
        return lambda: par.step(x)

    runs: dict[str, Callable[[], object]] = {
        "no dropout": split(plain),
        "PyTorch's dropout": lambda: dropped(x).backward(),
        "shardwise's dropout": split(dropped),
    }
    seconds = dict.fromkeys(runs, float("inf"))
    for _ in range(options.steps + 1):  # the first also captures
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    for name, best in seconds.items():
        print(f"{name:<22} {1000 * best:6.0f} ms")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
