"""What users do around a program, on real ranks: either the numbers of one device, or a refusal on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import message
from shardwise.runtime.local_shards import shard

FIELDS: dict[str, dict[str, str] | None] = {"dp": None, "tp": {"narrow": "n@tp"}}
X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    """A layer with fewer columns than three ranks, and one more than two; a bias of one element."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.narrow, self.last = nn.Linear(6, width, bias=False), nn.Linear(width, 6)
        self.shift = nn.Parameter(torch.randn(1))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.narrow(torch.tanh(self.norm(self.first(x)))) + self.shift)) + x


def split(axis: str, width: int = 3, bucket_bytes: int = 2**25) -> sw.Parallel:
    size = dist.get_world_size()
    mesh = sw.Mesh({axis: size})
    plan = sw.plan(
        Net(width),
        X,
        size,
        mesh=mesh,
        strategies=FIELDS[axis],
        bucket_bytes=bucket_bytes,
        search="sharding_propagation",
    )
    return sw.parallelize(Net(width), plan)


def differences(par: sw.Parallel, reference: nn.Module) -> list[str]:
    """Parameters whose gradients are not those of one device (1e-12 of the largest: sums in another order)."""
    found = []
    for name, parameter in par.named_parameters():
        want = shard(reference.get_parameter(name).grad, par.plan.layouts[name], par._ranks.coordinates)
        if parameter.grad is None or not torch.allclose(parameter.grad, want, rtol=1e-12, atol=1e-12):
            found.append(name)
    return found


def alone(width: int = 3) -> Net:
    model = Net(width)
    model(X).square().sum().backward()
    return model


def differentiate_twice(par: sw.Parallel) -> None:
    gradients = torch.autograd.grad(par(X).square().sum(), list(par.parameters()), create_graph=True)
    sum(gradient.square().sum() for gradient in gradients).backward()


def around_a_program(axis: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    par = split(axis)
    checkpoint(par, X, use_reentrant=False).square().sum().backward()  # the first call of all: rank 0 captures in it
    found["checkpoint"] = differences(par, alone())
    twin = copy.deepcopy(par)
    twin.zero_grad()
    twin(X).square().sum().backward()
    found["copy"] = differences(twin, alone())
    par = split(axis)
    with torch.inference_mode():
        par(X)
    with torch.autograd.set_detect_anomaly(True):
        par(X).square().sum().backward()
    found["inference, anomalies"] = differences(par, alone())
    found["twice"] = message(lambda: differentiate_twice(par))
    found["input"] = message(lambda: par(X.clone().requires_grad_()))
    with torch.no_grad():
        found["input, no_grad"] = message(lambda: par(X.clone().requires_grad_()))
    return found


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("axis", FIELDS)
def test_what_is_done_around_a_program(axis: str, run_ranks: RunRanks) -> None:
    for found in run_ranks(around_a_program, 2, axis):
        assert found["checkpoint"] == found["copy"] == found["inference, anomalies"] == []
        assert "gradients of gradients" in found["twice"]
        assert found["input"] == found["input, no_grad"] == ""


def thawed_and_frozen() -> tuple[str, list[str]]:
    """A parameter that is frozen when the module is split and not later; then the other way round."""
    model = Net(3)
    model.first.weight.requires_grad_(False)
    par = sw.parallelize(model, sw.plan(model, X, dist.get_world_size(), search="sharding_propagation"))
    par.get_parameter("first.weight").requires_grad_(True)
    found = message(lambda: par(X))
    par = split("dp")
    par.get_parameter("first.weight").requires_grad_(False)
    par(X).square().sum().backward()
    return found, differences(par, alone())


def test_a_parameter_may_be_frozen_later_and_not_thawed(run_ranks: RunRanks) -> None:
    for refused, differ in run_ranks(thawed_and_frozen, 2):
        assert "first.weight was frozen" in refused
        assert differ == ["first.weight"]  # it has no gradient


def uneven() -> list[list[str]]:
    """Columns over ranks: none on some rank, one on some and two on others, beside a bias of one element. Its gradient
    is a message of its own, and must have the same place in the order of messages on every rank."""
    found = []
    for width in (2, 3, 4, 5):
        par = split("tp", width, bucket_bytes=0)
        par(X).square().sum().backward()
        found.append(differences(par, alone(width)))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_linear_layer_whose_ranks_have_no_or_one_column(num_ranks: int, run_ranks: RunRanks) -> None:
    assert run_ranks(uneven, num_ranks) == [[[]] * 4] * num_ranks
