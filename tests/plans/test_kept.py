"""``sw.plan(layouts=...)`` and ``sw.constrain(x, "summed")``: what is decided after everything else is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from proving import prove
from raising import raises
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
    prove(module, INPUTS, plan)
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
        ({"args[2]": (8, 1)}, "'args[2]'"),
        ({"w": (8,)}, ("(8,)", "1 split counts for 2 dims")),
        ({"w": (3, 1)}, ("(3, 1)", "3 is no product", "[2, 2, 2]")),
        ({"w": "[32, 16] partial(sum@x)"}, ("'[32, 16] partial(sum@x)'", "split evenly, and whole")),
        ({"w": "[32, 16] replicated(x)"}, ("'[32, 16] replicated(x)'", "split evenly, and whole")),
        ({"w": "[32@x{0:4|4:8|8:12|12:16|16:20|20:24|24:28|28:32}, 16]"}, "split evenly, and whole"),
        ({"w": 8}, ("kept as 8", "whole numbers, one per dim")),
        ({"w": (2.0, 1)}, ("(2.0, 1)", "whole numbers, one per dim")),
        ({"w": "[16@x, 32]"}, "of shape [16, 32], not [32, 16]"),
    ],
)
def test_layouts_that_do_not_fit_are_named(layouts: dict[str, Any], words: object) -> None:
    with raises(LayoutError, words):
        planned(layouts=layouts)


def test_a_layout_of_no_tensor_is_named_with_stages_too() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    settings: dict[str, Any] = {"loss": lambda output: output.square().mean(), "stages": 2}
    with raises(LayoutError, "'2.weight'", "'1.weight'"):
        sw.plan(module, torch.randn(8, 16), 4, layouts={"2.weight": (2, 1)}, **settings)


def test_axes_in_a_layout_need_a_mesh() -> None:
    module, batch = nn.Linear(16, 16), torch.randn(8, 16)
    with raises(LayoutError, ("'[16@tp, 16]'", "mesh=")):
        sw.plan(module, batch, "h100-1x8", layouts={"weight": "[16@tp, 16]"})
    assert sw.plan(module, batch, "h100-1x8", layouts={"weight": (8, 1)}).parameters[0].layout.startswith("f32[16@")


def test_two_names_of_one_parameter_are_not_kept_in_two_layouts() -> None:
    module = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False))
    module[1].weight = module[0].weight
    settings: dict[str, Any] = {"loss": lambda output: output.square().mean(), "mesh": sw.Mesh(x=4)}
    with raises(LayoutError, "0.weight and 1.weight", "one tensor"):
        sw.plan(module, torch.randn(8, 16), 4, layouts={"0.weight": (4, 1), "1.weight": (1, 4)}, **settings)
    plan = sw.plan(module, torch.randn(8, 16), 4, layouts={"0.weight": (4, 1), "1.weight": "[16@x, 16]"}, **settings)
    assert [entry.layout for entry in plan.parameters] == ["f32[16@x, 16]"]


def test_the_prediction_counts_what_keeping_costs() -> None:
    """Conversions from the layouts that are kept are no part of what was searched."""
    free = planned(search="dynamic_programming").prediction
    plans = [planned(search="dynamic_programming", layouts={**FED, "w2": counts}) for counts in ((1, 1), (1, 8))]
    kept, split = (plan.prediction for plan in plans)
    assert free is not None
    assert kept is not None
    assert split is not None
    elements = [{name: plan.layouts[name].max_local_numel for name in ("w", "w2")} for plan in plans]
    assert [of_plan["w2"] for of_plan in elements] == [16 * 16, 16 * 16 / 8]
    more = sum(elements[0].values()) - sum(elements[1].values())
    assert kept.num_bytes - split.num_bytes == more * 4 * 4  # themselves, their gradients and two states in float32
    for own in (kept, split):
        assert own.pass_seconds > free.pass_seconds
        assert own.bound == free.bound
        assert own.optimality_gap == pytest.approx(own.pass_seconds / own.bound - 1)


def test_a_fused_projection_is_kept_block_by_block() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return (q * k + v.tanh()).sum()

    def planned(layout: Any) -> str:
        plan = sw.plan(
            Fused(), torch.randn(4, 16), 2, mesh=sw.Mesh(tp=2), mode="semi_auto", layouts={"qkv.weight": layout}
        )
        return str(plan.layouts["qkv.weight"])

    mend = "[(3 16@tp), 16]"
    with raises(LayoutError, "each of", f'them, "{mend}"'):
        planned("[48@tp, 16]")
    assert planned(mend) == mend
    assert planned((2, 1)) == mend  # counts do not say where


def test_counts_that_do_not_divide_the_heads_split_each_of_them() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(48, 48, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x).unflatten(-1, (3, 16)).transpose(1, 2).softmax(-1).square().mean()

    module, x = Attention(), torch.randn(8, 4, 48)
    for counts, layout in (((4, 1), "[(3 16@dp), 48]"), ((1, 4), "[48, 48@dp]")):
        plan = sw.plan(module, x, 4, mesh=sw.Mesh(dp=4), mode="data_parallel", layouts={"q.weight": counts})
        assert str(plan.layouts["q.weight"]) == layout
        assert sw.verify(module, (x,), plan).ok


@pytest.mark.parametrize(
    ("options", "layout"),
    [
        ({"mesh": sw.Mesh(dp=8), "mode": "data_parallel"}, "[(12 64@dp), 768]"),
        ({"mesh": sw.Mesh(dp=8), "search": "dynamic_programming"}, "[(12 64@dp), 768]"),
        (
            {"mesh": sw.Mesh(dp=2, tp=4), "search": "sharding_propagation", "strategies": {"q": "n@tp"}},
            "[(12 64@(dp,tp)), 768]",
        ),
    ],
)
@pytest.mark.sampled(1)
def test_eight_devices_store_twelve_heads_of_64(options: dict[str, Any], layout: str) -> None:
    """96 rows each, whatever divides the product: eight rows of every head."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.kv = nn.Linear(768, 768, bias=False), nn.Linear(768, 1536, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (12, 64)).transpose(1, 2) for t in (self.q(x), *self.kv(x).chunk(2, -1)))
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()

    module, x = Attention(), torch.randn(8, 3, 768)
    plan = sw.plan(module, x, 8, layouts={"q.weight": (8, 1)}, **options)
    assert str(plan.layouts["q.weight"]) == layout
    assert plan.layouts["q.weight"].max_local_numel == 96 * 768
    assert sw.verify(module, (x,), plan, steps=1).ok
