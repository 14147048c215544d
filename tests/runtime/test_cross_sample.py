"""Operators that mix the samples of a batch, with gradients accumulated over micro-batches before the optimizer steps:
compared with one device over the same micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from launch.gloo_ranks import RunRanks
from proving import prove
from runtime.training import Trained, check_ranks, train

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


def trained(model: nn.Module) -> Trained:
    def accumulate(model: nn.Module, step: Tensor) -> Tensor:
        losses = [model(x) / MICRO_BATCHES for x in step]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).detach().sum()

    return train(model, batches(), differentiate=accumulate)


def trained_on_ranks(name: str) -> dict[str, Trained]:
    """On a rank: training of every model under a plan."""
    axes, strategies = PLANS[name]
    mesh, found = sw.Mesh(axes), {}
    settings: dict[str, Any] = {"mesh": mesh, "strategies": strategies, "search": "sharding_propagation"}
    for model, make in MODELS.items():
        module = make().double()
        plan = sw.plan(module, batches()[0, 0], mesh.num_devices, **settings)
        found[model] = trained(sw.parallelize(module, plan))
    return found


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.sampled(1)
def test_accumulated_gradients_are_those_of_one_device_over_the_same_micro_batches(
    name: str, run_ranks: RunRanks
) -> None:
    """To 1e-11: sums in another order, and two steps of an optimizer that divides by the size of a gradient."""
    ranks = run_ranks(trained_on_ranks, 4, name)
    for model, make in MODELS.items():
        alone = trained(make().double())
        check_ranks([found[model] for found in ranks], alone, f"{model}, {name}", rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(1)
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
        prove(model, x, plan)
