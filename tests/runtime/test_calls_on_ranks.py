"""Constants, trees and hooks of the original model in calls of a parallel module; on real gloo ranks."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from raising import raises
from shardwise.errors import CaptureError, CaptureWarning, ShardwiseError


@dataclass
class Batch:
    x: torch.Tensor
    factor: float = 1.0


@dataclass(frozen=True)
class Output:
    loss: torch.Tensor
    y: torch.Tensor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, batch):
        y = self.down(self.up(batch.x).tanh())
        y = y * {bool: 3.0, int: 5.0, float: 7.0}[type(batch.factor)]
        y = torch.atan2(torch.zeros_like(y), y.abs() * float(batch.factor)) + y * batch.factor
        return Output(y.nan_to_num(7.0).square().mean(), y)


MESH = sw.Mesh(dp=2, tp=2)
FACTORS = (1, 1.0, True, 0.0, -0.0, float("nan"), float("nan"), 0, False)


def make():
    torch.manual_seed(0)
    return Net().double(), torch.randn(8, 4, dtype=torch.float64)


def plan_of(net, x):
    """Rank 0 makes it for all."""
    strategies = {"up": "m@dp n@tp"}
    return sw.plan(net, (Batch(x),), 4, mesh=MESH, strategies=strategies) if dist.get_rank() == 0 else None


def constants():
    net, x = make()
    alone, par = copy.deepcopy(net), sw.parallelize(net, plan_of(net, x))
    worst = 0.0
    for factor in FACTORS:
        want, have = alone(Batch(x, factor)), par(Batch(x, factor))
        assert isinstance(have, Output)
        worst = max(
            worst, *(float((a - b).nan_to_num().abs().max()) for a, b in ((want.loss, have.loss), (want.y, have.y)))
        )
        assert torch.equal(want.y.isnan(), have.y.isnan())
    with raises(CaptureError, "object", "args[0].factor"):
        par(Batch(x, object()))
    return worst, len(par.compiled)


def masked(gradient):
    """Looks at the whole gradient: its norm, and a mask of its shape."""
    mask = torch.arange(gradient.numel(), dtype=gradient.dtype).reshape(gradient.shape) % 3
    return gradient * mask / (1 + gradient.norm())


def halved(parameter):
    parameter.grad.mul_(0.5 / (1 + parameter.grad.norm()))


def hooked():
    net, x = make()
    for name, parameter in net.named_parameters():
        parameter.register_hook(masked)
        if name.startswith("up"):
            parameter.register_post_accumulate_grad_hook(halved)
    alone = copy.deepcopy(net)
    for own, original in zip(alone.parameters(), net.parameters(), strict=True):  # a deep copy has no hooks
        for hook in original._backward_hooks.values():
            own.register_hook(hook)
        for hook in (original._post_accumulate_grad_hooks or {}).values():
            own.register_post_accumulate_grad_hook(hook)
    par = sw.parallelize(net, plan_of(net, x))
    for _ in range(2):
        alone(Batch(x)).loss.backward()
        par.step(Batch(x))
    from shardwise.runtime.local_shards import shard

    coordinates = MESH.coordinates(dist.get_rank())
    gradients = {name: p.grad for name, p in alone.named_parameters()}
    errors = [
        float((p.grad - shard(gradients[name], par.plan.layouts[name], coordinates)).abs().max())
        for name, p in par.named_parameters()
    ]
    with raises(ShardwiseError, "only holds", "holds shards"):
        par.up.register_forward_hook(lambda *given: None)
    return max(errors)


def announced():
    net, x = make()
    net.up.register_forward_hook(lambda module, given, output: output * 2)
    net.down.register_full_backward_hook(lambda module, before, after: None)
    alone, plan = copy.deepcopy(net), plan_of(net, x)
    with warnings.catch_warnings(record=True, action="always") as caught:
        par = sw.parallelize(net, plan)
    difference = float((par(Batch(x)).loss - alone(Batch(x)).loss).abs())
    return difference, [str(w.message) for w in caught if issubclass(w.category, CaptureWarning)]


def on_ranks():
    return constants(), hooked(), announced()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    from launch.gloo_ranks import run_on_ranks

    return run_on_ranks(on_ranks, 4, (), tmp_path_factory.mktemp("ranks"), 240)


# Sums of 8 rows and 6 columns in float64, in another order: some units in the last place of numbers below 10.
ROUNDING = 1e-13


def test_constants_of_other_types_and_signs_have_programs_of_their_own_and_nan_has_one(found):
    for (worst, programs), _, _ in found:
        assert worst < ROUNDING
        assert programs == len(FACTORS) - 1


def test_hooks_of_parameters_see_whole_gradients_and_parameters(found):
    for _, worst, _ in found:
        assert worst < ROUNDING


def test_forward_hooks_are_a_part_of_the_program_and_announced_as_backward_hooks_are(found):
    for _, _, (difference, messages) in found:
        assert difference < ROUNDING
        assert any("forward hooks of up" in message for message in messages)
        assert any("backward hooks of down" in message for message in messages)
