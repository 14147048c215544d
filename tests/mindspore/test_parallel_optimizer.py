"""The parallel optimizer: optimizer states in parts, in every mode, with the updates of one process (rows A46, C6)."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

import shardwise as sw
import shardwise.mindspore as ms
from mindspore.applied import planned_by_context
from raising import raises
from shardwise.mindspore.holding import holding_of

RunRanks = Callable[..., list[Any]]
STEPS, ROWS = 3, 8


class Net(ms.nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        numbers = np.random.RandomState(0)
        self.w = ms.Parameter(ms.Tensor(numbers.normal(0, 0.3, (12, 16))), "w")
        self.w2 = ms.Parameter(ms.Tensor(numbers.normal(0, 0.3, (16, 4))), "w2")
        self.b = ms.Parameter(ms.Tensor(numbers.normal(0, 0.3, (4,))), "b")
        self.matmul, self.matmul2 = ms.ops.MatMul(), ms.ops.MatMul()

    def construct(self, x: Tensor) -> Tensor:
        return self.matmul2(self.matmul(x, self.w).tanh(), self.w2) + self.b


def data() -> list[tuple[Tensor, Tensor]]:
    numbers = np.random.RandomState(1)
    return [tuple(torch.from_numpy(numbers.rand(ROWS, size)) for size in (12, 4)) for _ in range(STEPS)]


# name -> context, optimizer
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "semi, level1": ({"parallel_mode": "semi_auto_parallel"}, "Adam"),
    "semi, level3": (
        {"parallel_mode": "semi_auto_parallel", "parallel_optimizer_config": {"optimizer_level": "level3"}}, "Lamb",
    ),
    "semi, mean": ({"parallel_mode": "semi_auto_parallel", "gradients_mean": True}, "Momentum"),
    "auto": (
        {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation", "strict": False}, "AdamWeightDecay",
    ),
    "data": ({"parallel_mode": "data_parallel", "gradients_mean": True}, "Adam"),
}  # fmt: skip


def trained(case: str, *, alone: bool, rate: float = 0.1) -> tuple[list[np.ndarray[Any, Any]], list[int], list[int]]:
    """Parameters after some steps, whole; how many elements this rank holds of each, and of the first state."""
    options, optimizer_name = CASES[case]
    ms.reset_auto_parallel_context()
    if not alone:
        config = {"parallel_optimizer_threshold": 0, **options.get("parallel_optimizer_config", {})}
        ms.set_auto_parallel_context(**{**options, "parallel_optimizer_config": config}, enable_parallel_optimizer=True)
        ms.communication.init()
    net = Net()
    settings = {"momentum": 0.9} if optimizer_name == "Momentum" else {}
    optimizer = getattr(ms.nn, optimizer_name)(net.trainable_params(), learning_rate=rate, **settings)
    step = ms.nn.TrainOneStepCell(ms.nn.WithLossCell(net, ms.nn.MSELoss()), optimizer).set_train()
    rank, ranks = (0, 1) if alone else (ms.communication.get_rank(), ms.communication.get_group_size())
    for x, y in data():
        rows = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
        step(x[rows], y[rows])
    whole = []
    for p in net.trainable_params():
        holding = holding_of(p)
        if holding is None or not holding.layout.positions:
            whole.append(p.detach().numpy().copy())
            continue
        parts: list[Any] = [None] * ranks
        torch.distributed.all_gather_object(parts, p.detach())
        whole.append(torch.cat(parts).reshape(holding.shape).numpy())
    states = {parameter: state.numel() for state, parameter in optimizer.states().values() if parameter is not None}
    return whole, [p.numel() for p in net.trainable_params()], [states.get(p, 0) for p in net.trainable_params()]


def _on_rank() -> dict[str, Any]:
    return {case: trained(case, alone=False) for case in CASES}


def test_parts_of_the_optimizer_give_the_updates_of_one_process(run_ranks: RunRanks) -> None:
    first, second = run_ranks(_on_rank, 2)
    for case in CASES:
        # There gradients_mean divides what is exact already, by the two ranks, as in the reference.
        want, sizes, _ = trained(case, alone=True, rate=0.05 if case == "semi, mean" else 0.1)
        for own, other in zip(first[case][0], want, strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-9, atol=1e-12, err_msg=case)
        held = [own[case][1] for own in (first, second)]
        states = [own[case][2] for own in (first, second)]
        if case == "data":  # whole parameters, every state on one rank only
            assert held == [sizes, sizes]
            assert [sorted(pair) for pair in zip(*states, strict=True)] == [[0, size] for size in sizes]
            assert all(sum(own) for own in states)
        else:
            assert [sum(pair) for pair in zip(*held, strict=True)] == sizes, case
            assert states == held


def plan_of(devices: int, **config: Any) -> sw.Plan:
    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel", device_num=devices, enable_parallel_optimizer=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": 0, **config},
    )  # fmt: skip
    net = ms.nn.WithLossCell(Net(), ms.nn.MSELoss())
    x, y = data()[0]
    return planned_by_context(net, (x, y))


def parts(plan: sw.Plan) -> dict[str, int]:
    """Into how many parts the storage of each parameter is split."""
    return {
        entry.name.rpartition(".")[2]: prod(plan.mesh.sizes[axis] for axis in plan.layouts[entry.name].positions)
        for entry in plan.parameters
    }


def test_the_threshold_and_the_size_of_groups_say_what_is_split() -> None:
    assert parts(plan_of(4)) == {"w": 4, "w2": 4, "b": 4}
    assert parts(plan_of(4, parallel_optimizer_threshold=1)) == {"w": 4, "w2": 1, "b": 1}  # 1 KB is 128 elements
    assert parts(plan_of(4, optimizer_weight_shard_size=2)) == {"w": 2, "w2": 2, "b": 2}
    with raises(ValueError, "at most 4 copies", "optimizer_weight_shard_size", 3):
        plan_of(4, optimizer_weight_shard_size=3)
    assert any(entry.again for entry in plan_of(4, optimizer_level="level3").parameters)
    assert not any(entry.again for entry in plan_of(4, optimizer_level="level2").parameters)


class TwoProducts(ms.nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weight1 = ms.Parameter(ms.Tensor(np.ones((64, 32), np.float32)), "weight1")
        self.weight2 = ms.Parameter(ms.Tensor(np.ones((32, 64), np.float32)), "weight2")
        self.first, self.second = (
            ms.ops.MatMul().shard(((4, 8), (8, 1))), ms.ops.MatMul().shard(((4, 4), (4, 2)))
        )  # fmt: skip

    def construct(self, x: Tensor) -> Tensor:
        return self.second(self.first(x, self.weight1), self.weight2).sum()


def test_the_groups_of_case_opt_1() -> None:
    """The case "opt-1": weight1 is split 8 ways and weight2 8 ways over 32 devices: each has four copies. There weight1
    stays whole by the threshold of 1 KB, which counts its part; here the whole counts, so both are split over their
    copies."""
    ms.set_auto_parallel_context(
        parallel_mode="semi_auto_parallel", device_num=32, enable_parallel_optimizer=True,
        parallel_optimizer_config={"parallel_optimizer_threshold": 1},
    )  # fmt: skip
    plan = planned_by_context(TwoProducts(), (torch.ones(64, 64),))
    assert parts(plan) == {"weight1": 32, "weight2": 32}


def test_modes_without_a_parallel_optimizer_refuse_it() -> None:
    for mode in ("stand_alone", "hybrid_parallel"):
        ms.set_auto_parallel_context(parallel_mode=mode, enable_parallel_optimizer=True)
        with raises(RuntimeError, f"not supported in {mode} mode"):
            ms.nn.Momentum(Net().trainable_params(), 0.1, 0.9)


def test_sizes_of_fused_messages_are_the_smallest_that_is_said() -> None:
    ms.set_auto_parallel_context(
        comm_fusion={"allreduce": {"mode": "size", "config": 32}, "allgather": {"mode": "size", "config": 8}}
    )
    assert ms.context.options().bucket_bytes == 8 * 2**20
