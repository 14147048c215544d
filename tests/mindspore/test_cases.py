"""Cases of the specification about searches, propagation and fusion, in the dialect's words."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
import shardwise.mindspore as ms
from raising import raises
from shardwise.mindspore import planning
from shardwise.mindspore.options import Options
from shardwise.mindspore.strict import StrategyError
from spec.cases import CASES

SHAPES = re.compile(r"\[([\d, ]+)\]")


def of_kind(kind: str) -> Any:
    chosen = [case for case in CASES.values() if case["kind"] == kind]
    return pytest.mark.parametrize("case", chosen, ids=[case["id"] for case in chosen])


class ProductAndQuotient(ms.nn.Cell):
    """MatMul(x, y) -> FloorDiv(., b), with y and b as parameters."""

    def __init__(self, y: tuple[int, ...], b: tuple[int, ...]) -> None:
        super().__init__()
        self.matmul, self.y = ms.ops.MatMul(), nn.Parameter(torch.randn(y))
        self.register_buffer("b", torch.rand(b) + 1)

    def construct(self, x: Tensor) -> Tensor:
        product = self.matmul(x, self.y)
        return torch.floor_divide(product, self.b) + product


@of_kind("search_result")
def test_a_search_puts_no_communication_between_two_operators(case: dict[str, Any]) -> None:
    """The optimum itself depends on the constants of prices; that nothing is sent between the two does not."""
    x, y, b = (tuple(map(int, own.split(","))) for own in SHAPES.findall(case["graph"]))
    model = ProductAndQuotient(y, b)
    plan = sw.plan(model, torch.randn(x), case["device_num"], search="dynamic_programming")
    assert sw.verify(model, torch.randn(x), plan, steps=1).ok
    between = [own for own in plan.conversions if "matmul" in own.value and "floor_div" in own.op]
    assert not [own for own in between if own.forward or own.backward], plan


def planned(cell: nn.Module, inputs: tuple[Tensor, ...], **settings: Any) -> sw.Plan:
    """The plan for a cell that is given whole batches."""
    ms.set_auto_parallel_context(**settings)
    return planning.plan_by_context(cell, cell, inputs, {}, {}, Options().with_options(**settings))


def test_propagation_needs_a_configured_operator_in_strict_mode() -> None:
    """Case prop-none."""
    cell, x = ProductAndQuotient((32, 16), (16,)), torch.randn(64, 32)
    settings = {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation", "device_num": 8}
    with raises(StrategyError, "There is no operator that is configured sharding strategy", op="ProductAndQuotient"):
        planned(cell, (x,), **settings)
    plan = planned(cell, (x,), **settings, strict=False)
    assert plan.strategies["/matmul"] == "m@data"


@of_kind("allreduce_fusion")
def test_fusion_joins_messages_only_where_something_is_reduced(case: dict[str, Any]) -> None:
    """``times`` gradients of no parameter that is repeated: nothing is fused, because nothing is reduced."""

    class Net(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(16, 16) for _ in range(4))
            self.products = [ms.ops.MatMul().shard(((1, 1), (1, 8))) for _ in self.weights]

        def construct(self, x: Tensor) -> Tensor:
            for product, weight in zip(self.products, self.weights, strict=True):
                x = product(x, weight)
            return x.square().mean()

    assert (case["times"], case["expected"]) == (0, {})
    fused = {"comm_fusion": {"allreduce": {"mode": "auto"}}}
    settings = {"parallel_mode": "semi_auto_parallel", "device_num": 8, "dataset_strategy": "full_batch"}
    plan = planned(Net(), (torch.randn(8, 16),), **settings, **fused)
    assert not [own for own in plan.conversions if own.bucket]
    batch = {**settings, "parallel_mode": "auto_parallel", "search_mode": "sharding_propagation", "strict": False}

    def buckets(**fusion: Any) -> int:
        ms.reset_auto_parallel_context()
        net = Net()
        net.products = [ms.ops.MatMul() for _ in net.weights]
        return len({own.bucket for own in planned(net, (torch.randn(8, 16),), **batch, **fusion).conversions} - {0})

    assert buckets(**fused) == 1
    assert buckets(comm_fusion={"openstate": False}) == 0
