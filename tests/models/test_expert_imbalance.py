"""``imbalance=``: rows planned for on the busiest owner of experts, in layouts, prices, memory, files and errors."""

from __future__ import annotations

from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from launch.gloo_ranks import RunRanks
from models.test_expert_exchange import CUBE, EP, Routed, exchanges, planned
from raising import raises
from shardwise.layouts.text import parse_layout
from shardwise.runtime import messages


def test_rows_of_the_busiest_owner_follow_the_imbalance() -> None:
    module, batch, plan = planned("qwen3_moe", EP, imbalance=2)
    rows = batch["input_ids"].numel() * 2 * 2 // 4  # two experts a token, twice the mean, four owners
    assert {collective.num_bytes for collective in exchanges(plan)} == {rows * 32 * 4}
    assert "2 times the mean" in str(plan)
    assert sw.verify(module, batch, plan).is_equal


def test_a_keyed_layout_says_how_many_rows_it_plans_for() -> None:
    for factor, rows in ((1, 32), (1.2, 39), (1.5, 48), (4, 128)):  # of 128 rows on four owners
        text = "[64, 32] keyed(2@ep)" if factor == 1.2 else f"[64, 32] keyed(2@ep*{factor:g})"
        layout = parse_layout(text, EP)
        assert str(layout) == text
        assert layout.dual == layout
        assert layout.local_shape(dict.fromkeys(EP.sub_axes, 0)) == (rows, 32) == layout.max_local_shape
    for wrong in ("keyed(2@ep*)", "keyed(2@ep*0)", "keyed(ep*x)", "keyed(ep*1e3)", "keyed(ep*-1)"):
        with raises(sw.errors.NotationError, "keyed(2@ep*1.5)"):
            parse_layout(f"[64, 32] {wrong}", EP)


def test_more_rows_cost_more_seconds_and_bytes() -> None:
    def planned_for(imbalance: float) -> Any:
        with torch.device("meta"):
            module, batch = Wide(), (torch.empty(8, 512, 256), torch.empty(8, 512, 2, dtype=torch.int64))
        options = {"mesh": sw.Mesh(ep=8), "search": "dynamic_programming", "strategies": {"": "K@ep"}}
        return sw.plan(module, batch, sw.Cluster.load("h100-1x8"), imbalance=imbalance, **options)

    even, usual, worst = (planned_for(factor) for factor in (1, 1.2, 8))
    assert even.prediction.additive_price < usual.prediction.additive_price < worst.prediction.additive_price
    assert even.prediction.planned_seconds < usual.prediction.planned_seconds < worst.prediction.planned_seconds
    assert even.prediction.memory_bytes < usual.prediction.memory_bytes < worst.prediction.memory_bytes
    assert even.plan.digest != usual.plan.digest


