"""Ranks that pass parts of a batch begin before they know that the others' parts are the same as in the last call: on
real gloo ranks, whatever changes on some of them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.errors import ShardwiseError
from shardwise.runtime.communicator import GatheredRows

STEPS = [(2, 2, 2), (2, 2, 2), (2, 2, 2), (2, 2, 1), (2, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2), (2, 2, 2), (2, 2, 3)]


class Net(nn.Module):
    """The seed of its masks, its statistics and what its Python sees are as after as many calls as were made."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.dropout(self.norm(self.up(x).tanh()), 0.25, self.training))


def parts_of(sizes: tuple[int, ...], number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(sum(sizes), 6, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 3, (sum(sizes),), generator=generator)
    return list(x.split(list(sizes))), list(y.split(list(sizes)))


class Products(TorchDispatchMode):
    """Counts products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def made(inputs: Any, number: int) -> Any:
    torch.manual_seed(0)
    net = Net().double()
    whole = torch.zeros(2 * number, 6, dtype=torch.float64), torch.zeros(2 * number, dtype=torch.int64)
    plan = sw.plan(net, whole, number, loss=nn.functional.cross_entropy, mode="data_parallel")
    return sw.parallelize(net, plan, loss=nn.functional.cross_entropy, inputs=inputs, seed=5)


def trained_from_parts() -> tuple[float, list[int], list[str], float]:
    """(largest difference from training on whole batches, products of every call before the integers were read, what a
    call says in which one rank passes another dtype, the seconds of that)"""
    rank, number = dist.get_rank(), dist.get_world_size()
    own, whole = made("local", number), made("global", number)
    optimizers = [torch.optim.SGD(par.parameters(), lr=0.1) for par in (own, whole)]
    seen: list[int] = []
    products = Products()
    waited = GatheredRows.wait

    def wait(rows: GatheredRows) -> torch.Tensor:
        if rows.what == "the sizes of the ranks' inputs" and own.training:
            seen.append(products.count)
        return waited(rows)

    worst = 0.0
    with warnings.catch_warnings(), mock.patch.object(GatheredRows, "wait", wait):
        warnings.simplefilter("ignore")
        for step, sizes in enumerate(STEPS):
            x, y = parts_of(sizes[-number:], step)
            for optimizer in optimizers:
                optimizer.zero_grad()
            products.count = 0
            with products:
                loss = own.step(x[rank], y[rank])
            worst = max(worst, float((loss - whole.step(torch.cat(x), torch.cat(y))).abs()))
            if step % 3 == 2:  # another kind of call between them
                own.eval(), whole.eval()
                worst = max(worst, float((own.predict(x[rank]) - whole.predict(torch.cat(x))).abs().max()))
                own.train(), whole.train()
            for optimizer in optimizers:
                optimizer.step()
    for (name, a), (_, b) in zip(own.state_dict().items(), whole.state_dict().items(), strict=True):
        assert a.dtype.is_floating_point or torch.equal(a, b), name  # the seed, the batches counted
        worst = max(worst, float((a - b).abs().max()))
    x, y = parts_of(STEPS[0][-number:], 0)
    for _ in range(3):
        own.step(x[rank], y[rank])
    began, said = time.monotonic(), "nothing"
    try:
        own.step(x[rank].float() if rank == 1 else x[rank], y[rank])
    except ShardwiseError as error:
        said = str(error)
    return worst, seen, said, time.monotonic() - began


def test_ranks_begin_before_they_know_of_the_others_parts(run_ranks: Callable[..., Any]) -> None:
    two, three = run_ranks(trained_from_parts, 2), run_ranks(trained_from_parts, 3)
    for worst, _, said, seconds in (*two, *three):
        assert worst == 0.0  # the same programs, the same masks
        assert "args[0] is f64[2, 6] on rank 0 and f32[2, 6] on rank 1" in said
        assert seconds < 20
    # The first call, and the first after a change, are waited for; a change is noticed at the first collective, which
    # comes after the first product.
    assert two[0][1] == [0, 0, 1, 1, 0, 0, 1, 1, 1, 1]
    assert two[1][1] == [0, 0, 1, 0, 1, 1, 1, 1, 1, 0]  # this rank's own part changes
    assert three[0][1] == [0, 0, 1, 1, 0, 0, 0, 1, 1, 1]
    assert three[2][1] == [0, 0, 1, 0, 1, 1, 0, 0, 1, 0]
