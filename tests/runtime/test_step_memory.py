"""Who may change what a step has made: gradients of their own memory, outputs changed in place, some of the outputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import message
from shardwise.graph.switches import CallCache

TOLERANCE = 1e-12  # float64: sums of at most 24 terms of size 1, in another order on two ranks


class Sums(nn.Module):
    """Three parameters that get one and the same gradient, and one that gets its transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.a, self.b = (nn.Parameter(torch.randn(size)) for size in (12, (4, 3), (4, 3)))
        self.turned = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return ((self.flat.view(4, 3) + self.a + self.b + self.turned.T) * x).sum()


class Delivers(nn.Module):
    """``last``: what it does to a product at the end."""

    def __init__(self, last: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(6, 1, bias=False), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.linear(x))


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.norm(self.up(x))
        best = h.max(dim=-1)
        return torch.tanh(h), self.down(h).exp(), best.values, best.indices, h.chunk(2, dim=-1)[1]


def made(make: Callable[[], nn.Module], x: Tensor, **choices: Any) -> tuple[nn.Module, sw.Parallel]:
    """The model alone and split over two ranks, by rows of the batch if nothing else is chosen."""
    torch.manual_seed(0)
    model = make().double()
    plan = sw.plan(model, (x,), 2, **(choices or {"mesh": sw.Mesh(dp=2), "mode": "data_parallel"}))
    assert any(layout.positions for layout in plan.layouts.values()), "the plan splits nothing"
    return model, sw.parallelize(model, plan)


def worst(model: nn.Module, par: sw.Parallel) -> float:
    """The largest difference of gradients; every parameter is whole on every rank."""
    held = dict(par.named_parameters())
    pairs = [(p.grad, held[name].grad) for name, p in model.named_parameters()]
    missing = [name for name, p in model.named_parameters() if (p.grad is None) != (held[name].grad is None)]
    assert not missing, f"a gradient on one side only: {missing}"
    return max(float((a - b).abs().max()) for a, b in pairs if a is not None and b is not None)


def on_ranks() -> dict[str, Any]:
    seen: dict[str, Any] = {}
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
    model, par = made(Sums, x)
    seen["accumulated"] = []
    for _ in range(3):  # what autograd keeps of the first call it adds to in place in the second
        for module in (model, par):
            module(x).backward()
        seen["accumulated"].append(worst(model, par))
    seen["memories"] = len({p.grad.untyped_storage().data_ptr() for p in par.parameters() if p.grad is not None})

    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    changes: dict[str, Callable[[Tensor], Any]] = {
        "mul_": lambda out: out.mul_(2),
        "a view's add_": lambda out: out[0].add_(1),
        "zero_": lambda out: out.zero_(),
    }
    summed = {"mesh": sw.Mesh(tp=2), "strategies": {"linear": "k@tp"}}
    # Backward of these needs what is delivered, or what has the same memory: one number, whole on every rank.
    for name, last in {"exp": torch.exp, "tanh, seen otherwise": lambda h: torch.tanh(h).view(-1)}.items():
        for change, apply in changes.items():
            _, par = made(lambda last=last: Delivers(last), x[:1], **summed)
            out = par(x)
            apply(out)
            seen[f"{name}, {change}"] = message(lambda out=out: out.sum().backward())
    # And of these it does not: as on one device.
    for name, last in {"the product": lambda h: h, "sin": torch.sin}.items():
        for change, apply in changes.items():
            model, par = made(lambda last=last: Delivers(last), x)
            for module in (model, par):
                out = module(x)
                apply(out)
                (out * out).sum().backward()
            seen[f"equal: {name}, {change}"] = worst(model, par)

    model, par = made(Several, x)
    for chosen in ((0,), (1,), (2,), (4,), (0, 1), (2, 4), (0, 1, 2, 4)):
        for module in (model, par):
            outputs = module(x)
            sum((outputs[i] * (i + 1)).sum() for i in chosen).backward()
        seen[f"equal: outputs {chosen}"] = worst(model, par)

    unknown = mock.patch("shardwise.programs.vjp._BACKWARD", CallCache())
    with (
        unknown,
        mock.patch("shardwise.programs.vjp._TracedKernels.backward", side_effect=RuntimeError("no such kernel")),
    ):
        with warnings.catch_warnings(record=True, action="always") as caught:
            model, par = made(Several, x)
            for _ in range(2):
                for module in (model, par):
                    outputs = module(x)
                    (outputs[0].sum() + (outputs[1] * outputs[4].sum()).sum()).backward()
        seen["equal: backward by autograd"] = worst(model, par)
        seen["announced"] = [str(one.message) for one in caught if "autograd runs it" in str(one.message)]
    return seen


def test_what_a_step_has_made_is_its_receivers(run_ranks: RunRanks) -> None:
    for rank, seen in enumerate(run_ranks(on_ranks, 2)):
        assert len(seen["announced"]) == (rank == 0)  # once, though it is called twice
        assert all("aten.tanh" in text and "no such kernel" in text for text in seen["announced"])
        assert max(seen["accumulated"]) < TOLERANCE
        assert seen["memories"] == 4, "gradients share memory"
        for name, value in seen.items():
            if name.startswith("equal"):
                assert value < TOLERANCE, (name, value)
            elif isinstance(value, str):
                assert "was changed in place after the call" in value, (name, value)
                assert "test_step_memory.py" in value
                assert "clone()" in value
