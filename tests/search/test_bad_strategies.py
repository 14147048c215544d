"""Strategies that cannot be followed: every message names the operator, the user's line, the numbers and the mend."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from raising import raises
from search.small_models import Mlp, TwoProducts

MESH = sw.Mesh(dp=2, tp=4)
matmul, relu = torch.matmul, torch.relu
CALL = r"small_models\.py:\d+"
HERE = r"test_bad_strategies\.py:\d+"


def message(model: nn.Module, *, shape: tuple[int, ...] = (16, 32), devices: int = 8, **choices: Any) -> str:
    with pytest.raises(sw.ShardwiseError) as caught:
        sw.plan(model, (torch.randn(*shape),), devices, **choices)
    return str(caught.value)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        pytest.param(((2, 4),), [1, 2, "operands", "[16, 32], [32, 16]"], id="too few"),
        pytest.param(((2, 4), (4, 1), (1, 1)), [3, 2, "operands"], id="too many"),
        pytest.param(((2, 4, 1), (4, 1)), [3, "(2, 4, 1)", "operand 0", "2 dims [16, 32]"], id="rank"),
        pytest.param(((2, 4), (2, 1)), ["4 ways", "2 ways", "factor k", "m k, k n -> m n"], id="disagreement"),
        pytest.param(((4, 4), (4, 1)), ["4 (m) x 4 (k) = 16 devices", 8, "Mesh(dp=8)"], id="too many"),
        pytest.param(((3, 1), (1, 1)), ["3 (m) = 3 devices", "divide", 8], id="does not divide"),
        pytest.param(((32, 1), (1, 1)), ["elements", 0, 16, "32 ways"], id="more than elements"),
        pytest.param("m@pp", ["'pp'", "(dp=8)"], id="unknown axis"),
        pytest.param("j@dp", ["'j'", "m, k, n"], id="unknown factor"),
        pytest.param("m@dp k@dp", ["dp", "once"], id="axis twice"),
        pytest.param("m dp", ["m@dp", "^"], id="not a strategy"),
    ],
)
def test_a_strategy_that_does_not_fit_its_call_is_explained(strategy, said):
    with raises(sw.ShardwiseError, said, "m k, k n -> m n", "m, k, n", op="/matmul", source="small_models.py"):
        sw.plan(TwoProducts(first=sw.shard(matmul, strategy)), (torch.randn(16, 32),), 8)


@pytest.mark.parametrize(
    ("strategy", "count"),
    [(((0, 1), (1, 1)), "0"), (((2, -4), (1, 1)), "-4"), (((2, 1.5), (1, 1)), "1.5"), (((True, 1), (1, 1)), "True")],
)
def test_a_split_count_is_a_whole_number_from_1(strategy, count):
    with raises(sw.ShardwiseError, count, 0, "fix:", op="matmul", source="test_bad_strategies.py"):
        sw.shard(matmul, strategy)


def test_strategies_that_are_nested_wrongly_are_shown_nested_right():
    with raises(sw.ShardwiseError, "(4, 1)", "shard(matmul, ((4, 1), (1, 1)))", source="test_bad_strategies.py"):
        sw.shard(matmul, (4, 1), (1, 1))


def test_a_dim_that_the_rule_can_not_split_is_named():
    class RolledFlat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sw.shard(torch.roll, ((1, 4),))(x, (1,)).mean()

    text = message(RolledFlat())
    assert "dim 1 of operand 0 [16, 32] cannot be split (4 ways asked for)" in text
    assert re.search(rf"op: +/roll \({HERE}\)", text), text
    assert "factors that can be split: none\n" in f"{text}\n"


def test_a_broadcast_dim_can_not_be_split():
    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sw.shard(torch.mul, ((2, 1), (2, 1)))(x, torch.ones(1, 32)).mean()

    assert "dim 0 of operand 1 has 1 elements: it cannot be split 2 ways" in message(Scaled())


def test_a_strategy_for_a_factor_that_can_not_be_split_is_refused():
    class RolledFlat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sw.shard(torch.roll, "d1@dp")(x, (1,)).mean()

    text = message(RolledFlat())
    assert "factor d1 cannot be split" in text
    assert re.search(rf"op: +/roll \({HERE}\)", text), text


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel"])
def test_modes_that_split_by_themselves_take_no_strategies(mode):
    text = message(Mlp(), shape=(16, 8), mode=mode, strategies={"up": "n@dp"})
    assert f"mode '{mode}' takes no strategies" in text
    assert re.search(rf"op: +up/linear \({CALL}\)", text), text
    assert 'mode="semi_auto" or mode="auto"' in text


def test_a_pattern_that_matches_no_module_names_the_nearest():
    text = message(Mlp(), shape=(16, 8), strategies={"upp": "n@dp", "nothing.*": "n@dp"})
    assert "no module matches 'upp' (near: up); 'nothing.*'" in text
    assert "named_modules" in text


def test_a_strategy_that_covers_no_operator_is_not_ignored():
    class Idle(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(8, 8)

    text = message(Idle(), shape=(16, 8), strategies={"unused": "n@dp"})
    assert "'n@dp' covers no operator" in text
    assert "unused (strategies['unused'])" in text


def test_a_strategy_that_covers_several_operators_lists_them():
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = TwoProducts()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    text = message(Several(), strategies={"inner": ((2, 4), (4, 1))})
    assert "((2, 4), (4, 1)) covers " in text
    assert "inner/matmul, " in text
    assert "a smaller submodule, or the call inside forward" in text


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("[16@dp]", "has shape [16]"),
        ("[16@dp, 8]", "has shape [16, 8]"),
        ("[16@pp, 16]", "unknown mesh axis 'pp'"),
        ("[16@dp, 16@dp]", "dp is used more than once"),
        ("16, 16", "a layout reads [32@dp, 512, 4096@tp]"),
    ],
)
def test_a_constraint_that_does_not_fit_its_value_is_explained(layout, said):
    class Constrained(TwoProducts):
        def forward(self, x: Tensor) -> Tensor:
            return (sw.constrain(x @ self.w, layout) @ self.v).square().mean()

    text = message(Constrained(), mesh=MESH)
    assert said in text
    assert re.search(rf"op: +\S+ \({HERE}\)", text), text
    assert "fix:    a layout of shape [16, 16] over the axes of Mesh(dp=2, tp=4)" in text


@pytest.mark.parametrize(
    ("out", "said"),
    [
        (((3, 1),), "3 (d0) = 3 devices"),
        (((1,),), "1 split counts (1,) for operand 0 of 2 dims [16, 16]"),
        (((8, 1), (8, 1)), "is for 2 result tensors, the call returned 1 results"),
        ("[16@dp]", "has shape [16]"),
    ],
)
def test_an_out_strategy_that_does_not_fit_the_result_is_explained(out, said):
    text = message(TwoProducts(sw.shard(matmul, ((8, 1), (1, 1)), out)))
    assert said in text
    assert re.search(rf"op: +\S+ \(({CALL}|{HERE})\)", text), text


def test_modes_searches_and_meshes_that_there_are_not_are_refused():
    assert "fix:    one of auto, semi_auto, data_parallel, stand_alone" in message(Mlp(), mode="automatic")
    assert "fix:    one of dynamic_programming, recursive_programming, sharding_propagation" in message(
        Mlp(), search="exhaustive"
    )
    assert "needs 2 x 4 = 8 devices, the cluster has 4" in message(Mlp(), devices=4, mesh=MESH)
    with raises(sw.ShardwiseError, "devices from 1", "not 0"):
        sw.plan(Mlp(), torch.randn(16, 8), 0, search="sharding_propagation")
