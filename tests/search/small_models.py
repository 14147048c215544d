"""Small models in which single operators can be annotated, with the strategies of the specification's examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw


class TwoProducts(nn.Module):
    """``loss = mean(act(x @ w) @ v)``, each product through a callable that a test may annotate."""

    def __init__(
        self,
        first: Callable[..., Tensor] = torch.matmul,
        act: Callable[[Tensor], Tensor] | None = torch.relu,
        second: Callable[..., Tensor] = torch.matmul,
        sizes: tuple[int, int, int] = (32, 16, 16),
    ) -> None:
        super().__init__()
        self.first, self.act, self.second = first, act, second
        self.w = nn.Parameter(torch.randn(sizes[0], sizes[1]))
        self.v = nn.Parameter(torch.randn(sizes[1], sizes[2]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x, self.w)
        if self.act is not None:
            y = self.act(y)
        return self.second(y, self.v).square().mean()


class Mlp(nn.Module):
    """Submodules ``up`` and ``down``; ``loss = mean(down(act(up(x)))^2)``."""

    def __init__(
        self, width: int = 8, hidden: int = 16, bias: bool = True, act: Callable[[Tensor], Tensor] = F.relu
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x))).square().mean()


class Chain(nn.Module):
    """Equal linear layers, one after the other; ``loss = mean(x^2)``."""

    def __init__(
        self, layers: int = 3, width: int = 256, bias: bool = False, act: Callable[[Tensor], Tensor] = F.relu
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(layers))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return x.square().mean()


class PreNorm(nn.Module):
    """A residual layer: ``x + dropout(down(gelu(up(norm(x)))))``."""

    def __init__(self, width: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return x + (F.dropout(y, self.dropout, self.training) if self.dropout else y)


class Stack(nn.Module):
    """Blocks, one after the other; ``loss = mean(x^2)``."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def planned(model: nn.Module, inputs: tuple[Any, ...], devices: int = 8, **choices: Any) -> sw.Plan:
    """A plan that was verified: equal to one device, with exactly the collectives it lists."""
    plan = sw.plan(model, inputs, devices, **choices)
    report = sw.verify(model, inputs, plan)
    assert report.ok, f"{report}\n{plan}"
    return plan


def kinds(plan: sw.Plan, *, backward: bool = False) -> list[str]:
    return [f"{c.kind}@{c.axes}" for c in plan.collectives(backward=backward)]


def counts(plan: sw.Plan, operator: str) -> tuple[tuple[int, ...], ...]:
    """The strategy of an operator as split counts per operand dim, as the specification writes them."""
    entry = next(entry for entry in plan.operators if entry.name == operator)
    split: dict[str, int] = {}
    for word in entry.strategy.split():
        factor, _, axes = word.partition("@")
        split[factor] = plan.mesh.size_of(plan.mesh.parse_axes(axes))
    operands = entry.rule.partition(" -> ")[0].split(", ")
    return tuple(tuple(split.get(factor, 1) for factor in operand.split()) for operand in operands)


def strategies(plan: sw.Plan, *operators: str) -> list[str]:
    return [plan.strategies[name] for name in operators]


def conversions_into(plan: sw.Plan, operator: str, value: str = "") -> list[str]:
    """The forward collectives of the conversions first needed by an operator (or inside its lowering), of all values or
    of one."""
    found = [c for c in plan.conversions if c.op == operator or c.op.startswith(f"{operator}.")]
    return [f"{e.kind}@{e.axes}" for c in found if not value or c.value == value for e in c.forward]
