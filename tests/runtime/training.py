"""Training on one device and on ranks, and the comparison of both: every rank has its part of what one device has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.layouts.layout import Layout
from shardwise.runtime.local_shards import shard

Inputs = Sequence[Any] | Mapping[str, Any]
# Takes a module and the inputs of a step, adds to the gradients, and returns the loss.
Differentiate = Callable[[Any, Any], Tensor]


@dataclass
class Trained:
    """What some steps have left. ``norms``: of gradients before they were clipped; ``gradients``: of the last step;
    ``state``: parameters and buffers; ``layouts`` and ``coordinates``: of a rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    coordinates: Mapping[str, int] = field(default_factory=dict)

    def part_of(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's part of a tensor of one device."""
        return shard(whole, self.layouts[name], self.coordinates) if name in self.layouts else whole


def loss_of(output: Any) -> Tensor:
    """Return the loss that a module returns: alone, first of several, or by name."""
    if isinstance(output, Mapping):
        output = output["loss"]
    loss: Tensor = output[0] if isinstance(output, tuple | list) else output
    return loss


def call_and_differentiate(module: Any, inputs: Inputs) -> Tensor:
    """Call a module and differentiate its loss, as a script of one device does."""
    loss = loss_of(module(**inputs) if isinstance(inputs, Mapping) else module(*inputs))
    loss.backward()
    return loss.detach()


def step_or_differentiate(module: Any, inputs: Inputs) -> Tensor:
    """Run ``par.step`` on ranks, and what equals it on one device."""
    if not isinstance(module, sw.Parallel):
        return call_and_differentiate(module, inputs)
    loss = module.step(**inputs) if isinstance(inputs, Mapping) else module.step(*inputs)
    assert loss is not None
    return loss


def train(
    module: nn.Module,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    clip: float | None = None,
    differentiate: Differentiate = step_or_differentiate,
) -> Trained:
    """Take a step per batch, by AdamW if no optimizer is given. ``clip``: the largest norm of all gradients."""
    optimizer = optimizer or torch.optim.AdamW(module.parameters(), lr=0.01)
    found = Trained()
    for inputs in batches:
        found.losses.append(differentiate(module, inputs).item())
        if clip is not None:
            if isinstance(module, sw.Parallel):
                norm = sw.clip_grad_norm(module, clip)
            else:
                norm = nn.utils.clip_grad_norm_(module.parameters(), clip)
            found.norms.append(norm.item())
        found.gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    found.state = state_of(module)
    if isinstance(module, sw.Parallel):
        found.layouts, found.coordinates = dict(module.layouts), dict(module.coordinates)
    return found


def state_of(module: nn.Module) -> dict[str, Tensor]:
    """Copy the parameters and buffers that are there now."""
    return {name: x.detach().clone() for name, x in (*module.named_parameters(), *module.named_buffers())}


def check_close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], rtol: float, atol: float, what: str) -> None:
    """Compare tensors by name; there must be the same ones."""
    assert found.keys() == wanted.keys(), what
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], rtol=rtol, atol=atol, msg=f"{what}: {name}")


def check_ranks(
    ranks: Sequence[Trained],
    alone: Trained,
    what: str = "",
    *,
    rtol: float = 1e-9,
    atol: float = 1e-12,
    of_losses: float = 1e-10,
) -> None:
    """Compare what every rank has with its part of what one device has. ``of_losses``: relative, of norms too."""
    for rank, found in enumerate(ranks):
        where = f"{what}, rank {rank}"
        assert found.losses == pytest.approx(alone.losses, rel=of_losses), where
        assert found.norms == pytest.approx(alone.norms, rel=of_losses), where
        for own, whole in ((found.gradients, alone.gradients), (found.state, alone.state)):
            here = [name for name in whole if name in found.layouts]  # of its stages
            check_close(own, {name: found.part_of(name, whole[name]) for name in here}, rtol, atol, where)
