"""Recomputation, layouts by name, where parameters are stored, reports (rows A10, A23, A36, A44, A45, B22, B27)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import shardwise as sw
import shardwise.mindspore as ms
from mindspore.applied import planned_by_context
from raising import raises
from shardwise.api import step_memory
from shardwise.mindspore import nn, ops

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
SEMI = {"parallel_mode": "semi_auto_parallel", "device_num": 4}


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Dense(16, 64, activation="gelu"), nn.Dense(64, 16)
        self.norm, self.dropout = nn.BatchNorm1d(16), nn.Dropout(p=0.1)
        self.up.matmul.shard(((2, 2), (1, 2)))  # sums over devices inside

    def construct(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(self.up(self.norm(x))))


class Net(nn.Cell):
    def __init__(self, cells: dict[str, bool] | None = None, *, op: bool = False) -> None:
        super().__init__()
        ms.set_seed(1)
        self.blocks = nn.CellList([Block()])
        self.tanh = ops.Tanh()
        if cells is not None:
            for block in self.blocks:
                block.recompute(**cells)
        if op:
            self.tanh.recompute()

    def construct(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.tanh(x).square().mean()


def gradients(net: nn.Cell) -> list[Tensor]:
    torch.manual_seed(3)
    net.set_train()
    value, found = ms.value_and_grad(net, None, net.trainable_params())(X)
    return [value, *found, *(buffer.clone() for _, buffer in net.named_buffers())]


def test_what_runs_by_itself_gives_the_same_gradients_and_statistics() -> None:
    """Dropout draws the same numbers a second time, and running statistics move once."""
    for other in (Net({}), Net(op=True)):
        for own, again in zip(gradients(Net()), gradients(other), strict=True):
            torch.testing.assert_close(own, again, rtol=0, atol=0)


class Scaled(nn.Cell):
    """A constant makes what behind it is of another class, whose operators take their operands in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.two = ms.Parameter(torch.ones(16), "scale"), ms.Tensor(2.0)

    def construct(self, x: Tensor) -> Tensor:
        return (x * self.two).tanh() * self.scale


def test_a_cell_with_a_constant_is_made_again_in_the_same_order() -> None:
    found = []
    for again in (False, True):
        net = nn.SequentialCell(Scaled(), Scaled())
        for cell in net:
            cell.recompute(mode=again)
        found.append(ms.value_and_grad(lambda x, net=net: net(x).sum(), 0, net.trainable_params())(X))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_split_cell_makes_again_what_it_is_asked_to_and_holds_less() -> None:
    ms.set_auto_parallel_context(**SEMI)
    again, held, sent = {}, {}, {}
    for name, net in {
        "kept": Net(), "cells": Net({}), "cells, messages kept": Net({"mp_comm_recompute": False}),
        "operator": Net(op=True), "nothing": Net({"mode": False}),
    }.items():  # fmt: skip
        net.set_train()
        plan = planned_by_context(net, (X,))
        if name in ("cells", "cells, messages kept", "operator"):
            assert sw.verify(net, X, plan).ok
        again[name] = {entry.name for entry in plan.operators if entry.again}
        sent[name] = sum(entry.again for entry in plan.conversions)
        held[name] = step_memory(net, X, plan).kept_bytes
    assert again["kept"] == again["nothing"] == set()
    assert any("up/linear" in op for op in again["cells"])
    assert again["operator"] == {"/tanh"}
    assert held["cells"] < held["cells, messages kept"] <= held["kept"]
    assert held["operator"] <= held["kept"]
    assert sent["cells"] > sent["cells, messages kept"] == 0


def test_a_cell_gathers_parameters_again_where_it_is_asked_to() -> None:
    ms.set_auto_parallel_context(
        **SEMI, enable_parallel_optimizer=True, parallel_optimizer_config={"parallel_optimizer_threshold": 0}
    )
    for again in (False, True):
        net = Net({"parallel_optimizer_comm_recompute": again}).set_train()
        plan = planned_by_context(net, (X,))
        assert any(entry.again for entry in plan.parameters) is again
    assert sw.verify(net, X, plan).ok
    with raises(NotImplementedError, "leave mp_comm_recompute True", op="Block"):
        Net({"parallel_optimizer_comm_recompute": True, "mp_comm_recompute": False})


# -- layouts -----------------------------------------------------------------------------------------------------------

GRID = ms.Layout((2, 2), ("dp", "mp"))


