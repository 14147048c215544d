"""Every check of strategies in strict mode: the operator, the numbers and the mend are in the message; and what
``strict=False`` accepts instead."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
import shardwise.mindspore as ms
from mindspore.applied import Applied, equal_to_one_device, planned
from raising import raises
from shardwise.mindspore.ops import operations as P
from shardwise.mindspore.strict import StrategyError
from spec.cases import CASES


def x(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def manual(lengths: Any) -> P.Gather:
    return P.Gather().add_prim_attr("manual_split", lengths)


# (operator, args, devices, strategy, data of the message, of the mend)
REFUSED: list[tuple[P.Primitive, tuple[Any, ...], int, Any, object, object]] = [
    # what all operators share, in this order
    (P.MatMul(), (x(8, 8), x(8, 8)), 8, ((2, 4),), (1, 2, "size"), "tuple"),
    (P.Add(), (x(8, 8), x(8, 8)), 8, ((3, 1, 0), (1, 1)), (3, 2, 0, "len"), "[8, 8]"),
    (P.Add(), (x(8, 8), x(8, 8)), 8, ((1, 1), (3,)), (1, 2, "len"), "[8, 8]"),
    (P.ReLU(), (x(8, 8),), 8, ((0, 3),), (0, "ReLU"), ("ReLU", 0)),
    (P.ReLU(), (x(9, 8),), 8, ((3, 1),), (2, 3, "power"), "strict=False"),
    (P.ReLU(), (x(9, 8),), 8, ((2, 1),), (9, "9 % 2 = 1"), "strict=False"),
    (P.ReLU(), (x(64, 64),), 8, ((4, 4),), (16, 8), "8"),
    (P.MatMul(), (x(8, 8), x(8, 8)), 8, ((2, 4), (4, 2)), ("(4, 2)", 16), "divides 8"),
    (P.ReLU(), (x(64, 64),), 6, ((4, 1),), "((4, 1),)", "divides 6"),
    # operators
    (P.MatMul(), (x(8, 8), x(8, 8)), 8, ((2, 4), (2, 1)),
     ("transpose_b", 4, 2),
     "transpose_b"),
    (P.MatMul(transpose_b=True), (x(8, 8), x(8, 8)), 8, ((2, 4), (4, 1)), ("transpose_b", "true"),
     "transpose_b"),
    (P.BatchMatMul(), (x(4, 8, 8), x(4, 8, 8)), 8, ((2, 1, 1), (4, 1, 1)), "Strategies", "same"),
    (P.MatMul().shard(((1, 1), (1, 1)), ((1, 2),)), (x(8, 8), x(8, 8)), 8, ((2, 2), (2, 2)),
     ("((1, 2),)", "((2, 2), (2, 2))", "((2, 2),) (AllReduce)", "((4, 2),) (ReduceScatter)"),
     "((1, 2),)"),
    (P.Add(), (x(8, 8), x(8)), 8, ((2, 4), (2,)),
     (1, "0 [8, 8]", 4, 0, "1 [8]", 2, "Strategies"), "(4,)"),
    (P.BiasAdd(), (x(8, 8), x(8)), 8, ((2, 4), (2,)), "Strategies", "(4,)"),
    (P.Softmax(), (x(8, 8),), 8, ((2, 4),), "normalised", "1 for"),
    (P.Softmax((0, 1)), (x(8, 8),), 8, ((2, 1),), "splits", "strict=False"),
    (P.Softmax(2), (x(8, 8),), 8, ((2, 1),), "range", (-2, 1)),
    (P.LogSoftmax(0), (x(8, 8),), 8, ((2, 1),), ("dim", 0, "splits"), ("dim", 1)),
    (P.L2Normalize(-1), (x(8, 8),), 8, ((1, 8),), ("dim", 1, "splits"), ("dim", 1)),
    (P.CumSum(), (x(8, 8), 0), 8, ((8, 1),), ("dim", 0, "accumulates"), ("dim", 1)),
    (P.LayerNorm(1, 1), (x(8, 8), x(8), x(8)), 8, ((2, 2), (2,), (2,)), "splits", "strict=False"),
    (P.LayerNorm(2, 1), (x(8, 4, 8), x(4, 8), x(4, 8)), 8, ((2, 2, 1), (1, 1), (2, 1)),
     (1, "0 [8, 4, 8]", 2, 0, "1 [4, 8]"), "((2, 2, 1), (2, 1), (2, 1))"),
    (P.ReduceSum(), (x(16, 32, 64), -1), 32, ((2, 2, 8, 16),), (4, 3, "len"), "[16, 32, 64]"),
    (P.Reshape(), (x(8, 8), (64,)), 8, ((8, 1),), "Reshape", "behind"),
    (P.Gather(), (x(16, 4), ids(8, 8), 0), 8, ((2, 1), (1, 4)), ("(axis)0", "can't"),
     "((2, 1), (1, 1))"),
    (P.Gather(), (x(16, 8), ids(8), 1), 8, ((1, 4), (2,)), ("(axis)1", "can't"),
     "(1,)"),
    (P.Gather(), (x(16, 4, 4), ids(8), 0), 8, ((8, 1, 1), (1,)), (3, 2, "dims"), "strict=False"),
    (P.Gather(), (x(4, 8), ids(8), 1), 8, ((2, 4), (1,)), (4, "2 * 4"), "divides 4"),
    (P.Gather(), (x(16, 8), ids(8), 1), 8, ((1, 4), (1,)), "calculation", "product"),
    (P.Gather(1), (x(8, 8), ids(8, 2), 1), 8, ((2, 2), (2, 1)), "batched", "1 for"),
    (P.Gather(1), (x(8, 8), ids(8, 2), 1), 8, ((2, 1), (4, 1)), "((2, 1), (4, 1))", "((2, 1), (4, 1))"),
    (P.Gather(), (x(16, 4), ids(8), 5), 8, ((8, 1), (1,)), 5, (-2, 1)),
    (manual((4, 4)), (x(8, 8), ids(8), 1), 2, ((2, 1), (2,)), (0, 1, "axis"), "look"),
    (manual((4.0, 4)), (x(8, 8), ids(8, 8), 0), 2, ((2, 1), (1, 2)), "positive", "(10, 20, 30, 4)"),
    (manual((8, 0)), (x(8, 8), ids(8, 8), 0), 2, ((2, 1), (1, 2)), "positive", "(10, 20, 30, 4)"),
    (manual((4, 4)), (x(8, 8), ids(8, 8), 0), 8, ((4, 1), (8, 1)), "last",
     "(1, 4)"),
    (manual((4, 4)), (x(8, 8), ids(8, 8), 0), 8, ((4, 1), (1, 8)),
     ("param_strategy[0] 4", "indices_strategy[-1] 8"), "(1, 4)"),
    (manual((4, 4)), (x(8, 8), ids(8, 8), 0), 4, ((4, 1), (1, 4)), (2, "param_strategy[0]", 4),
     "number"),
    (manual((4, 3)), (x(8, 8), ids(8, 8), 0), 2, ((2, 1), (1, 2)),
     (7, "param_shape[0] 8"), "(4, 3)"),
    (manual((4, 4)), (x(8, 8), ids(8, 8), 0), 8, ((2, 1), (1, 2)), "calculation", "8"),
    (manual((7, 1)), (x(8, 8), ids(8, 8), 0), 2, ((2, 1), (1, 2)), "(7, 1)", "(7, 1)"),
    (P.GatherD(), (x(8, 8), 1, ids(8, 4)), 8, ((2, 1), (4, 1)), ("GatherD", "(2, 1)"), "both"),
    (P.GatherD(), (x(8, 8), 1, ids(8, 4)), 8, ((1, 2), (1, 2)), ("GatherD", "(1, 2)"), "1 for"),
    (P.GatherNd(), (x(8, 8), ids(8, 1)), 8, ((2, 1), (1, 1)), (0, "GatherNd"), "1 for"),
    (P.GatherNd(), (x(8, 8), ids(8, 2)), 8, ((1, 1), (1, 2)), ("GatherNd", "(1, 2)"), "1 for"),
    (P.OneHot(), (ids(8, 8), 4, 1.0, 0.0), 8, ((8, 1, 1), (), ()), "indices", "strict=False"),
    (P.OneHot(), (ids(8), 4, 1.0, 0.0), 8, ((8, 1),), (1, 3, "size"), "tuple"),
    (P.OneHot(), (ids(8), 10, 1.0, 0.0), 8, ((1, 4), (), ()), (10, 4, "shape"),
     "False"),
    (P.UnsortedSegmentSum(), (x(8, 8), ids(8), 4), 8, ((2, 1), (4,)), "Strategies", "(2,)"),
    (P.TensorScatterUpdate(), (x(8, 8), ids(2, 1), x(2, 8)), 8, ((2, 1), (1, 1), (1, 1)), "splits", "1 for"),
    (P.SoftmaxCrossEntropyWithLogits(), (x(8, 8), x(8, 8)), 8, ((8, 1), (4, 1)), "(8, 1)",
     "both"),
    (P.SoftmaxCrossEntropyWithLogits(), (x(8, 8), x(8, 8)), 8, ((2, 2), (2, 2)), "classes", "1 for"),
    (P.SparseSoftmaxCrossEntropyWithLogits(), (x(8, 8), ids(8)), 8, ((8, 1), (4,)),
     "Strategies", "(8,)"),
    (P.SparseSoftmaxCrossEntropyWithLogits(), (x(8, 8), ids(8)), 8, ((1, 8), (1,)), "classes",
     "1 for"),
    (P.SigmoidCrossEntropyWithLogits(), (x(8, 8), x(8, 8)), 8, ((8, 1), (4, 1)), "Strategies",
     "(8, 1))"),
    (P.Conv2D(8, 3), (x(8, 8, 8, 8), x(8, 8, 3, 3)), 8, ((2, 2, 1, 1), (1, 1, 1, 1)),
     (2, 1, "weight"), "equally"),
    (P.Conv2D(8, 4), (x(8, 8, 8, 8), x(8, 8, 4, 4)), 8, ((2, 1, 1, 1), (1, 1, 2, 1)), "kernel's", "1, 1)"),
    (P.Conv2D(8, 3, group=2), (x(8, 8, 8, 8), x(8, 4, 3, 3)), 8, ((2, 1, 1, 1), (2, 1, 1, 1)),
     (2, "1, 1", "group"), "grouped"),
    (P.Conv2D(8, 3), (x(8, 8, 8, 8), x(8, 8, 3, 3)), 8, ((2, 1, 1, 2), (1, 1, 1, 1)),
     (3, 2, 1, "valid"), "pad_mode='same'"),
    (P.Conv2D(8, 2, pad_mode="pad", stride=2), (x(8, 8, 8, 8), x(8, 8, 2, 2)), 8, ((1, 1, 2, 1), (1, 1, 1, 1)),
     "pad", "pad_mode='same'"),
    (P.MaxPool(3, 2), (x(8, 8, 8, 8),), 8, ((2, 1, 2, 1),), (3, 2, "valid"),
     "1 for"),
    (P.BatchNorm(), (x(8, 8), x(8), x(8), x(8), x(8)), 8, ((2, 2), (2,), (1,), (2,), (2,)),
     (1, "0 [8, 8]", 2, 0, "2 [8]"),
     "((2, 2), (2,), (2,), (2,), (2,))"),
    (P.Concat(1), ((x(8, 8), x(8, 8)),), 8, ((4, 1), (2, 1)), "Strategies", "both"),
    (P.Concat(1), ((x(8, 8), x(8, 8)),), 8, ((1, 2), (1, 2)), "joined",
     "1 for"),
    (P.Stack(1), ((x(8, 8), x(8, 8)),), 8, ((4, 1), (2, 1)), "Strategies", "both"),
    (P.Split(0, 2), (x(8, 8),), 8, ((2, 1),), ("dim", 0, "into"), ("dim", 1)),
    (P.Split(2, 2), (x(8, 8),), 8, ((2, 1),), "range", (-2, 1)),
    (P.StridedSlice(), (x(8, 8), (0, 0), (4, 8), (1, 1)), 8, ((2, 1),), "0:4:1", "strict=False"),
    (P.StridedSlice(), (x(8, 8), (0, 0), (8, 8), (1, 2)), 8, ((1, 2),), "0:8:2", "strict=False"),
    (P.StridedSlice(new_axis_mask=1), (x(8, 8), (0, 0, 0), (1, 8, 8), (1, 1, 1)), 8, ((2, 1),), "mask", "1"),
    (P.Slice(), (x(8, 8), (1, 0), (-1, 8)), 8, ((2, 1),), "taken", "strict=False"),
    (P.TopK(), (x(8, 8), 2), 8, ((2, 2),), ("dim", 1, "largest"), ("dim", 1)),
    (P.Sort(0), (x(8, 8),), 8, ((2, 2),), ("dim", 0, "sorts"), ("dim", 1)),
    # what an operand leaves to the others is checked as if it were written
    (P.LayerNorm(2, 1), (x(8, 4, 8), x(4, 8), x(4, 8)), 8, ((), (4, 2), ()), ("(1, 4, 2)", 2),
     "1 for"),
    (P.LayerNorm(2, 1), (x(8, 4, 8), x(4, 8), x(4, 8)), 8, ((), (4, 1), (2, 1)), "Strategies", "(4, 1))"),
    (P.BatchNorm(), (x(8, 8), *[x(8)] * 4), 8, ((), (3,), (), (), ()), (2, 3, "power"), "strict=False"),
    (P.MatMul(), (x(8, 8), x(8, 8)), 8, ((), (4, 4)), (16, 8), "divides 8"),
    (P.MatMul(), (x(8, 8), x(8)), 8, ((2, 4), ()), ("((2, 4), (4,))", "strategy"), "matrices"),
    (manual((4, 4)), (x(8, 8), ids(8, 8), 0), 4, ((), (1, 4)), (2, "param_strategy[0]", 4), "number"),
    (P.ReLU(), (x(8, 8),), 8, ((),), "[[8, 8]]", "[[8, 8]]"),
    # counts that an operator of several can not carry inside
    (P.TensorScatterAdd(), (x(8, 8), ids(2, 1), x(2, 8)), 8, ((1, 2), (2, 1), (2, 2)), "TensorScatterAdd",
     "dim"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "args", "devices", "strategy", "words", "mend"),
    REFUSED,
    ids=[f"{own[0].name} {own[3]}" for own in REFUSED],
)
def test_strict_mode_refuses_with_operator_numbers_and_mend(
    operator: P.Primitive, args: tuple[Any, ...], devices: int, strategy: Any, words: object, mend: object
) -> None:
    operator.in_strategy = strategy
    cell = Applied(operator, args)
    with raises(StrategyError, f"{operator.name} primitive", words, mend, "fix:") as caught:
        planned(cell, (), devices)
    assert isinstance(caught.value, RuntimeError)


LENIENT = [
    (P.ReLU(), (torch.rand(9, 8),), 3, ((3, 1),)),
    (P.ReLU(), (torch.rand(9, 8),), 2, ((2, 1),)),
    (P.Softmax(), (torch.rand(8, 8),), 8, ((2, 4),)),
    (P.Reshape(), (torch.rand(8, 8), (64,)), 8, ((8, 1),)),
    (P.Conv2D(8, 2, pad_mode="pad", stride=2), (torch.rand(8, 8, 8, 8), torch.rand(8, 8, 2, 2)), 2,
     ((1, 1, 2, 1), (1, 1, 1, 1))),
    (P.SoftmaxCrossEntropyWithLogits(), (torch.rand(8, 8), torch.rand(8, 8).softmax(1)), 4, ((2, 2), (2, 2))),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "args", "devices", "strategy"), LENIENT, ids=[own[0].name for own in LENIENT])
def test_what_only_strict_mode_refuses_equals_one_device(
    operator: P.Primitive, args: tuple[Any, ...], devices: int, strategy: Any
) -> None:
    cell = Applied(operator.shard(strategy), tuple(a.double() if isinstance(a, Tensor) else a for a in args))
    with pytest.raises(StrategyError):
        planned(cell, (), devices)
    equal_to_one_device(cell, (), devices, strict=False)


# --------------------------------------------------------------------------------------- the specification's own errors


def spoken_by(case: dict[str, Any]) -> tuple[P.Primitive, tuple[Any, ...]]:
    """The operator of a case and operands of its shapes."""
    shapes = [x(*shape) for shape in case["inputs"]]
    op, axis = case["op"], case.get("axis")
    if op == "Gather":
        gather = manual(tuple(case["manual_split"]))
        return gather, (shapes[0], ids(*case["inputs"][1]), axis or 0)
    if op == "Conv2D":
        settings = {name: case[name] for name in ("pad_mode", "stride", "group") if name in case}
        return P.Conv2D(case["inputs"][1][0], case["inputs"][1][2], **settings), tuple(shapes)
    made: dict[str, P.Primitive] = {
        "Add": P.Add(), "MatMul": P.MatMul(transpose_b=bool(case.get("transpose_b"))), "Softmax": P.Softmax(axis or 0),
        "ReduceSum": P.ReduceSum(), "SoftmaxCrossEntropyWithLogits": P.SoftmaxCrossEntropyWithLogits(),
    }  # fmt: skip
    return made[op], (*shapes, axis) if op == "ReduceSum" else tuple(shapes)


# Data of our message; for the rest the name of the operator is enough.
WORDS = {
    "add-err-1": (2, 6), "add-err-2": "((2, 4, 8), (2, 4, 8))", "mm-err-1": "((2, 2, 8, 16), (2, 4, 16, 1))",
    "mm-err-2": (3, 4, 1), "mm-err-3": (16, 8, "column"),
    "mm-err-5": (0, "larger"), "mm-err-6": (-1, "larger"), "mm-err-7": "2 % 4 = 2",
    "softmax-err-1": (2, 1, "size"), "softmax-err-3": "(2, 4, 8, 16)",
    "softmax-err-4": "range", "softmax-err-5": (2, 100),
    "reduce-err-1": "ReduceSum", "ce-err-1": "SoftmaxCrossEntropyWithLogits",
    "conv-err-2": "group", "conv-err-3": "(2, 1, 1, 2)", "conv-err-7": "(1, 1, 2, 1)",
    "gather-manual-4": (0, "axis"), "gather-manual-5": "last", "gather-manual-6": "indices_strategy",
    "gather-manual-7": "calculation", "gather-manual-10": ("manual_split", "strategy"),
}  # fmt: skip
ERRORS = [case for case in CASES.values() if case["kind"] == "error" and "inputs" in case]


def test_all_errors_about_operators_have_words() -> None:
    assert {case["id"] for case in ERRORS} == WORDS.keys()


@pytest.mark.parametrize("case", ERRORS, ids=[case["id"] for case in ERRORS])
def test_the_errors_of_the_specification_are_raised_in_strict_mode(case: dict[str, Any]) -> None:
    operator, args = spoken_by(case)
    if case["strategy"] is not None:
        operator.in_strategy = tuple(map(tuple, case["strategy"]))
    mode = "auto_parallel" if case["strategy"] is None else "semi_auto_parallel"
    ms.set_auto_parallel_context(parallel_mode=mode, device_num=case["device_num"])
    devices = case["device_num"]
    with raises(StrategyError, operator.name, WORDS[case["id"]], "fix:"):
        sw.plan(Applied(operator, args), (), devices, mesh=sw.Mesh(data=devices), mode="semi_auto")


def test_attributes_count_in_semi_auto_and_auto_mode_only() -> None:
    """B12: elsewhere a wrong manual_split is not even read."""
    gather = manual((1, 2)).shard(((2, 1), (1, 2)))
    table, places = torch.rand(8, 8), torch.randint(8, (8, 8))
    for mode in ("stand_alone", "data_parallel", "hybrid_parallel"):
        ms.set_auto_parallel_context(parallel_mode=mode, device_num=2)
        assert torch.equal(gather(table, places, 0), table[places])
    with raises(StrategyError, 3, "manual_split", "(1, 2)", op="Gather primitive"):
        planned(Applied(gather, (table, places, 0)), (), 2)


def test_a_gather_on_the_host_is_found_by_its_parameter() -> None:
    from shardwise.mindspore import planning

    class Two(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.deep, self.wide = ms.nn.Embedding(16, 4), ms.nn.Embedding(16, 4)
            self.deep.gather.add_prim_attr("primitive_target", "CPU")

        def construct(self, places: Tensor) -> Tensor:
            return self.deep(places) + self.wide(places)

    net = Two().to("meta")
    assert planning.host_parameters(net, (ids(4, 2),), {}) == ("deep.embedding_table",)
    net.deep.gather.del_prim_attr("primitive_target")
    net.wide.gather.set_device("CPU")
    assert planning.host_parameters(net, (ids(4, 2),), {}) == ("wide.embedding_table",)
    net.wide.gather.set_device("GPU")
    assert planning.host_parameters(net, (ids(4, 2),), {}) == ()
