"""Cases of the specification about searches, propagation and fusion, in the dialect's words."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
import shardwise.mindspore as ms
from raising import raises
from shardwise.mindspore import planning
from shardwise.mindspore.options import Options
from shardwise.mindspore.parallel import _cost_model_context as cost_model
from shardwise.mindspore.strict import StrategyError
from spec.cases import CASES
from spec.words import classical, on, same_placement

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
    return planning.decided(cell, cell, inputs, {}, {}, Options().with_options(**settings))


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


class Applied(ms.nn.Cell):
    """An operator on parameters (and, from ``first_buffer`` on, on buffers), with more arguments after them."""

    def __init__(self, op: Any, shapes: tuple[Any, ...], rest: tuple[Any, ...] = (), first_buffer: int = 9) -> None:
        super().__init__()
        self.op, self.rest, self.count = op, rest, len(shapes)
        for i, shape in enumerate(shapes):
            values = torch.rand(shape).double() if i or not rest else torch.randint(0, 8, shape)
            if i >= first_buffer or rest:
                self.register_buffer(f"p{i}", values)
            else:
                self.register_parameter(f"p{i}", nn.Parameter(values))

    def construct(self, x: Tensor) -> Tensor:
        y = self.op(*(getattr(self, f"p{i}") for i in range(self.count)), *self.rest)
        y = y[0] if isinstance(y, tuple) else y
        return (y.sin() * y).sum() + x.square().mean()


SEMI_AUTO = {"parallel_mode": "semi_auto_parallel", "dataset_strategy": "full_batch"}


def placed(op: Any, shapes: tuple[Any, ...], devices: int, **settings: Any) -> tuple[sw.Plan, Applied]:
    cell = Applied(op, shapes, **settings)
    plan = planned(cell, (torch.rand(devices, 2).double(),), **SEMI_AUTO, device_num=devices)
    return plan, cell


# Shapes, transpositions, strategy, device matrix with the axis of copies last, and the tensor maps of both operands.
PRODUCTS = (
    ((16, 32), (32, 16), "", ((2, 4), (4, 1)), (2, 4, 1, 2), ((3, 2), (2, 1))),
    ((16, 32), (16, 32), "b", ((2, 1), (4, 1)), (2, 1, 4, 2), ((3, 2), (1, 2))),
    ((32, 16), (16, 32), "ab", ((1, 2), (4, 1)), (2, 1, 4, 2), ((2, 3), (1, 2))),
    ((2, 4, 8, 16), (2, 4, 16, 32), "", ((2, 4, 8, 2), (2, 4, 2, 1)), (2, 4, 8, 2, 1), ((4, 3, 2, 1), (4, 3, 1, 0))),
    ((2, 4, 8, 16), (2, 4, 32, 16), "b", ((2, 4, 2, 4), (2, 4, 1, 4)), (2, 4, 2, 4, 1, 2),
     ((5, 4, 3, 2), (5, 4, 1, 2))),
    ((8, 16), (2, 4, 32, 16), "b", ((2, 2), (2, 4, 2, 2)), (2, 4, 2, 2, 2), ((2, 1), (4, 3, 0, 1))),
)  # fmt: skip


@pytest.mark.parametrize("case", PRODUCTS, ids=str)
def test_products_are_placed_as_their_device_matrix_says(case: Any) -> None:
    """The device matrix is (batch dims, m, k, n, copies), row-major over the ranks: (2, 4, 8, 16, 1) in case mm-1."""
    a, b, transposed, strategy, matrix, maps = case
    op = ms.ops.MatMul("a" in transposed, "b" in transposed).shard(strategy)
    plan, _ = placed(op, (a, b), prod(matrix))
    for name, tensor_map, shape in zip(("p0", "p1"), maps, (a, b), strict=True):
        assert same_placement(plan.layouts[name], on(plan.mesh, classical(matrix, tensor_map, shape))), name


STATISTICS = ((64, 96, 4, 4), (96,), (96,), (96,), (96,))


@pytest.mark.parametrize("given", [((2, 4, 1, 1), (), (), (), ()), ((), (4,), (), (), ())], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_scales_and_statistics_of_batch_norm_have_the_counts_of_its_channels(given: Any, training: bool) -> None:
    """Left-out operands are completed: (4,) for each vector of channels, where they are computed, too."""
    plan, cell = placed(ms.ops.BatchNorm(training).shard(given), STATISTICS, 8, first_buffer=3)
    assert cell.op.completed(given, STATISTICS, ())[1:] == ((4,),) * 4
    assert plan.layouts["p1"] == plan.layouts["p2"]
    assert plan.layouts["p1"].local_shape(plan.mesh.coordinates(0)) == (24,)
    used = [entry for entry in plan.operators if entry.name in ("/batch_norm", "/mul_1")]
    assert used
    assert all(plan.mesh.size_of(axes) == 4 for entry in used for axes in split_over(entry.strategy, ("c", "d1"))), plan


def split_over(strategy: str, factors: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the axes of some factors of a printed strategy."""
    words = dict(word.split("@") for word in strategy.split() if word[0] not in "PRI")
    return [tuple(words[name].strip("()").split(",")) for name in factors if name in words]


