"""Products in float8 on ranks: the scales of whole tensors, the steps of one device, and gathers in float8."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from shardwise.graph.float8 import PRODUCTS, linear
from shardwise.programs.float8_gathers import Float8Gathers

SETTINGS: dict[str, dict[str, Any]] = {
    "ZeRO 3": {"mesh": sw.Mesh(dp=2), "mode": "data_parallel", "zero": 3},
    "columns, rows": {"mesh": sw.Mesh(tp=2), "mode": "semi_auto", "strategies": {"0": "n@tp", "2": "k@tp"}},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.Tanh(), nn.Linear(32, 16, bias=False))


def batch() -> tuple[Tensor, Tensor]:
    """Return samples whose first half is too small for the scale of the whole: it is rounded to zero."""
    torch.manual_seed(1)
    return torch.randn(4, 16) * torch.tensor([1e-7, 1e-7, 1, 1]).unsqueeze(-1), torch.randn(4, 16)


def trained(products: str, **settings: Any) -> tuple[list[float], Tensor]:
    """Return the losses of steps on ranks, and the output after them."""
    precision = sw.Precision(compute=torch.bfloat16, parameter=torch.float32, products=products)
    plan = sw.plan(model(), batch(), 2, loss=nn.functional.mse_loss, precision=precision, cache=False, **settings)
    par = sw.parallelize(model(), plan, loss=nn.functional.mse_loss, compile=False)
    optimizer = torch.optim.SGD(par.parameters(), lr=0.3)
    losses = []
    for _ in range(4):
        losses.append(float(par.step(*batch())))
        optimizer.step()
        optimizer.zero_grad()
    return losses, par.predict(batch()[0]).float()


def trained_alone(products: str) -> tuple[list[float], Tensor]:
    weights = [*model().parameters()]
    optimizer, (x, target), losses = torch.optim.SGD(weights, lr=0.3), batch(), []

    def output() -> Tensor:
        by_rows, (first, second) = products == "float8 rows", (weight.bfloat16() for weight in weights)
        return linear(torch.tanh(linear(x.bfloat16(), first, by_rows)), second, by_rows)

    for _ in range(4):
        loss = nn.functional.mse_loss(output(), target)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, output().detach().float()


def on_a_rank() -> dict[tuple[str, str], tuple[list[float], Tensor]]:
    return {(products, name): trained(products, **SETTINGS[name]) for products in PRODUCTS for name in SETTINGS}


def test_ranks_train_as_one_device(run_ranks: RunRanks) -> None:
    ranks = run_ranks(on_a_rank, 2)
    for products in PRODUCTS:
        losses, output = trained_alone(products)
        assert losses[-1] < 0.9 * losses[0]
        assert bool((output[:2] == 0).all()) == (products == "float8"), "a row has a scale of its own"
        for name in SETTINGS:
            for found, out in (found[products, name] for found in ranks):
                assert found == pytest.approx(losses, rel=2**-7), (products, name)  # the resolution of bfloat16
                assert torch.equal(out == 0, output == 0), (products, name)


GATHERS: dict[str, dict[str, Any]] = {
    "ZeRO 3": {"zero": 3},
    "in every micro-batch": {"zero": 3, "micro_batch": 2},
    "once": {"zero": 1, "micro_batch": 2},
    "recomputed": {"zero": 3, "recompute": "full", "bucket_bytes": 0},
}


def gathered(name: str) -> tuple[list[float], Tensor]:
    return trained("float8", mesh=sw.Mesh(dp=2), mode="data_parallel", **GATHERS[name])


def with_gathers_of_both_kinds() -> dict[str, Any]:
    found = {name: gathered(name) for name in GATHERS}
    with mock.patch.object(Float8Gathers, "_may_be_rounded", return_value=False):
        return {name: (found[name], gathered(name)) for name in GATHERS}


def test_gathers_in_float8_have_the_bits_of_weights_that_are_rounded_whole(run_ranks: RunRanks) -> None:
    for rank in run_ranks(with_gathers_of_both_kinds, 2):
        for name, ((losses, output), (expected, expected_output)) in rank.items():
            assert losses == expected, name
            assert torch.equal(output, expected_output), name
