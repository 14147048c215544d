"""Operators that mix the samples of a batch, with gradients accumulated over micro-batches before the optimizer steps:
compared with one device over the same micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.runtime.local_shards import shard

RunRanks = Callable[..., list[Any]]
MICRO_BATCHES, STEPS = 3, 2


class Normed(nn.Module):
    """Batch norm in training: statistics of the whole micro-batch, and buffers that every call moves on. No bias before
    it: its gradient is zero by mathematics, and AdamW would make a step of the noise."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, momentum=0.3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.norm(self.up(x)))).square().mean()


class Contrastive(nn.Module):
    """Every sample against all others (InfoNCE, van den Oord et al. 2018): a loss over a matrix of samples by samples,
    with the targets on its diagonal."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.head = nn.Linear(6, 8), nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        one, other = F.normalize(self.up(x), dim=-1), F.normalize(self.head(x.flip(1)), dim=-1)
        similar = one @ other.T * self.scale.exp()
        targets = torch.arange(len(x))
        return (F.cross_entropy(similar, targets) + F.cross_entropy(similar.T, targets)) / 2


class Balanced(nn.Module):
    """A mixture of experts with a load-balancing loss (Fedus et al. 2021, equation 4): a product of two means over the
    batch, which is not the mean of the products of its parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.router = nn.Linear(6, 4)
        self.up = nn.Linear(6, 8)
        self.experts = nn.Parameter(torch.randn(4, 8, 6) / 3)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        weight, chosen = gates.max(-1)
        sent = F.one_hot(chosen, 4).to(x.dtype)
        mixed = torch.einsum("bh,ehd,be->bd", torch.relu(self.up(x)), self.experts, sent)
        balance = 4 * (sent.mean(0) * gates.mean(0)).sum()
        return (mixed * weight.unsqueeze(-1)).square().mean() + 0.1 * balance


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": Normed,
    "contrastive": Contrastive,
    "load balance": Balanced,
}
PLANS: dict[str, tuple[dict[str, int], dict[str, str]]] = {
    "data": ({"dp": 4}, {}),
    "data and columns": ({"dp": 2, "tp": 2}, {"up": "n@tp"}),
}


def batches() -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(STEPS, MICRO_BATCHES, 10, 6, dtype=torch.float64, generator=generator)


def trained(model: nn.Module) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses, and gradients of the last step, parameters and buffers by name."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in batches():
        optimizer.zero_grad()
        for x in step:
            loss = model(x) / MICRO_BATCHES
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
    held = {f"gradient {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, held | {name: p.detach() for name, p in (*model.named_parameters(), *model.named_buffers())}


def trained_on_ranks() -> dict[tuple[str, str], list[str]]:
    """On a rank: what differs from one device, per model and plan."""
    found = {}
    for model, make in MODELS.items():
        for name, (axes, strategies) in PLANS.items():
            mesh = sw.Mesh(axes)
            plan = sw.plan(
                make().double(),
                batches()[0, 0],
                mesh.num_devices,
                mesh=mesh,
                strategies=strategies,
                search="sharding_propagation",
            )
            losses, held = trained(sw.parallelize(make().double(), plan))
            want_losses, wanted = trained(make().double())
            wrong = [f"loss {i}" for i, (a, b) in enumerate(zip(losses, want_losses, strict=True)) if not near(a, b)]
            coordinates = mesh.coordinates(dist.get_rank())
            for key, want in wanted.items():
                layout = plan.layouts.get(key.removeprefix("gradient "))
                own = want if layout is None else shard(want, layout, coordinates)
                wrong += [] if near(held[key], own) else [key]
            found[model, name] = wrong
    return found


def near(a: Tensor, b: Tensor) -> bool:
    """To 1e-11: sums in another order, and two steps of an optimizer that divides by the size of a gradient."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-11)


def test_accumulated_gradients_are_those_of_one_device_over_the_same_micro_batches(run_ranks: RunRanks) -> None:
    for found in run_ranks(trained_on_ranks, 4, time_limit_seconds=240):
        assert found == {key: [] for key in product(MODELS, PLANS)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(2)
def test_one_batch_is_that_of_one_device(name: str) -> None:
    """The same models under more meshes, on the virtual cluster."""
    x = batches()[0, 0].float()
    for mesh in (sw.Mesh(dp=3), sw.Mesh(dp=2, tp=3), sw.Mesh(tp=2)):
        model = MODELS[name]()
        plan = sw.plan(
            model,
            x,
            mesh.num_devices,
            mesh=mesh,
            strategies={"up": "n@tp"} if len(mesh.axes) > 1 else None,
            search="sharding_propagation",
        )
        report = sw.verify(model, x, plan)
        assert report.ok, str(report)
