"""A training run that stops and goes on somewhere else: what tests of checkpoints compare."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from runtime import training

# How a run is split: mesh, strategies, further arguments of sw.plan.
SPLITS: dict[str, tuple[dict[str, int], dict[str, str], dict[str, Any]]] = {
    "dp2": ({"dp": 2}, {}, {}),
    "tp2": ({"tp": 2}, {"qkv": "n@tp", "up": "n@tp", "tokens": "v@tp", "head": "n@tp"}, {}),
    "zero2": ({"dp": 2}, {}, {"zero": 3}),
    "dp4": ({"dp": 4}, {}, {}),
    "dp2 x tp2": ({"dp": 2, "tp": 2}, {"qkv": "n@tp", "up": "n@tp", "tokens": "v@tp", "head": "n@tp"}, {}),
    "zero4": ({"dp": 4}, {}, {"zero": 1}),
    "tp3": ({"tp": 3}, {"qkv": "n@tp", "up": "n@tp", "tokens": "v@tp"}, {}),
    "dp1": ({"dp": 1}, {}, {}),
}


class Net(nn.Module):
    """Attention with a fused projection, batch norm, dropout, a tied head, frozen, unused and 0-dim parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(14, 12)
        self.norm = nn.LayerNorm(12)
        self.qkv, self.out = nn.Linear(12, 36, bias=False), nn.Linear(12, 12)
        self.up, self.down = nn.Linear(12, 10), nn.Linear(10, 12)
        self.batch_norm = nn.BatchNorm1d(12)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(12, 14, bias=False)
        self.head.weight = self.tokens.weight
        self.norm.bias.requires_grad_(False)
        self.register_buffer("offset", torch.arange(12.0) / 50, persistent=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.offset
        size, length, _ = x.shape
        q, k, v = (t.view(size, length, 6, 2).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(size, length, 12)
        x = x + self.out(mixed) * self.scale
        x = x + F.dropout(self.down(torch.tanh(self.up(x))), 0.25, self.training)
        x = self.batch_norm(x.transpose(1, 2)).transpose(1, 2)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def make(seed: int = 0, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 14, (2, 12, 5), generator=torch.Generator().manual_seed(step))
    return ids[0], ids[1]


def split(
    kind: str, seed: int = 0, dtype: torch.dtype = torch.float64, inputs: Any = "global", **more: Any
) -> sw.Parallel:
    sizes, strategies, settings = SPLITS[kind]
    model = make(seed, dtype)
    mesh = sw.Mesh(sizes)
    with warnings.catch_warnings(action="ignore"):  # batch norm in parts of a batch and the like
        how = {**settings, **more}
        plan = sw.plan(
            model, batch(0), mesh.num_devices, mesh=mesh, strategies=strategies, search="sharding_propagation", **how
        )
        return sw.parallelize(model, plan, seed=7, inputs=inputs)


def tools(module: nn.Module, lr: float = 1e-2) -> tuple[torch.optim.Optimizer, Any]:
    decayed = [p for name, p in module.named_parameters() if p.ndim > 1]
    others = [p for name, p in module.named_parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=lr)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=40)


def train(module: Any, optimizer: torch.optim.Optimizer, scheduler: Any, first: int, last: int) -> list[float]:
    return training.train(module, map(batch, range(first, last)), optimizer, scheduler).losses


def go_on(folder: str, kind: str, steps: int, save_as: str = "", num_steps: int = 4) -> dict[str, Any]:
    """On a rank: make a run from other initial values, continue a checkpoint (none: start), train, save."""
    par = split(kind, seed=0 if not steps else 99)
    optimizer, scheduler = tools(par, 1e-2 if not steps else 5.0)
    loaded = None
    if steps:
        loaded = sw.load_checkpoint(folder, par, optimizer, schedulers=scheduler)
        assert loaded.step == steps
        sw.save_checkpoint(Path(folder) / "again", par, optimizer, step=0, schedulers=scheduler)
    losses = train(par, optimizer, scheduler, steps, steps + num_steps)
    if save_as:
        sw.save_checkpoint(
            Path(folder) / save_as, par, optimizer, step=steps + num_steps, schedulers=scheduler, extra={"by": kind}
        )
    files = sorted(Path(folder).glob(f"{save_as}/shard-{dist.get_rank():05}-*")) if save_as else []
    return {
        "losses": losses,
        "written": sum(file.stat().st_size for file in files),
        "num_bytes_read": loaded.num_bytes_read if loaded else 0,
    }


def saved(folder: Any, step: int = 1, **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A small model and its optimizer after a step, of which ``folder`` has a checkpoint."""
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    sw.save_checkpoint(folder / f"step-{step}", model, optimizer, step=step, **more)
    return model, optimizer
