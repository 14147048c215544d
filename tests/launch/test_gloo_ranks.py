"""The fixture ``run_ranks`` itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from launch.gloo_ranks import RankTraceback
from raising import raises
from shardwise.errors import LayoutError
from shardwise.launch.ranks import init_ranks, rank, world_size

Run = Callable[..., list[Any]]


@dataclass(frozen=True)
class Answer:
    rank: int
    total: torch.Tensor


def add_up(start: float) -> Answer:
    total = torch.full((2,), start + rank())
    dist.all_reduce(total)
    return Answer(rank(), total)


def fail_on_last(message: str) -> None:
    if rank() == world_size() - 1:
        raise LayoutError(message)
    dist.all_reduce(torch.zeros(1))


def die_on_first() -> None:
    if rank() == 0:
        os._exit(3)
    dist.all_reduce(torch.zeros(1))


def connect_again() -> tuple[int, int]:
    init_ranks()
    init_ranks("gloo")
    return torch.get_num_threads(), world_size()


def never_return() -> None:
    dist.recv(torch.zeros(1), src=1 - rank())


def test_results_come_back_in_the_order_of_ranks(run_ranks: Run) -> None:
    answers = run_ranks(add_up, 3, 1.0)
    assert [answer.rank for answer in answers] == [0, 1, 2]
    assert all(isinstance(answer, Answer) and answer.total.tolist() == [6.0, 6.0] for answer in answers)


def test_an_exception_is_raised_again_with_the_traceback_of_its_rank(run_ranks: Run) -> None:
    with raises(LayoutError, "cannot shard", "dim 1") as caught:
        run_ranks(fail_on_last, 3, "cannot shard dim 1")
    assert isinstance(caught.value.__cause__, RankTraceback)
    assert "on rank 2" in str(caught.value.__cause__)
    assert "in fail_on_last" in str(caught.value.__cause__)


def test_a_rank_that_dies_is_named(run_ranks: Run) -> None:
    with raises(RuntimeError, "rank 0 died"):
        run_ranks(die_on_first, 2)


def test_ranks_that_wait_for_each_other_end_at_the_time_limit(run_ranks: Run) -> None:
    with raises(TimeoutError, "never_return", 2, "[0, 1]"):
        run_ranks(never_return, 2, time_limit_seconds=2.0)


def test_init_ranks_leaves_an_existing_group_alone(run_ranks: Run) -> None:
    assert run_ranks(connect_again, 2) == [(1, 2), (1, 2)]
