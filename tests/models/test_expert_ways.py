"""``plan.report.explain("experts")``: gathering, travelling and splitting columns beside each other, per layer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from models.expert_models import WIDTH, Batched
from models.test_expert_imbalance import Wide
from raising import raises
from shardwise.commands.json_output import explanation_data

EP = sw.Mesh(ep=8)


class Layers(nn.Module):
    """Layers of experts, of which the first has one of eight for every token, and the second all eight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.all = (nn.Parameter(torch.empty(8, 1024, 1024)) for _ in range(2))

    def forward(self, x: Tensor, one: Tensor, every: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        rows = self.routed(rows, one.flatten(), self.one)
        return self.routed(rows, every.flatten(), self.all).square().mean()

    @staticmethod
    def routed(rows: Tensor, experts: Tensor, weight: Tensor) -> Tensor:
        copies = len(experts) // len(rows)
        expert, order = experts.sort(stable=True)
        ends = nn.functional.one_hot(expert, 8).sum(0).cumsum(0).to(torch.int32)
        hidden = nn.functional.grouped_mm(rows[order // copies], weight, offs=ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return hidden[back].unflatten(0, (-1, copies)).sum(1)


def planned_layers(**options: Any) -> Any:
    with torch.device("meta"):
        batch = torch.empty(16, 512, 1024), *(torch.empty(16, 512, n, dtype=torch.int64) for n in (1, 8))
        module = Layers()
    settings = {"mesh": EP, "search": "dynamic_programming", "precision": sw.Precision(compute=torch.bfloat16)}
    return sw.plan(module, batch, sw.Cluster.load("h100-1x8"), **settings, **options)


def test_every_layer_has_its_own_cheapest_way() -> None:
    plan = planned_layers()
    ways = plan.report.explain("experts")
    assert [len(layer.names) for layer in ways.layers] == [1, 1]
    for layer in ways.layers:
        assert {way.way for way in layer.ways} == {"exchange", "gather", "columns", "whole"}
        assert sum(way.chosen for way in layer.ways) == 1
        assert [way.price for way in layer.ways] == sorted(way.price for way in layer.ways)
        (chosen,) = (way for way in layer.ways if way.chosen)
        assert plan.strategies[layer.names[0]] == chosen.strategy.replace("whole", "")
        assert chosen.price == pytest.approx(plan.prediction.additive_price)
    first, second = ({way.way: way.price for way in layer.ways} for layer in ways.layers)
    assert first["exchange"] < first["gather"], "a token travels to one of eight owners"
    assert second["gather"] < second["exchange"], "a token travels to all eight, with a copy each"
    text = str(ways)
    assert "1.2 times the mean" in text
    assert text.count("*") == 2
    json.dumps(explanation_data(ways))


@pytest.mark.parametrize("strategy", ["K@ep", "e@ep", "n@ep"])
def test_a_way_costs_what_the_plan_with_that_strategy_costs(strategy: str) -> None:
    def planned(**options: Any) -> Any:
        with torch.device("meta"):
            module, batch = Wide(), (torch.empty(8, 512, 256), torch.empty(8, 512, 2, dtype=torch.int64))
        settings = {"mesh": EP, "search": "dynamic_programming"}
        return sw.plan(module, batch, sw.Cluster.load("h100-1x8"), **settings, **options)

    (layer,) = planned().report.explain("experts").layers
    (way,) = (way for way in layer.ways if way.strategy == strategy)
    fixed = planned(strategies={"": strategy})
    assert fixed.strategies[layer.names[0]] == strategy
    assert way.price <= fixed.prediction.additive_price * (1 + 1e-6)
    (only,) = fixed.report.explain("experts").layers
    assert {way.strategy for way in only.ways} <= {strategy, "K@ep"}


class Centred(Batched):
    """Between its two products the rows of all experts lose their mean."""

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        of_rows = chosen.reshape(-1)
        rows = torch.bmm(tokens.repeat_interleave(2, 0).unsqueeze(1), self.up[of_rows]).squeeze(1)
        rows = torch.bmm((rows - rows.mean(0)).unsqueeze(1), self.down[of_rows]).squeeze(1)
        return (rows * weights.reshape(-1, 1)).view(-1, 2, WIDTH).sum(1)


def test_an_operator_that_mixes_rows_between_products_is_named_and_exact() -> None:
    module, x = Centred(), torch.randn(4, 8, WIDTH)
    plan = sw.plan(module, (x,), 4, mesh=sw.Mesh(ep=4), strategies={"": "e@ep"}, search="dynamic_programming")
    (layer,) = plan.report.explain("experts").layers
    assert layer.mixed_by == ("/sum",), "as which the mean is captured"
    assert "/sum" in str(plan.report.explain("experts"))
    assert sw.verify(module, (x,), plan).is_equal
    travelling = sw.plan(module, (x,), 4, mesh=sw.Mesh(ep=4), strategies={"": "K@ep"})
    assert sum(c.kind == "row_exchange" for c in travelling.collectives()) > 2, "rows return for the mean"
    assert sw.verify(module, (x,), travelling).is_equal


def test_stages_name_their_layers_as_the_plan_does() -> None:
    with torch.device("meta"):
        module = Layers()
        batch = torch.empty(16, 512, 1024), *(torch.empty(16, 512, n, dtype=torch.int64) for n in (1, 8))
    options = {"mesh": sw.Mesh(ep=4), "search": "dynamic_programming", "stages": 2, "micro_batch": 8}
    plan = sw.plan(module, batch, sw.Cluster.load("h100-1x8"), **options)
    names = [name for layer in plan.report.explain("experts").layers for name in layer.names]
    assert sorted(names) == sorted(entry.name for entry in plan.operators if "grouped_mm" in entry.target)


def test_a_model_without_experts_has_no_ways() -> None:
    plan = sw.plan(nn.Linear(8, 8), torch.zeros(8, 8), sw.Cluster.load("h100-1x8"), search="dynamic_programming")
    with raises(sw.errors.PlanError, "no experts"):
        plan.report.explain("experts")
