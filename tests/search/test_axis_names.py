"""Axes of meshes that a search chose are called by what they do, and only their names differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from plans.priced_plans import MODELS
from shardwise.graph.capture import capture
from shardwise.layouts.strategy import Strategy
from shardwise.report.search_reports import SearchReport
from shardwise.search.axis_names import AxisUsage, mesh_by_roles
from shardwise.search.constants import TIED_SHARE
from shardwise.search.user_choices import annotated_rules

H100 = sw.Cluster.load("h100-1x8")
NODES = sw.Cluster.load("a100-80-2x4")


class Experts(nn.Module):
    """Every expert sees all tokens, and a softmax weighs what they say."""

    def __init__(self, experts: int = 8, width: int = 256, inner: int = 1024) -> None:
        super().__init__()
        self.weigh = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, inner) / 16)
        self.down = nn.Parameter(torch.randn(experts, inner, width) / 32)

    def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
        shares = self.weigh(x).softmax(-1).permute(2, 0, 1)[..., None]
        inner = torch.einsum("btd,edh->ebth", x, self.up).relu()
        return ((torch.einsum("ebth,ehd->ebtd", inner, self.down) * shares).sum(0) - wanted).square().mean()


def experts() -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return Experts(), (torch.empty(16, 128, 256), torch.empty(16, 128, 256))


def model(name: str) -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return MODELS[name].build(), MODELS[name].inputs()


@pytest.mark.parametrize(
    ("name", "cluster", "expected"),
    [
        ("gpt", H100, "Mesh(dp=8)"),
        ("resnet", NODES, "Mesh(dp=8)"),
        ("big-embedding", NODES, "Mesh(tp=2, dp=4)"),  # over the network the table alone is split
        ("dlrm", H100, "Mesh(dp=8)"),  # a tie with Mesh(dp=4, tp=2)
    ],
)
@pytest.mark.sampled(1)
def test_names_say_what_axes_split(name: str, cluster: sw.Cluster, expected: str) -> None:
    module, inputs = model(name)
    assert str(sw.plan(module, inputs, cluster).mesh) == expected


def test_a_plan_that_ties_says_what_it_is_slower_than() -> None:
    module, inputs = model("dlrm")
    plan = sw.plan(module, inputs, H100)
    assert plan.prediction.faster is not None
    slower = plan.prediction.faster.plainer_seconds / plan.prediction.faster.simulated_seconds - 1
    assert 0 < slower <= TIED_SHARE - 1
    said = f"{slower:.1%} slower than the fastest plan (Mesh(dp=4, tp=2), 3 kinds of splits), within the interval"
    assert said in str(plan)
    assert said in str(plan.report.explain("tables.0/embedding"))
    assert sw.Plan.from_json(plan.to_json()) == plan.plan


def test_weights_with_a_matrix_for_each_head_are_no_experts() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.out = nn.Parameter(torch.empty(8, 512, 64)), nn.Parameter(torch.empty(8, 64, 512))

        def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
            q = torch.einsum("btw,hwd->bhtd", x, self.q).relu()
            return (torch.einsum("bhtd,hdw->btw", q, self.out) - wanted).square().mean()

    with torch.device("meta"):
        module, inputs = Heads(), (torch.empty(4, 512, 512),) * 2
    names = [name for name, _ in sw.plan(module, inputs, H100).mesh.axes]
    assert not {"ep", "node", "node1", "node2"}.intersection(names)


def test_a_token_that_every_sample_gets_is_no_weight() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.up = nn.Parameter(torch.empty(1, 1, 256)), nn.Linear(256, 256)

        def forward(self, x: Tensor, wanted: Tensor) -> Tensor:
            tokens = torch.cat([self.first.expand(len(x), -1, -1), self.up(x)], dim=1)
            return (self.up(tokens)[:, 0] - wanted).square().mean()

    with torch.device("meta"):
        module, inputs = Tokens(), (torch.empty(4096, 64, 256), torch.empty(4096, 256))
    assert {name.rstrip("12") for name, _ in sw.plan(module, inputs, H100).mesh.axes} == {"dp"}


def test_experts_have_an_axis() -> None:
    module, inputs = experts()
    assert [name for name, _ in sw.plan(module, inputs, H100).mesh.axes] == ["ep", "dp"]


def test_only_names_differ(tmp_path: Path) -> None:
    """The plan on the mesh that was chosen, given by hand under other names, is the same under these."""
    module, inputs = model("big-embedding")
    chosen = sw.plan(module, inputs, NODES)
    other = sw.plan(module, inputs, NODES, mesh=sw.Mesh(first=2, second=4))
    assert str(other.mesh) == "Mesh(first=2, second=4)"  # names that a user gives stay
    text = str(other).replace("first", "tp").replace("second", "dp")
    mine, theirs = (printed.partition("\n  communication")[2].splitlines() for printed in (str(chosen), text))
    assert [line.split() for line in mine if "plans of 10" not in line] == [
        line.split() for line in theirs if "plans of 10" not in line
    ]
    chosen.save(tmp_path / "plan.json")
    assert sw.Plan.load(tmp_path / "plan.json") == chosen
    parameter = next(entry.name for entry in chosen.parameters if "tp" in entry.layout)
    for name in (next(entry.name for entry in chosen.operators if "tp" in entry.strategy), parameter):
        told, theirs = chosen.report.explain(name), other.report.explain(name)
        assert str(told) == str(theirs).replace("first", "tp").replace("second", "dp")
        second = told.alternatives[1].choice
        assert (
            chosen.report.what_if(name, second).prediction
            == other.report.what_if(name, theirs.alternatives[1].choice).prediction
        )
    top = str(other.report.top(3)).replace("first", "tp").replace("second", "dp")
    assert (
        str(chosen.report.top(3)).replace("─", "").split() == top.replace("─", "").split()
    )  # rules are as wide as names


def test_a_renamed_plan_is_equal_to_one_device() -> None:
    torch.manual_seed(0)
    module = Experts(4, 8, 16)
    inputs = torch.randn(8, 6, 8), torch.randn(8, 6, 8)
    for settings in ({}, {"zero": 3}, {"global_batch": 8, "micro_batch": 4}):
        plan = sw.plan(module, inputs, sw.Cluster.load("h100-1x8"), **settings)
        assert any(entry.forward or entry.backward for entry in plan.conversions)
        assert sw.verify(module, inputs, plan).ok


def test_stages_of_one_mesh_have_one_name() -> None:
    module, inputs = model("gpt")
    plan = sw.plan(module, inputs, NODES, stages=2, micro_batch=4)
    meshes = {str(stage.mesh) for stage in plan.stages}
    assert len(meshes) == 1
    assert "node" not in meshes.pop()
    for stage in plan.stages:
        name = next(entry.name for entry in stage.operators if entry.name.endswith("linear"))
        assert stage.strategies[name] in str(plan.report.explain(name))
    assert sw.Plan.from_json(plan.to_json()) == plan


def test_an_axis_that_does_several_things_is_called_by_all_of_them() -> None:
    """Samples in one product and a weight in another; ``rep``, where it splits nothing. The names of two axes that do
    the same are numbered, whatever levels are called."""
    module, inputs = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), (torch.empty(8, 16),)
    captured = capture(module, inputs)
    _, factored = annotated_rules(captured.graph, ())

    def called(mesh: sw.Mesh, first: str, second: str) -> str:
        by_module = {"0": first, "2": second}
        found = {
            op.name: Strategy.parse(by_module[op.module] if op.name.endswith("linear") else "", mesh)
            for op in captured.graph.ops
        }
        return str(mesh_by_roles(mesh, [AxisUsage(captured.graph, factored.rules, found)])[0])

    mesh = sw.Mesh(node=2, rack=2, machine=2)
    assert called(mesh, "m@node m@rack", "n@node m@machine") == "Mesh(dp_tp=2, dp1=2, dp2=2)"
    assert called(mesh, "n@node k@rack", "m@machine") == "Mesh(tp1=2, tp2=2, dp=2)"
    unused = sw.Mesh(dp1=2, rack=2, machine=2)
    assert called(unused, "m@(rack,machine)", "m@rack") == "Mesh(rep=2, dp1=2, dp2=2)"


def test_the_page_of_stages_has_the_names_of_the_plan() -> None:
    module, inputs = model("gpt")
    plan = sw.plan(module, inputs, NODES, stages=2, micro_batch=4)
    assert isinstance(plan.report, SearchReport)
    split = 0
    for stage, known in zip(plan.stages, plan.report.stage_figures(), strict=True):
        for entry in stage.operators:
            if entry.name.endswith("linear"):
                rows = (known.why(entry.name) or {})["rows"]
                assert [choice for choice, is_chosen, *_ in rows if is_chosen] == [entry.strategy]
                split += "@" in entry.strategy
    assert split


def test_axes_whose_parts_differ_have_the_names_of_the_plan() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    settings: dict[str, Any] = {"search": "dynamic_programming", "strategies": {"0": ((2, 1), (1, 1))}}
    plan = sw.plan(module, (torch.empty(64, 16),), H100, max_mesh_axes=1, **settings)
    assert plan.pricing is not None
    assert plan.pricing.separate == tuple(name for name, _ in plan.mesh.axes) == ("dp",)