class Placed(nn.Cell):
    def __init__(self, *strategies: Any) -> None:
        super().__init__()
        self.w = ms.Parameter(ms.Tensor(np.random.RandomState(0).normal(0, 0.1, (16, 16))), "w")
        self.matmul = ops.MatMul().shard(*strategies)

    def construct(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.w).square().mean()


def test_layouts_by_name_place_operands_where_they_say() -> None:
    ms.set_auto_parallel_context(**SEMI)
    x = X.double()
    for strategy, want in (
        ((GRID("dp", "mp"), GRID("mp", "None")), "m@data.0 k@data.1"),
        ((GRID("mp", "dp"), GRID("dp", "None")), "k@data.0 m@data.1"),
        ((GRID(("dp", "mp"), "None"), GRID("None", "None")), "m@data"),
        ((GRID(("mp", "dp"), "None"), GRID("None", "None")), "m@(data.1,data.0)"),
    ):
        plan = planned_by_context(Placed(strategy), (x,))
        assert sw.verify(Placed(strategy), x, plan).ok
        found = plan.strategies["/matmul"]
        assert found == want or {*found.split()} == {*want.split()}, (found, want)
    plan = planned_by_context(Placed((GRID("dp", "mp"), GRID("mp", "None")), (GRID(("dp", "mp"), "None"),)), (x,))
    assert sw.verify(Placed((GRID("dp", "mp"), GRID("mp", "None")), (GRID(("dp", "mp"), "None"),)), x, plan).ok
    assert "reduce_scatter" in str(plan)


def test_layouts_that_do_not_fit_say_what() -> None:
    for make, message in (
        (lambda: ms.Layout((2, 2), ("dp",)), ("Layout((2, 2), ('dp',))", "one name for each dim")),
        (lambda: ms.Layout((2, 0), ("dp", "mp")), ("Layout((2, 0), ('dp', 'mp'))", "whole numbers from 1")),
        (lambda: ms.Layout((2, 2), ("dp", "mp"), [3, 2, 1, 0]), ("[3, 2, 1, 0]", "all ranks, in order")),
        (lambda: GRID("dp", "mq"), "no dim 'mq'"),
        (lambda: GRID("dp", "dp"), "splits two dims"),
        (lambda: ops.MatMul().shard((GRID, GRID)), "does not place a tensor"),
    ):
        with raises(ValueError, message):
            make()
    ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=8)
    with raises(sw.errors.LayoutError, "4 devices", "Layout((2, 2), ('dp', 'mp'))(('dp',), ('mp',))", 2):
        planned_by_context(Placed((GRID("dp", "mp"), GRID("mp", "None"))), (X.double(),))


def test_a_parameter_plan_says_how_parameters_are_stored() -> None:
    ms.set_auto_parallel_context(**SEMI)

    class Outer(nn.Cell):
        def __init__(self, key: str) -> None:
            super().__init__()
            self.block = nn.Dense(16, 8, has_bias=False)
            self.sharded = ms.shard(self.block, in_strategy=((4, 1),), parameter_plan={key: (4, 1)})

        def construct(self, x: Tensor) -> Tensor:
            return self.sharded(x).square().mean()

    plan = planned_by_context(Outer("self.block.weight"), (X,))
    assert sw.verify(Outer("self.block.weight"), X, plan).ok
    (entry,) = (entry for entry in plan.parameters if entry.name.endswith("block.weight") or "weight" in entry.name)
    assert entry.layout == "f32[8@data, 16]"
    with raises(ValueError, "parameter_plan names"):
        planned_by_context(Outer("self.block.wieght"), (X,))


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_checkpoints_of_other_versions_and_broken_ones_say_so(tmp_path: Any) -> None:
    path = tmp_path / "net.ckpt"
    good = {"format": "shardwise-rank-checkpoint", "rank": 0, "info": {}, "parameters": {"w": {"data": torch.ones(2)}}}
    for content, message in (
        ({**good, "format": "other"}, "not a checkpoint of this library"),
        ({key: value for key, value in good.items() if key != "rank"}, "another version: it lacks rank"),
        ({**good, "parameters": {"w": torch.ones(2)}}, "its entry w lacks data"),
        ({**good, "parameters": {"w": {"data": torch.ones(2), "layout": "[2]"}}}, "lacks data, or half its layout"),
    ):
        torch.save(content, path)
        with raises(ValueError, message):
            ms.load_checkpoint(str(path))
    path.write_bytes(b"not a checkpoint")
    with raises(ValueError, "net.ckpt", "cannot be read as a checkpoint"):
        ms.load_checkpoint(str(path))