class Wide(nn.Module):
    """One product by expert, with two of eight experts for every token, which depends on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.up = nn.Parameter(torch.empty(256)), nn.Parameter(torch.empty(8, 256, 1024))

    def forward(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        rows, experts = (x * self.scale).flatten(0, 1), chosen.flatten()
        expert, order = experts.sort(stable=True)
        ends = nn.functional.one_hot(expert, 8).sum(0).cumsum(0).to(torch.int32)
        hidden = nn.functional.grouped_mm(rows[order // 2], self.up, offs=ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return hidden[back].unflatten(0, (-1, 2)).sum(1).square().mean()


def test_a_plan_keeps_its_imbalance(tmp_path: Path) -> None:
    module, batch, plan = planned("qwen3_moe", EP, imbalance=1.5)
    plan.save(tmp_path / "plan.json")
    again = sw.Plan.load(tmp_path / "plan.json")
    assert again == plan.plan
    assert again.imbalance == 1.5
    assert exchanges(again) == exchanges(plan)
    assert sw.verify(module, batch, again).is_equal
    assert "imbalance" in str(plan.diff(planned("qwen3_moe", EP)[2].plan))
    text = (tmp_path / "plan.json").read_text().replace('"imbalance": 1.5', '"imbalance": 0.5')
    (tmp_path / "edited.json").write_text(text)
    with raises(sw.errors.PlanError, 0.5):
        sw.Plan.load(tmp_path / "edited.json", edited=True)


@pytest.mark.parametrize("imbalance", [0.5, 0, -1, nan, inf, "1.5", True, None])
def test_an_imbalance_that_no_routing_has_is_refused(imbalance: Any) -> None:
    with raises(sw.errors.ShardwiseError, "imbalance", fix="default 1.2"):
        planned("qwen3_moe", EP, imbalance=imbalance)


def test_an_imbalance_above_the_owners_is_refused_with_the_arithmetic() -> None:
    with raises(sw.errors.ShardwiseError, 5, 4, fix="from 1 to 4"):
        planned("qwen3_moe", EP, imbalance=5)
    with raises(sw.errors.LayoutError, 3, "2 devices", "experts/grouped_mm", fix="from 1 to 2"):
        planned("qwen3_moe", CUBE, imbalance=3)
    with raises(sw.errors.ShardwiseError, 1.5, fix="leave imbalance= out"):
        sw.plan(nn.Linear(8, 8), torch.zeros(8, 8), 4, imbalance=1.5)


class NoMemory(torch.Tensor):
    """Rows for whose arrival there is no memory."""

    @staticmethod
    def new_empty(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def crowd_one_rank(chosen: int) -> tuple[str, str]:
    """On a rank: all tokens go to experts of the first, which cannot take them."""
    module = Routed()
    batch = torch.randn(4, 8, 8), torch.full((4, 8, 2), chosen)
    par = sw.parallelize(module, sw.plan(module, batch, 2, mesh=sw.Mesh(ep=2), search="sharding_propagation"))
    wire = messages._wire
    messages._wire = lambda tensor: wire(tensor).as_subclass(NoMemory) if sw.rank() == 0 else wire(tensor)
    try:
        par(*batch)
    except sw.errors.ShardwiseError as error:
        return type(error).__name__, str(error)
    finally:
        messages._wire = wire
    return "", ""


def test_rows_beyond_memory_name_the_layer_and_end_all_ranks(run_ranks: RunRanks) -> None:
    first, second = run_ranks(crowd_one_rank, 2, 0)
    kind, text = first
    assert kind == "OutOfDeviceMemoryError", text
    assert "out of memory on rank 0: 64 rows belong to its experts in this step" in text
    assert "the plan has memory for 39 (1.2 times the mean of 2 owners)" in text
    assert "grouped_mm" in text
    assert "imbalance=1.97 or more" in text
    assert second[0] == "CollectiveError", second


def test_an_owner_s_products_take_its_rows_of_all_seconds_forward_and_backward() -> None:
    plans = {}
    for strategy in ("K@ep", "n@ep"):
        with torch.device("meta"):
            module, batch = Wide(), (torch.empty(64, 512, 256), torch.empty(64, 512, 2, dtype=torch.int64))
        options = {
            "mesh": sw.Mesh(ep=8),
            "search": "dynamic_programming",
            "strategies": {"": strategy},
            "row_chunks": 1,
        }
        plans[strategy] = sw.plan(module, batch, sw.Cluster.load("h100-1x8"), **options)
    ours, columns = (plan.report.explain("/grouped_mm").chosen.terms[0] for plan in plans.values())
    assert 1.1 * columns.compute < ours.compute < 1.3 * columns.compute, "1.2 times the mean, and sorting the keys"
    flops = 3 * 2 * 64 * 512 * 2 * 256 * 1024
    assert ours.compute > 1.2 * flops / 8 / 66.9e12, "forward, and backward of twice as much, at the peak of f32"
    assert ours.exposed > 0, "the exchange of the counts"
    assert plans["K@ep"].prediction.additive_price == pytest.approx(plans["K@ep"].prediction.step_seconds, rel=0.05)
