"""The fixture ``run_ranks`` itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from launch.gloo_ranks import RankTraceback
from launch.shared_traces import SharedKnown, Shelf, shared_lowerings
from raising import raises
from shardwise.errors import LayoutError
from shardwise.graph.ir import Ref
from shardwise.launch.ranks import init_ranks, rank, world_size
from shardwise.programs import lower, vjp
from shardwise.programs.forms import Form
from shardwise.rules.lowerings.softmax import log_softmax, softmax

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


def test_what_one_rank_traced_the_others_read(tmp_path: Path) -> None:
    shapes = Form.contiguous((2, 3), torch.float64, True), Form.contiguous((3, 4), torch.float64, True)
    call: vjp.Call = torch.ops.aten.mm.default, (Ref("0"), Ref("1")), ()

    def found() -> tuple[vjp.ForwardTrace, vjp.BackwardTrace]:
        known = {f"_{kind.upper()}": SharedKnown(kind, Shelf(tmp_path)) for kind in ("forward", "backward")}
        with mock.patch.multiple(vjp, **known):
            vjp_cache = vjp.VjpCache()
            forward = vjp_cache.forward(call, shapes)
            return forward, vjp_cache.backward(call, shapes, forward.forms)

    traced = found()
    assert [str(kernel.target) for kernel in traced[1].kernels].count("aten.mm.default") == 2
    with mock.patch.object(vjp, "_TracedKernels", side_effect=AssertionError("traced again")):
        assert found() == traced
        shapes = shapes[0], shapes[1].with_gradient(False)
        with raises(AssertionError, "traced again"):
            found()


def softmax_of_a_test(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.softmax(dim)


def test_lowerings_of_the_package_are_shared_and_those_of_tests_are_not(tmp_path: Path) -> None:
    captured: list[Any] = []

    def capture(lowering: Any, args: Any, kwargs: Any) -> Any:
        captured.append(lowering)
        return lower._capture_lowering(lowering, args, kwargs)

    arguments = (lower.TensorArgument(0, (2, 3), torch.float64, True), lower.NumberArgument("1", 1)), ()
    ranks = [shared_lowerings(capture, Shelf(tmp_path)) for _ in range(2)]
    for lowering in (softmax, log_softmax, softmax_of_a_test):
        first, second = (rank(lowering, *arguments) for rank in ranks)
        assert first == second == lower._capture_lowering(lowering, *arguments)
    assert captured == [softmax, log_softmax, softmax_of_a_test, softmax_of_a_test]
