"""How strategies are given: tuples and lists, one argument or several, of the results too; and what is said where the
printed programs of the specification are wrong (rows G3 and G4 of docs/specification.md)."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
import shardwise.mindspore as ms
from mindspore.applied import Applied, equal_to_one_device, planned, planned_by_context
from raising import raises
from shardwise.mindspore.ops import operations as P
from shardwise.mindspore.strict import StrategyError

WANT = ((2, 4), (4, 1))


@pytest.mark.parametrize(
    "give",
    [
        lambda op: op.shard(((2, 4), (4, 1))),
        lambda op: op.shard([[2, 4], [4, 1]]),
        lambda op: op.shard(in_strategy=((2, 4), [4, 1])),
        lambda op: op.set_strategy(((2, 4), (4, 1))),
        lambda op: op.set_strategy(([2, 4], [4, 1])),
        lambda op: op.set_strategy([2, 4], [4, 1]),
        lambda op: op.set_strategy((2, 4), (4, 1)),
    ],
)
def test_a_strategy_may_be_tuples_or_lists_in_one_argument_or_several(give: Any) -> None:
    operator = P.MatMul()
    assert give(operator) is operator
    assert operator.in_strategy == WANT
    assert operator.attrs["in_strategy"] == WANT


def test_batch_dims_of_a_product_come_first_in_the_device_order() -> None:
    """Also where only the second operand has them (case mm-6)."""
    product = P.MatMul(transpose_b=True).shard(((2, 2), (2, 1, 1, 2)))
    cell = Applied(product, (torch.randn(8, 16).double(), torch.randn(2, 4, 8, 16).double()))
    strategy = equal_to_one_device(cell, (), 8).strategies["/matmul"]
    assert sorted(strategy.split()) == ["b0@data.0", "k@data.2", "m@data.1"]


def test_a_number_among_operands_may_have_an_empty_strategy() -> None:
    x = torch.randn(8, 4).double()
    for strategy, number in ((((4, 2), ()), 2.0), (((4, 2),), 2.0), (((4, 2), ()), ms.Tensor(2.0, ms.float64))):
        cell = Applied(P.Mul().shard(strategy), (x, number))
        assert sorted(equal_to_one_device(cell, (), 8).strategies["/mul"].split()) == [
            "d0@(data.0,data.1)",
            "d1@data.2",
        ]


def test_shapes_that_do_not_fit_are_named_with_the_cause_in_the_document() -> None:
    """Row G5: ``get_dataset`` of document 003, called in the order of its last lines."""
    with raises(ValueError, "[2, 4] times [32, 16]: 4 columns, 32 rows", op="MatMul", fix="order of its arguments"):
        P.MatMul()(torch.ones(2, 4), torch.ones(32, 16))
    with raises(ValueError, "there is no in_strategy", fix="give both"):
        P.ReLU().shard(None, ((2, 1),))


def test_one_operand_in_both_ways() -> None:
    assert P.ReLU().set_strategy([8, 1]).in_strategy == ((8, 1),)  # one argument per operand
    assert P.ReLU().set_strategy([[8, 1]]).in_strategy == ((8, 1),)  # all of them in one
    assert P.ReLU().shard(((8, 1),)).in_strategy == ((8, 1),)
    assert P.MatMul().shard(None).in_strategy is None


WRONG: list[tuple[Any, type[Exception], object, object]] = [
    (lambda: P.MatMul.shard(((4, 1), (1, 1))), TypeError, "on the operator's class", "MatMul().shard(((4, 1)"),
    (lambda: P.MatMul.set_strategy(([4, 1], [1, 1])), TypeError, "on the operator's class", "MatMul().set_strategy"),
    (lambda: P.MatMul().shard((4, 1), (1, 1)), ValueError, ("one tuple of numbers", "strategy of the outputs"),
     "MatMul().shard(((4, 1), (1, 1)))"),
    (lambda: P.ReLU().shard((8, 1)), ValueError, "must hold one tuple per input", "((8, 1),)"),
    (lambda: P.MatMul().shard({(4, 1), (1, 1)}), TypeError, "is a set, which has no order", "a tuple or a list"),
    (lambda: P.MatMul().set_strategy({"x": (4, 1)}), TypeError, "is a dict", "a tuple or a list"),
    (lambda: P.MatMul().shard("dp"), TypeError, "in_strategy is 'dp'", "one tuple per input"),
    (lambda: P.MatMul().shard(((4, 1), 1)), TypeError, "1 for tensor 1", "one number per dim"),
    (lambda: P.MatMul().shard(((4, 1), (1, 1.5))), TypeError, "1.5 for tensor 1", "whole numbers"),
    (lambda: P.MatMul().shard(((4, True), (1, 1))), TypeError, "True for tensor 0", "whole numbers"),
    (lambda: P.MatMul().shard(WANT, (2, 1)), ValueError, "out_strategy", "one tuple around"),
]  # fmt: skip


@pytest.mark.parametrize(("give", "error", "what", "fix"), WRONG)
def test_another_nesting_is_refused_with_what_was_meant(
    give: Any, error: type[Exception], what: object, fix: object
) -> None:
    with raises(error, what, fix=fix):
        give()


def test_a_set_of_lists_as_printed_can_not_even_be_made() -> None:
    with raises(TypeError, "unhashable type: 'list'"):
        eval("P.MatMul().set_strategy({[4, 1], [1, 1]})", {"P": P})


class Net(ms.nn.Cell):
    def __init__(self, first: Any, second: Any = None, activation: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.v = ms.Parameter(torch.randn(16, 32).double()), ms.Parameter(torch.randn(32, 8).double())
        self.matmul, self.relu, self.matmul2 = P.MatMul(), P.ReLU(), P.MatMul()
        for operator, strategy in ((self.matmul, first), (self.relu, activation), (self.matmul2, second)):
            if strategy is not None:
                operator.shard(*strategy)

    def construct(self, x: Tensor) -> Tensor:
        return self.matmul2(self.relu(self.matmul(x, self.w)), self.v).square().mean()


def summing(plan: sw.Plan) -> list[str]:
    return [entry.kind for entry in plan.collectives() if entry.kind in ("all_reduce", "reduce_scatter")]


def test_an_out_strategy_selects_between_all_reduce_and_reduce_scatter() -> None:
    x = torch.randn(16, 16, dtype=torch.float64)
    told = {}
    for name, out in (("none", None), ("all_reduce", ((2, 1),)), ("reduce_scatter", ((8, 1),))):
        plan = equal_to_one_device(Net((((2, 4), (4, 1)), out)), (x,), 8)
        told[name] = summing(plan)
    assert told["none"][0] == told["all_reduce"][0] == "all_reduce"
    assert told["reduce_scatter"][0] == "reduce_scatter"


def test_the_table_of_a_gather_is_summed_as_its_out_strategy_says() -> None:
    class Lookup(ms.nn.Cell):
        def __init__(self, out: Any) -> None:
            super().__init__()
            self.table = ms.Parameter(torch.randn(64, 64).double())
            self.gather = P.Gather().shard(((8, 1), (1, 1)), out)

        def construct(self, ids: Tensor) -> Tensor:
            return self.gather(self.table, ids, 0).sin().sum()

    ids = torch.randint(64, (64, 64))
    for out, kind in ((None, "reduce_scatter"), (((8, 1, 1),), "reduce_scatter"), (((1, 1, 1),), "all_reduce")):
        plan = equal_to_one_device(Lookup(out), (ids,), 8)
        assert summing(plan)[0] == kind
        assert plan.layouts["table"].local_shape(plan.mesh.coordinates(0)) == (8, 64)


def test_operators_without_a_strategy_split_the_batch() -> None:
    """A19: data parallelism is the default of semi-auto mode."""
    plan = equal_to_one_device(Net(None), (torch.randn(16, 16, dtype=torch.float64),), 8)
    for entry in plan.operators:
        if entry.name in ("/matmul", "/relu", "/matmul_1"):
            assert entry.strategy in ("m@data", "d0@data")


def test_the_inner_operator_of_a_layer_takes_a_strategy() -> None:
    dense = ms.nn.Dense(16, 8, activation="relu", dtype=torch.float64)
    dense.matmul.shard(((2, 2), (2, 2)))
    dense.bias_add.shard(((2, 2), (2,)))
    dense.activation.relu.shard(((2, 2),))

    class Loss(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dense = dense

        def construct(self, x: Tensor) -> Tensor:
            return self.dense(x).square().mean()

    plan = equal_to_one_device(Loss(), (torch.randn(4, 16, dtype=torch.float64),), 8)
    assert plan.layouts["dense.weight"].local_shape(plan.mesh.coordinates(0)) == (4, 8)
    assert plan.layouts["dense.bias"].local_shape(plan.mesh.coordinates(0)) == (4,)
    assert summing(plan)[0] == "all_reduce"


class Layers(ms.nn.Cell):
    """Layers whose inner operators have strategies, under the reference's names."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        nn, f64 = ms.nn, {"dtype": torch.float64}
        self.norm, self.relu, self.pool = nn.BatchNorm2d(4, **f64), nn.ReLU(), nn.MaxPool2d(2, 2)
        self.mean, self.flatten = nn.AvgPool2d(2, 2, "pad", 0), nn.Flatten()
        self.prelu, self.drop, self.gelu = nn.PReLU(16), nn.Dropout(p=0.0), nn.GELU()
        self.prelu.w = ms.Parameter(torch.rand(16, **f64), "w")
        self.loss = nn.SoftmaxCrossEntropyWithLogits(sparse, "mean")
        for operator, *strategy in (
            (self.norm.bn_train, (2, 2, 1, 1), (2,), (2,), (2,), (2,)), (self.relu.relu, (2, 2, 1, 1)),
            (self.pool.max_pool, (2, 1, 2, 1)), (self.mean.avg_pool, (4, 1, 1, 1)), (self.drop.dropout, (4, 1)),
            (self.prelu.prelu, (2, 2), (2,)), (self.gelu.gelu, (2, 2)), (self.loss.one_hot, (2, 1), (), ()),
            (self.loss.softmax_cross_entropy, (4, 1), (4, 1)),
        ):  # fmt: skip
            operator.shard(tuple(strategy))

    def construct(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.mean(self.pool(self.relu(self.norm(x))))
        return self.loss(self.gelu(self.prelu(self.drop(self.flatten(x)))), labels)


@pytest.mark.parametrize("sparse", [True, False])
def test_the_inner_operators_of_layers_and_losses_take_strategies(sparse: bool) -> None:
    x, labels = torch.randn(4, 4, 8, 8, dtype=torch.float64), torch.tensor([3, 0, 15, 7], dtype=torch.int32)
    given = labels if sparse else torch.eye(16, dtype=torch.float64)[labels]
    net = Layers(sparse).set_train()
    plan = equal_to_one_device(net, (x, given), 4)
    assert plan.layouts["norm.gamma"].local_shape(plan.mesh.coordinates(0)) == (2,)
    assert plan.layouts["prelu.w"].local_shape(plan.mesh.coordinates(0)) == (8,)
    ms.reset_auto_parallel_context()
    alone = ms.nn.SoftmaxCrossEntropyWithLogits(sparse, "mean")  # without strategies, in another way
    features = net.flatten(net.mean(net.pool(net.relu(net.norm(x)))))
    torch.testing.assert_close(net(x, given), alone(net.gelu(net.prelu(features)), given))


def test_several_operators_of_one_primitive_follow_its_operand() -> None:
    """A primitive that torch computes by several operators is split as a whole, with nothing in between."""
    logits = torch.randn(8, 16, dtype=torch.float64)

    class Normed(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.w = ms.Parameter(torch.randn(8, 16).double())
            self.norm = P.L2Normalize(1).shard(((4, 1),))

        def construct(self, x: Tensor) -> Tensor:
            return (self.norm(x * self.w) * self.w).sum()

    plan = planned(Normed(), (logits,), 4)
    strategies = {entry.name: entry.strategy for entry in plan.operators}
    inside = ("/square", "/sum", "/clamp", "/rsqrt", "/mul_1")
    assert [strategies[name] for name in inside] == ["d0@data"] * 5


def test_an_instance_says_what_it_is() -> None:
    assert repr(P.MatMul().shard(WANT)) == "MatMul<((2, 4), (4, 1))>"
    assert repr(P.ReLU()) == "ReLU"
    net = Net((WANT,))
    assert net.matmul2.instance_name == "matmul2"
    assert P.ReLU().add_prim_attr("x", 1).del_prim_attr("x").attrs == {}


@pytest.mark.parametrize("matrix", [(2, 2), (2, 2, 2)], ids=str)
def test_products_in_two_and_three_dims_keep_their_operands_in_all_of_them(matrix: tuple[int, ...]) -> None:
    """With "enable_nd_tp" the dim that is summed over is split differently in both operands, as they are kept."""
    layout = ms.Layout(matrix, ("x", "y", "z")[: len(matrix)])

    class Net(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.weight = ms.Parameter(torch.rand(16, 8).double(), "weight")
            self.matmul = ms.ops.MatMul().add_prim_attr("enable_nd_tp", True)
            if len(matrix) == 2:
                self.matmul.shard((layout("x", "y"), layout("x", "y")), (layout("x", "y"),))
            else:
                in_strategy = (layout(("z", "y"), "x"), layout(("x", "z"), "y"))
                self.matmul.shard(in_strategy, (layout(("z", "x"), "y"),))

        def construct(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.matmul(x, self.weight).square().mean()
            return result

    devices = prod(matrix)
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=devices, dataset_strategy="full_batch")
    x, net = torch.rand(16, 16).double(), Net()
    plan = planned_by_context(net, (x,))
    assert plan.layouts["weight"].local_shape(plan.mesh.coordinates(0)) == (16 * 8 // devices // 4, 4)
    assert sw.verify(net, (x,), plan, steps=1).ok
    net.matmul.add_prim_attr("enable_nd_tp", False)
    with raises(StrategyError, "MatMul matmul: ", op="MatMul matmul"):
        planned_by_context(net, (x,))
