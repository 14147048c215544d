"""ZeRO of parameters that operators read through values made of them: stored in parts, gathered there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from models.zoo import ZOO
from proving import prove


class Made(nn.Module):
    """A weight with a norm of its own, one that is read as it is and transposed, a slice of positions, a tied table."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.direction, self.length = nn.Parameter(torch.randn(16, 32)), nn.Parameter(torch.rand(16, 1))
        self.tokens, self.positions = nn.Embedding(64, 16), nn.Parameter(torch.randn(6, 16))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.direction * self.length / self.direction.norm(dim=1, keepdim=True)
        h = self.tokens(x) + self.positions[:4]
        return (torch.tanh(h @ weight) @ weight.t() @ self.tokens.weight.t()).square().mean()


OPTIONS: list[dict[str, Any]] = [
    {"zero": 1},
    {"zero": 3},
    {"zero": 2, "micro_batch": 4},
    {"zero": sw.Zero(3, over=("inner",)), "mesh": sw.Mesh(outer=2, inner=2)},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.sampled(2)
def test_what_is_made_of_parameters_leaves_them_in_parts(options: dict[str, Any]) -> None:
    model, x = Made(), torch.randint(64, (8, 4))
    plan = sw.plan(model, x, 4, **{"mode": "data_parallel", "mesh": sw.Mesh(dp=4), **options})
    assert all("@" in entry.layout for entry in plan.parameters), "all are stored in parts"
    if "inner" not in str(options):  # along the other axis gradients of parts are summed
        assert not {one.kind for one in plan.collectives(backward=True)} & {"all_reduce"}, (
            "and their gradients reduced so"
        )
    prove(model, x, plan, steps=2)


@pytest.mark.parametrize("options", [{"zero": 1}, {"zero": 3, "recompute": "full"}])
@pytest.mark.sampled(1)
def test_experts_are_stored_in_parts(options: dict[str, Any]) -> None:
    model, inputs = ZOO["mixtral"].build(), ZOO["mixtral"].inputs(8)
    plan = sw.plan(model, (), 4, kwargs=inputs, mode="data_parallel", mesh=sw.Mesh(dp=4), **options)
    experts = [entry for entry in plan.parameters if "experts" in entry.name]
    assert experts
    assert all("@dp" in entry.layout for entry in experts)
    assert sw.verify(model, (), plan, kwargs=inputs, steps=1).ok


def test_what_the_module_returns_of_a_parameter_stays_whole() -> None:
    class Returned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            turned = self.weight.t()
            return (x @ turned).square().mean(), turned

    model, x = Returned(), torch.randn(8, 8)
    plan = sw.plan(model, x, 4, mode="data_parallel", mesh=sw.Mesh(dp=4), zero=3)
    assert sw.verify(model, x, plan, steps=2).ok


class Taught(nn.Module):
    """A teacher that requires gradients, as its copy does, and gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.head, self.teacher = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return nn.functional.mse_loss(self.head(self.student(x)), wanted)


@pytest.mark.parametrize("zero", [1, 3])
def test_what_is_only_used_without_gradients_is_stored_like_what_it_is_an_average_of(zero: int) -> None:
    model, x = Taught(), torch.randn(8, 8)
    plan = sw.plan(model, x, 2, mode="data_parallel", zero=zero)
    for name in ("weight", "bias"):
        assert plan.layouts[f"teacher.{name}"] == plan.layouts[f"student.{name}"]
        assert plan.layouts[f"teacher.{name}"].positions
    assert sw.verify(model, x, plan).ok