def test_a_strategy_of_batch_norm_holds_beside_neighbours_of_another() -> None:
    """The operators inside follow the strategy, not the default split of the neighbours."""

    class Net(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = ms.nn.Conv2d(3, 96, 3), ms.nn.BatchNorm2d(96)
            self.norm.bn_train.shard(((2, 4, 1, 1), (), (), (), ()))

        def construct(self, x: Tensor) -> Tensor:
            return ms.ops.relu(self.norm(self.conv(x))).square().mean()

    for training in (False, True):
        net = Net().set_train(training).double()
        x = torch.rand(16, 3, 8, 8).double()
        plan = planned(net, (x,), **SEMI_AUTO, device_num=8)
        inside = {entry.name.rpartition("/")[2]: entry.strategy for entry in plan.operators if "norm/" in entry.name}
        wide = "mul_2" if training else "batch_norm"
        assert [plan.mesh.size_of(axes) for axes in split_over(inside[wide], ("c", "d1"))] == [4], inside
        assert sw.verify(net, (x,), plan, steps=1).ok


def test_one_hot_without_counts_splits_its_batch() -> None:
    op = ms.ops.OneHot().shard(((), (), ()))
    plan, _ = placed(op, ((64,),), 8, rest=(10, torch.tensor(1.0), torch.tensor(0.0)))
    entry = next(entry for entry in plan.operators if entry.name == "/eq")
    assert entry.strategy == "d0@data"


def messages(net: nn.Module, **costs: Any) -> int:
    """Return how many messages the gradients of a network of one dtype take."""
    ms.reset_auto_parallel_context()
    cost_model.set_cost_model_context(**{f"costmodel_allreduce_fusion_{name}": value for name, value in costs.items()})
    try:
        plan = planned(net, (torch.rand(16, 64), torch.rand(16, 64)), **SEMI_AUTO, device_num=8)
    finally:
        cost_model.reset_cost_model_context()
    reduced = [own for own in plan.conversions if own.backward and "weight" in own.value]
    assert len(reduced) == 8
    return len({own.bucket or own.value for own in reduced})


def test_the_cost_model_fuses_gradients_as_it_is_told() -> None:
    layers = [ms.nn.Dense(64, 64, has_bias=False) for _ in range(8)]  # 16 KiB each
    net = ms.nn.WithLossCell(ms.nn.SequentialCell(*layers), ms.nn.MSELoss())
    assert messages(net) == 1
    assert messages(net, algorithm=1, times=2, tail_percent=0.5) == 2
    assert messages(net, algorithm=1, times=5, tail_percent=0.2) == 8  # a message of a fifth has one of eighths
    assert messages(net, algorithm=1, times=0) == 8  # case fusion-2: nothing is fused
    assert messages(net, algorithm=2, tail_time=0.1, allreduce_inherent_time=0.05, allreduce_bandwidth=1e-6) == 3
    assert messages(net, algorithm=2, tail_time=0.1, allreduce_inherent_time=0.2) == 8


def test_the_cost_model_has_the_defaults_of_the_specification() -> None:
    """Case cost-defaults; what has no effect is accepted with a note."""
    names = {"alpha", "beta", "gamma", "communi_threshold", "communi_const", "communi_bias"}
    expected = CASES["cost-defaults"]["expected"]
    for name in names:
        assert cost_model.get_cost_model_context(f"costmodel_{name}") == expected[name]
    assert cost_model.get_cost_model_context("device_memory_capacity") == expected["device_memory_capacity"]
    cost_model.set_cost_model_context(costmodel_alpha=2.0)
    assert cost_model.get_cost_model_context("costmodel_alpha") == 2.0
    cost_model.reset_cost_model_context()
    assert cost_model.get_cost_model_context("costmodel_alpha") == 1.0
    with raises(ValueError, "costmodel_alpah", fix="costmodel_alpha"):
        cost_model.set_cost_model_context(costmodel_alpah=2.0)
