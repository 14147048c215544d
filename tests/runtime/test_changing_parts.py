"""Ranks that pass parts of a batch, whose sizes change from call to call on some of them, on real gloo ranks."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from raising import message

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


def made(inputs: Any, number: int) -> Any:
    torch.manual_seed(0)
    net = Net().double()
    whole = torch.zeros(2 * number, 6, dtype=torch.float64), torch.zeros(2 * number, dtype=torch.int64)
    plan = sw.plan(net, whole, number, loss=nn.functional.cross_entropy, mode="data_parallel")
    return sw.parallelize(net, plan, loss=nn.functional.cross_entropy, inputs=inputs, seed=5)


def trained_from_parts() -> tuple[float, str, float]:
    """(largest difference from training on whole batches, what a call says in which one rank passes another dtype, the
    seconds of that)"""
    rank, number = dist.get_rank(), dist.get_world_size()
    own, whole = made("local", number), made("global", number)
    optimizers = [torch.optim.SGD(par.parameters(), lr=0.1) for par in (own, whole)]
    worst = 0.0
    with warnings.catch_warnings(action="ignore"):
        for step, sizes in enumerate(STEPS):
            x, y = parts_of(sizes[-number:], step)
            for optimizer in optimizers:
                optimizer.zero_grad()
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
    began = time.monotonic()
    said = message(lambda: own.step(x[rank].float() if rank == 1 else x[rank], y[rank]))
    return worst, said, time.monotonic() - began


def test_parts_that_change_on_some_ranks_train_as_the_whole_batch(run_ranks: RunRanks) -> None:
    for number in (2, 3):
        for worst, said, seconds in run_ranks(trained_from_parts, number):
            assert worst == 0.0  # the same programs, the same masks
            assert "args[0] is f64[2, 6] on rank 0 and f32[2, 6] on rank 1" in said
            assert seconds < 20
