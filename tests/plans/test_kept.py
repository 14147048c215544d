"""``sw.plan(layouts=...)`` and ``sw.constrain(x, "summed")``: what is decided after everything else is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import LayoutError

INPUTS = (torch.randn(16, 32), torch.randn(16, 16))
FED = {"args[0]": (8, 1), "args[1]": (8, 1)}


class TwoProducts(nn.Module):
    """Documents 003: a product whose contraction is split, ReLU, and another product."""

    def __init__(self, summed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.w2, self.summed = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 16)), summed

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        hidden = sw.shard(torch.matmul, ((2, 4), (4, 1)))(x, self.w)
        hidden = sw.constrain(hidden, "summed") if self.summed else hidden
        return (hidden.relu() @ self.w2 - label).square().mean()


def planned(summed: bool = False, **settings: Any) -> sw.Plan:
    module = TwoProducts(summed)
    plan = sw.plan(module, INPUTS, 8, mesh=sw.Mesh(x=8), **settings)
    report = sw.verify(module, INPUTS, plan)
    assert report.ok, report
    return plan


@pytest.mark.parametrize("search", ["sharding_propagation", "dynamic_programming"])
def test_inputs_are_delivered_and_parameters_kept_as_asked_for(search: str) -> None:
    plan = planned(search=search, layouts={**FED, "w2": "[16, 16@x]"})
    assert [entry.layout for entry in plan.inputs] == ["f32[16@x, 32]", "f32[16@x, 16]"]
    assert {entry.name: entry.layout for entry in plan.parameters}["w2"] == "f32[16, 16@x]"
    free = planned(search=search)
    assert [e.strategy for e in free.operators if "matmul" in e.name] == [
        e.strategy for e in plan.operators if "matmul" in e.name
    ]


def test_a_summed_value_is_reduced_whole_and_then_sliced() -> None:
    def to_relu(plan: sw.Plan) -> list[str]:
        return [f"{c.kind}" for e in plan.conversions for c in e.forward if e.op in ("/alias", "/relu")]

    free, summed = planned(), planned(summed=True)
    assert to_relu(free) == ["reduce_scatter"]
    assert to_relu(summed) == ["all_reduce"]
    chosen = {own.name: own.strategy for own in summed.operators}
    assert {name: own for name, own in chosen.items() if name != "/alias"} == {
        own.name: own.strategy for own in free.operators
    }
    assert chosen["/alias"] == "d0@x.0"


@pytest.mark.parametrize(
    ("layouts", "words"),
    [
        ({"args[2]": (8, 1)}, r"'args\[2\]'"),
        ({"w": (8,)}, "1 split counts for 2 dims"),
        ({"w": (3, 1)}, "3 is no product"),
        ({"w": "[16@x, 32]"}, r"of shape \[16, 32\], not \[32, 16\]"),
    ],
)
def test_layouts_that_do_not_fit_are_named(layouts: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        planned(layouts=layouts)
