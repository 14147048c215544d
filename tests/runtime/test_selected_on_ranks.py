"""Rows that a mask selects, on ranks that have different numbers of them."""

from __future__ import annotations

import copy

import torch

import shardwise as sw
from graph.test_selected import CASES, Model
from launch.gloo_ranks import RunRanks

NAMES = ("cross entropy", "quotient", "experts", "put back")
X = torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.randint(0, 6, (8, 5), generator=torch.Generator().manual_seed(1))
SOME = torch.arange(8)[:, None] + torch.arange(5) > 6  # the first samples have none


def on_rank() -> list[str]:
    wrong = []
    for name in NAMES:
        model = Model(CASES[name]).double()
        whole = copy.deepcopy(model)
        whole(X, SOME, Y).backward()
        plan = sw.plan(model, (X, SOME, Y), 2, mode="data_parallel")
        par = sw.parallelize(model, plan)
        loss = par(X, SOME, Y)
        loss.backward()
        gradients = {n: p.grad for n, p in par.named_parameters()}
        expected = {n: p.grad for n, p in whole.named_parameters()}
        for key, gradient in expected.items():
            own = gradients[key]
            if (own is None) != (gradient is None) or (
                own is not None and not torch.allclose(own, gradient, rtol=1e-10, atol=1e-12)
            ):
                wrong.append(f"{name}: {key}")
        if not torch.allclose(loss.detach(), whole(X, SOME, Y).detach(), rtol=1e-10):
            wrong.append(f"{name}: loss")
    return wrong


def test_selected_rows_on_ranks_are_those_of_one_device(run_ranks: RunRanks) -> None:
    assert run_ranks(on_rank, 2) == [[], []]
