"""What the inventory of the specification names and no other test of the dialect shows: import paths, ``ms.shard`` of
functions and cells, gradients of several outputs, the column split of document 004, the memory of its large model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardwise as sw
import shardwise.mindspore as ms
from mindspore.applied import equal_to_one_device, planned
from shardwise.mindspore import engine, nn, ops
from shardwise.mindspore.strict import StrategyError


@pytest.fixture(autouse=True)
def _default_context() -> Iterator[None]:
    ms.reset_auto_parallel_context()
    yield
    ms.reset_auto_parallel_context()


def block(x: Tensor, w: Tensor) -> Tensor:
    return ops.relu(ops.matmul(x, w))


class Calls(nn.Cell):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.w = ms.Parameter(torch.rand(8, 8).double(), "w")
        self.function = function

    def construct(self, x: Tensor) -> Tensor:
        result = self.function(x, self.w)
        return result if isinstance(result, Tensor) else result[0] + result[1]


X = torch.rand(8, 8).double()


def both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return a @ b, a + b


@pytest.mark.parametrize(
    ("function", "given", "aliases"),
    [
        (block, (((2, 1), (1, 2)),), [(2, 1), (1, 2)]),
        (block, ([[4, 1], [1, 1]], [[1, 4]]), [(4, 1), (1, 1), (1, 4)]),
        (block, (((1, 4), (4, 1)), ((4, 1),)), [(1, 4), (4, 1), (4, 1)]),
        (block, ((None, (1, 2)),), [(1, 2)]),
        (block, (None, ((2, 2),)), [(2, 2)]),
        (both, (((4, 1), (4, 1)), ((4, 1), (1, 4))), [(4, 1), (4, 1), (4, 1), (1, 4)]),
    ],
)
def test_a_function_takes_strategies_of_its_inputs_and_outputs(function: Any, given: Any, aliases: list[Any]) -> None:
    """B22: its inputs and outputs are split by the counts, and every result and gradient is that of one device."""
    cell = Calls(ms.shard(function, *given))
    plan = equal_to_one_device(cell, (X,), 4)
    split = {entry.name: _counts(entry.strategy) for entry in plan.operators if "alias" in entry.name}
    assert list(split.values()) == aliases, plan


def _counts(strategy: str) -> tuple[int, int]:
    """The counts of "d0@data.0 d1@data.1" on four devices, of which data.0 and data.1 are factors of 2."""
    counts = [1, 1]
    for word in strategy.split():
        dim, axes = word.removeprefix("d").split("@")
        counts[int(dim)] *= 2 ** len(axes.strip("()").split(",")) if "." in axes else 4
    return counts[0], counts[1]


def test_propagation_carries_the_strategies_of_a_function_inside() -> None:
    cell = Calls(ms.shard(block, ((1, 4), (4, 1)), ((4, 1),)))
    ms.set_auto_parallel_context(parallel_mode="auto_parallel", search_mode="sharding_propagation", device_num=4)
    with engine.inside():
        plan = engine._plan(cell, cell, (X,), {}, {}, ms.context.options())
        assert sw.verify(cell, (X,), plan, steps=1).ok
    strategies = {entry.name: entry.strategy for entry in plan.operators}
    assert strategies["/matmul"] == "k@data"
    assert strategies["/relu"] == "d0@data"
    with pytest.raises(StrategyError, match="no operator that is configured"):
        engine._plan(Calls(block), Calls(block), (X,), {}, {}, ms.context.options())


@pytest.mark.parametrize("method", [False, True])
def test_a_cell_with_strategies_keeps_its_parameters(method: bool) -> None:
    class Outer(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            inner = nn.Dense(8, 8).to_float(ms.float64)
            self.inner = inner.shard(((2, 2),), ((4, 1),)) if method else ms.shard(inner, ((2, 2),), ((4, 1),))

        def construct(self, x: Tensor) -> Tensor:
            return self.inner(x)

    cell = Outer()
    assert list(cell.parameters_dict()) == ["inner.weight", "inner.bias"]
    plan = equal_to_one_device(cell, (X,), 4)
    marks = [_counts(entry.strategy) for entry in plan.operators if entry.name.startswith("inner/alias")]
    assert (marks[0], marks[-1]) == ((2, 2), (4, 1))


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ((((2, 1),),), StrategyError, r"size: 1 is not equal to inputs size: 2"),
        ((((2, 1, 1), (1, 1)),), StrategyError, r"strategy len: 3 is not equal to inputs len: 2, index: 0"),
        ((((3, 1), (1, 1)),), StrategyError, r"must be the power of 2, but get 3"),
        ((((4, 2), (1, 1)),), StrategyError, r"it requires 8 devices"),
        ((((2, 1), (1, 1)), ((2, 1), (1, 1))), StrategyError, r"size: 2 is not equal to outputs size: 1"),
        (((2, 1),), ValueError, r"block: in_strategy \(2, 1\) is one tuple of numbers"),
    ],
)
def test_wrong_strategies_of_a_function_are_refused(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        planned(Calls(ms.shard(block, *given)), (X,), 4)


def test_alone_a_function_with_strategies_is_the_function() -> None:
    assert torch.equal(ms.shard(block, ((2, 1), (1, 2)))(X, X), block(X, X))
