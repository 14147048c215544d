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


# (operator, args, devices, strategy, words of the message, words of the mend): the words are the reference's
REFUSED: list[tuple[P.Primitive, tuple[Any, ...], int, Any, str, str]] = [
    # what all operators share, in this order
    (P.MatMul(), (x(8, 8), x(8, 8)), 8, ((2, 4),), "size: 1 is not equal to inputs size: 2", "one tuple for each"),
    (P.Add(), (x(8, 8), x(8, 8)), 8, ((3, 1, 0), (1, 1)), "len: 3 is not equal to inputs len: 2, index: 0", "[8, 8]"),
    (P.Add(), (x(8, 8), x(8, 8)), 8, ((1, 1), (3,)), "len: 1 is not equal to inputs len: 2, index: 1", "[8, 8]"),
    (P.ReLU(), (x(8, 8),), 8, ((0, 3),), "must be larger than 0, but get 0", "1: not split"),
    (P.ReLU(), (x(9, 8),), 8, ((3, 1),), "must be the power of 2, but get 3", "strict=False"),
    (P.ReLU(), (x(9, 8),), 8, ((2, 1),), "shape 9 cannot be divisible by strategy value 2: 9 % 2 = 1", "strict=False"),
    (P.ReLU(), (x(64, 64),), 8, ((4, 4),), "it requires 16 devices, but the device number of this stage is 8", "8"),
    (P.MatMul(), (x(8, 8), x(8, 8)), 8, ((2, 4), (4, 2)), "(4, 2)), it requires 16 devices", "divides 8"),
    (P.ReLU(), (x(64, 64),), 6, ((4, 1),), "it can not be divisible by 4", "divides 6"),
    # operators
    (P.MatMul(), (x(8, 8), x(8, 8)), 8, ((2, 4), (2, 1)),
     "the transpose_b is false, the shard num of first input's column is 4, but the shard num of second input's row is "
     "2",
     "split it equally"),
    (P.MatMul(transpose_b=True), (x(8, 8), x(8, 8)), 8, ((2, 4), (4, 1)), "the transpose_b is true",
     "split it equally"),
    (P.BatchMatMul(), (x(4, 8, 8), x(4, 8, 8)), 8, ((2, 1, 1), (4, 1, 1)), "Strategies of relevant dimensions", "same"),
    (P.MatMul().shard(((1, 1), (1, 1)), ((1, 2),)), (x(8, 8), x(8, 8)), 8, ((2, 2), (2, 2)),
     "the output strategy ((1, 2),) of ((2, 2), (2, 2)) is neither ((2, 2),) (AllReduce) nor ((4, 2),) (ReduceScatter)",
     "one of the two"),
    (P.Add(), (x(8, 8), x(8)), 8, ((2, 4), (2,)),
     "dim 1 of input 0 [8, 8] in 4 parts, and dim 0 of input 1 [8] in 2: Strategies of rel", "(4,)"),
    (P.BiasAdd(), (x(8, 8), x(8)), 8, ((2, 4), (2,)), "Strategies of relevant dimensions", "(4,)"),
    (P.Softmax(), (x(8, 8),), 8, ((2, 4),), "splits dim 1, over which it is normalised: its value must be 1", "1 for"),
    (P.Softmax((0, 1)), (x(8, 8),), 8, ((2, 1),), "splits dim 0", "strict=False"),
    (P.Softmax(2), (x(8, 8),), 8, ((2, 1),), "axis 2 is out of range for an input of 2 dims", "from -2 to 1"),
    (P.LogSoftmax(0), (x(8, 8),), 8, ((2, 1),), "splits dim 0", "1 for that dim"),
    (P.L2Normalize(-1), (x(8, 8),), 8, ((1, 8),), "splits dim 1", "1 for that dim"),
    (P.CumSum(), (x(8, 8), 0), 8, ((8, 1),), "splits dim 0, along which it accumulates", "1 for that dim"),
    (P.LayerNorm(1, 1), (x(8, 8), x(8), x(8)), 8, ((2, 2), (2,), (2,)), "splits dim 1", "strict=False"),
    (P.LayerNorm(2, 1), (x(8, 4, 8), x(4, 8), x(4, 8)), 8, ((2, 2, 1), (1, 1), (2, 1)),
     "dim 1 of input 0 [8, 4, 8] in 2 parts, and dim 0 of input 1 [4, 8] in 1", "((2, 2, 1), (2, 1), (2, 1))"),
    (P.ReduceSum(), (x(16, 32, 64), -1), 32, ((2, 2, 8, 16),), "len: 4 is not equal to inputs len: 3", "[16, 32, 64]"),
    (P.Reshape(), (x(8, 8), (64,)), 8, ((8, 1),), "Reshape takes none", "behind it"),
    (P.Gather(), (x(16, 4), ids(8, 8), 0), 8, ((2, 1), (1, 4)), "param is split at dim (axis)0 ,index can't be split.",
     "((2, 1), (1, 1))"),
    (P.Gather(), (x(16, 8), ids(8), 1), 8, ((1, 4), (2,)), "param is split at dim (axis)1 ,index can't be split.",
     "(1,)"),
    (P.Gather(), (x(16, 4, 4), ids(8), 0), 8, ((8, 1, 1), (1,)), "has 3 dims, more than 2", "strict=False"),
    (P.Gather(), (x(4, 8), ids(8), 1), 8, ((2, 4), (1,)), "4 can't be divided by 2 * 4", "divides 4"),
    (P.Gather(), (x(16, 8), ids(8), 1), 8, ((1, 4), (1,)), "repeated calculation is not supported", "product is 8"),
    (P.Gather(1), (x(8, 8), ids(8, 2), 1), 8, ((2, 2), (2, 1)), "splits dim 1, along which the batched", "1 for"),
    (P.Gather(1), (x(8, 8), ids(8, 2), 1), 8, ((2, 1), (4, 1)), "splits the 1 batch dims differently", "same numbers"),
    (P.Gather(), (x(16, 4), ids(8), 5), 8, ((8, 1), (1,)), "axis 5 is out of range", "from -2 to 1"),
    (manual((4, 4)), (x(8, 8), ids(8), 1), 2, ((2, 1), (2,)), "axis must be 0, but get 1", "look up rows"),
    (manual((4.0, 4)), (x(8, 8), ids(8, 8), 0), 2, ((2, 1), (1, 2)), "must be positive integers", "(10, 20, 30, 4)"),
    (manual((8, 0)), (x(8, 8), ids(8, 8), 0), 2, ((2, 1), (1, 2)), "must be positive integers", "(10, 20, 30, 4)"),
    (manual((4, 4)), (x(8, 8), ids(8, 8), 0), 8, ((4, 1), (8, 1)), "only the last dim of indices can be split",
     "(1, 4)"),
    (manual((4, 4)), (x(8, 8), ids(8, 8), 0), 8, ((4, 1), (1, 8)),
     "param_strategy[0] 4 must be equal to indices_strategy[-1] 8", "(1, 4)"),
    (manual((4, 4)), (x(8, 8), ids(8, 8), 0), 4, ((4, 1), (1, 4)), "2 numbers, and param_strategy[0] is 4",
     "one number"),
    (manual((4, 3)), (x(8, 8), ids(8, 8), 0), 2, ((2, 1), (1, 2)),
     "Sum of split shapes 7 must be equal to param_shape[0] 8", "sum is 8"),
    (manual((4, 4)), (x(8, 8), ids(8, 8), 0), 8, ((2, 1), (1, 2)), "repeated calculation is not supported", "8"),
    (manual((7, 1)), (x(8, 8), ids(8, 8), 0), 2, ((2, 1), (1, 2)), "at least the part of the last dim", "more rows"),
    (P.GatherD(), (x(8, 8), 1, ids(8, 4)), 8, ((2, 1), (4, 1)), "strategies of all inputs must be equal", "for both"),
    (P.GatherD(), (x(8, 8), 1, ids(8, 4)), 8, ((1, 2), (1, 2)), "splits dim 1, which it looks up", "1 for"),
    (P.GatherNd(), (x(8, 8), ids(8, 1)), 8, ((2, 1), (1, 1)), "splits dim 0, which is looked up", "1 for"),
    (P.GatherNd(), (x(8, 8), ids(8, 2)), 8, ((1, 1), (1, 2)), "splits dim 1, which addresses an element", "1 for"),
    (P.OneHot(), (ids(8, 8), 4, 1.0, 0.0), 8, ((8, 1, 1), (), ()), "the indices have 2 dims", "strict=False"),
    (P.OneHot(), (ids(8), 4, 1.0, 0.0), 8, ((8, 1),), "size: 1 is not equal to inputs size: 3", "one tuple for each"),
    (P.OneHot(), (ids(8), 10, 1.0, 0.0), 8, ((1, 4), (), ()), "shape 10 cannot be divisible by strategy value 4",
     "False"),
    (P.UnsortedSegmentSum(), (x(8, 8), ids(8), 4), 8, ((2, 1), (4,)), "Strategies of relevant dimensions", "(2,)"),
    (P.TensorScatterUpdate(), (x(8, 8), ids(2, 1), x(2, 8)), 8, ((2, 1), (1, 1), (1, 1)), "splits dim 0", "1 for"),
    (P.SoftmaxCrossEntropyWithLogits(), (x(8, 8), x(8, 8)), 8, ((8, 1), (4, 1)), "logits and labels must be equal",
     "both"),
    (P.SoftmaxCrossEntropyWithLogits(), (x(8, 8), x(8, 8)), 8, ((2, 2), (2, 2)), "splits dim 1, the classes", "1 for"),
    (P.SparseSoftmaxCrossEntropyWithLogits(), (x(8, 8), ids(8)), 8, ((8, 1), (4,)),
     "Strategies of relevant dimensions", "(8,)"),
    (P.SparseSoftmaxCrossEntropyWithLogits(), (x(8, 8), ids(8)), 8, ((1, 8), (1,)), "splits dim 1, the classes",
     "1 for"),
    (P.SigmoidCrossEntropyWithLogits(), (x(8, 8), x(8, 8)), 8, ((8, 1), (4, 1)), "Strategies of relevant dimensions",
     "(8, 1))"),
    (P.Conv2D(8, 3), (x(8, 8, 8, 8), x(8, 8, 3, 3)), 8, ((2, 2, 1, 1), (1, 1, 1, 1)),
     "shard num of cin of x is 2, but the shard num of cin of the weight is 1", "split them equally"),
    (P.Conv2D(8, 4), (x(8, 8, 8, 8), x(8, 8, 4, 4)), 8, ((2, 1, 1, 1), (1, 1, 2, 1)), "the kernel's height", "1, 1)"),
    (P.Conv2D(8, 3, group=2), (x(8, 8, 8, 8), x(8, 4, 3, 3)), 8, ((2, 1, 1, 1), (2, 1, 1, 1)),
     "the group is 2, the cout can not be split or the cin can not be split, but get cin 1, 1, cout 2", "grouped"),
    (P.Conv2D(8, 3), (x(8, 8, 8, 8), x(8, 8, 3, 3)), 8, ((2, 1, 1, 2), (1, 1, 1, 1)),
     "splits dim 3 in 2 parts, but in valid mode with kernel 3 (dilated) and stride 1", "pad_mode='same'"),
    (P.Conv2D(8, 2, pad_mode="pad", stride=2), (x(8, 8, 8, 8), x(8, 8, 2, 2)), 8, ((1, 1, 2, 1), (1, 1, 1, 1)),
     "splits dim 2 in 2 parts, but in pad mode", "pad_mode='same'"),
    (P.MaxPool(3, 2), (x(8, 8, 8, 8),), 8, ((2, 1, 2, 1),), "in valid mode with kernel 3 (dilated) and stride 2",
     "1 for"),
    (P.BatchNorm(), (x(8, 8), x(8), x(8), x(8), x(8)), 8, ((2, 2), (2,), (1,), (2,), (2,)),
     "dim 1 of input 0 [8, 8] in 2 parts, and dim 0 of input 2 [8] in 1",
     "((2, 2), (2,), (2,), (2,), (2,))"),
    (P.Concat(1), ((x(8, 8), x(8, 8)),), 8, ((4, 1), (2, 1)), "Strategies of relevant dimensions", "for both"),
    (P.Concat(1), ((x(8, 8), x(8, 8)),), 8, ((1, 2), (1, 2)), "splits dim 1, along which the inputs are joined",
     "1 for"),
    (P.Stack(1), ((x(8, 8), x(8, 8)),), 8, ((4, 1), (2, 1)), "Strategies of relevant dimensions", "for both"),
    (P.Split(0, 2), (x(8, 8),), 8, ((2, 1),), "splits dim 0, which is cut into parts", "1 for that dim"),
    (P.Split(2, 2), (x(8, 8),), 8, ((2, 1),), "axis 2 is out of range", "from -2 to 1"),
    (P.StridedSlice(), (x(8, 8), (0, 0), (4, 8), (1, 1)), 8, ((2, 1),), "0:4:1 is taken", "strict=False"),
    (P.StridedSlice(), (x(8, 8), (0, 0), (8, 8), (1, 2)), 8, ((1, 2),), "0:8:2 is taken", "strict=False"),
    (P.StridedSlice(new_axis_mask=1), (x(8, 8), (0, 0, 0), (1, 8, 8), (1, 1, 1)), 8, ((2, 1),), "a mask is not 0", "1"),
    (P.Slice(), (x(8, 8), (1, 0), (-1, 8)), 8, ((2, 1),), "is taken (a split dim must be taken whole)", "strict=False"),
    (P.TopK(), (x(8, 8), 2), 8, ((2, 2),), "splits dim 1, of which it finds the largest", "1 for that dim"),
    (P.Sort(0), (x(8, 8),), 8, ((2, 2),), "splits dim 0, which it sorts", "1 for that dim"),
    # what an operand leaves to the others is checked as if it were written
    (P.LayerNorm(2, 1), (x(8, 4, 8), x(4, 8), x(4, 8)), 8, ((), (4, 2), ()), "(1, 4, 2) splits dim 2, over which",
     "1 for"),
    (P.LayerNorm(2, 1), (x(8, 4, 8), x(4, 8), x(4, 8)), 8, ((), (4, 1), (2, 1)), "Strategies of relevant", "(4, 1))"),
    (P.BatchNorm(), (x(8, 8), *[x(8)] * 4), 8, ((), (3,), (), (), ()), "power of 2, but get 3", "strict=False"),
    (P.MatMul(), (x(8, 8), x(8, 8)), 8, ((), (4, 4)), "it requires 16 devices", "divides 8"),
    (P.MatMul(), (x(8, 8), x(8)), 8, ((2, 4), ()), "the strategy ((2, 4), (4,))", "matrices"),
    (manual((4, 4)), (x(8, 8), ids(8, 8), 0), 4, ((), (1, 4)), "2 numbers, and param_strategy[0] is 4", "one number"),
    (P.ReLU(), (x(8, 8),), 8, ((),), "has no split counts for any of the inputs [[8, 8]]", "numbers for one"),
    # counts that an operator of several can not carry inside
    (P.TensorScatterAdd(), (x(8, 8), ids(2, 1), x(2, 8)), 8, ((1, 2), (2, 1), (2, 2)), "splits dim 0, which cannot be",
     "1 for that dim"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operator", "args", "devices", "strategy", "words", "mend"),
    REFUSED,
    ids=[f"{own[0].name} {own[3]}" for own in REFUSED],
)
def test_strict_mode_refuses_with_operator_numbers_and_mend(
    operator: P.Primitive, args: tuple[Any, ...], devices: int, strategy: Any, words: str, mend: str
) -> None:
    operator.in_strategy = strategy
    cell = Applied(operator, args)
    with pytest.raises(StrategyError) as caught:
        planned(cell, (), devices)
    message = str(caught.value)
    assert f"{operator.name} primitive" in message  # the operator, and the attribute that holds it
    assert words in message
    assert mend in message.rpartition("fix:")[2]
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


# Words of our message; for the rest the name of the operator is enough.
WORDS = {
    "add-err-1": "power of 2, but get 6", "add-err-2": "requires 64 devices", "mm-err-1": "relevant dimensions",
    "mm-err-2": "len: 3 is not equal to inputs len: 4, index: 1", "mm-err-3": "column is 16, but .* row is 8",
    "mm-err-5": "larger than 0, but get 0", "mm-err-6": "larger than 0, but get -1", "mm-err-7": "2 % 4 = 2",
    "softmax-err-1": "size: 2 is not equal to inputs size: 1", "softmax-err-3": "splits dim 2",
    "softmax-err-4": "axis 4 is out of range", "softmax-err-5": "power of 2, but get 100",
    "reduce-err-1": "len: 4 is not equal", "ce-err-1": "cannot be divisible by strategy value 16",
    "conv-err-2": "the group is 2", "conv-err-3": "valid mode", "conv-err-7": "pad mode",
    "gather-manual-4": "axis must be 0", "gather-manual-5": "only the last dim", "gather-manual-6": "indices_strategy",
    "gather-manual-7": "repeated calculation", "gather-manual-10": "has no strategy",
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
    with pytest.raises(StrategyError, match=rf"{operator.name} primitive(.|\n)*{WORDS[case['id']]}(.|\n)*fix: "):
        sw.plan(Applied(operator, args), (), devices, mesh=sw.Mesh(data=devices), mode="semi_auto")


def test_attributes_count_in_semi_auto_and_auto_mode_only() -> None:
    """B12: elsewhere a wrong manual_split is not even read."""
    gather = manual((1, 2)).shard(((2, 1), (1, 2)))
    table, places = torch.rand(8, 8), torch.randint(8, (8, 8))
    for mode in ("stand_alone", "data_parallel", "hybrid_parallel"):
        ms.set_auto_parallel_context(parallel_mode=mode, device_num=2)
        assert torch.equal(gather(table, places, 0), table[places])
    with raises(StrategyError, "Sum of split shapes 3", "manual_split", "(1, 2)", op="Gather primitive"):
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
