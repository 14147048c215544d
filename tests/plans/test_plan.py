"""The plan as a file: it comes back equal, can be edited by hand, and is refused where it does not fit."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from proving import prove
from raising import raises
from shardwise.graph.capture import capture
from shardwise.plans.bind import bind
from shardwise.plans.file import VERSION

MESH = sw.Mesh(dp=2, tp=4)


class Mlp(nn.Module):
    """With dropout and a buffer, so that training and evaluation differ."""

    def __init__(self, width: int = 8, hidden: int = 16, act: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("scale", torch.ones(width))
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(self.dropout(self.act(self.up(x)))) * self.scale).square().mean()


X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return sw.plan(Mlp(), X, 8, mesh=MESH, strategies={"up": "n@tp"})


@pytest.fixture
def edit(plan: sw.Plan, tmp_path: Path) -> Callable[..., Path]:
    def write(change: Callable[[dict[str, Any]], object]) -> Path:
        data = json.loads(plan.to_json())
        change(data)
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(data, indent=1))
        return path

    return write


def refused(path: Path, *values: object, edited: bool = True) -> None:
    with raises(sw.PlanError, *values):
        sw.Plan.load(path, edited=edited)


def misfit(plan: sw.Plan, module: nn.Module, *values: object, inputs: Any = X) -> None:
    """``verify`` refuses a plan that is not for this call."""
    with raises(sw.PlanError, *values):
        sw.verify(module, inputs, plan)


# --------------------------------------------------------------------------------------------------- coming back


def test_a_saved_plan_comes_back_equal_with_the_same_digest(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert (loaded.digest, loaded.model, str(loaded)) == (plan.digest, plan.model, str(plan))
    assert sw.Plan.from_json(plan.to_json()) == plan
    assert sw.verify(Mlp(), X, loaded).ok


def test_the_same_model_gives_the_same_plan_and_any_difference_another_digest(plan):
    again = sw.plan(Mlp(), X, 8, mesh=MESH, strategies={"up": "n@tp"})
    others = [
        sw.plan(Mlp(), X, 8, mesh=MESH, search="sharding_propagation"),
        sw.plan(Mlp(), X, 8, mesh=sw.Mesh(tp=4, dp=2), strategies={"up": "n@tp"}),
        sw.plan(Mlp(), X, 8, mesh=MESH, strategies={"up": "n@tp"}, optimizer="sgd"),
        sw.plan(Mlp().eval(), X, 8, mesh=MESH, strategies={"up": "n@tp"}),
    ]
    assert again == plan
    assert again.digest == plan.digest
    assert len({plan.digest, *(other.digest for other in others)}) == 5
    assert plan not in others


def test_the_order_of_mesh_axes_is_part_of_the_digest(plan):
    """Device order follows it: ranks that disagree about it must not pass for equal."""
    data = json.loads(plan.to_json())
    data["stages"][0]["mesh"] = dict(reversed(data["stages"][0]["mesh"].items()))
    turned = sw.Plan.from_json(json.dumps(data), edited=True)
    assert turned.mesh == sw.Mesh(tp=4, dp=2)
    assert turned.digest != sw.Plan.from_json(plan.to_json(), edited=True).digest


def test_the_fingerprint_is_that_of_the_model_and_not_of_the_split(plan):
    whole = sw.plan(Mlp(), X, 4, mode="stand_alone")
    assert whole.model == plan.model
    assert sw.plan(Mlp(act=torch.sigmoid), X, 8, search="sharding_propagation").model != plan.model
    assert sw.plan(Mlp(hidden=32), X, 8, search="sharding_propagation").model != plan.model


def test_the_file_can_be_read_by_a_person(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["stages"][0]["mesh"] == {"dp": 2, "tp": 4}
    assert data["stages"][0]["parameters"]["up.weight"] == {
        "dtype": "f32",
        "shape": [16, 8],
        "layout": "f32[16@tp, 8]",
        "again": False,
    }
    linear = data["stages"][0]["operators"]["up/linear"]
    assert linear["strategy"] == "m@dp n@tp"
    assert linear["rule"] == "m k, n k -> m n  k:sum"
    assert re.fullmatch(r"test_plan\.py:\d+", linear["source"])
    entry = next(entry for entry in data["stages"][0]["conversions"] if entry["value"] == "up.weight")
    assert entry["op"] == "up/linear"
    assert (entry["source"], entry["target"]) == ("f32[16@tp, 8]", "f32[16@tp, 8] replicated(dp)")
    assert entry["forward"] == []
    assert entry["backward"] == [{"kind": "all_reduce", "axes": "dp", "num_bytes": 4 * 8 * 4}]


def test_a_plan_whose_devices_all_compute_the_same_is_known():
    module, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), (torch.rand(8, 4), torch.rand(8, 2))
    free = sw.plan(module, x, 8, loss=F.mse_loss)
    assert free.splits_nothing
    assert "nothing is split: each of 8 devices" in str(free)
    options = ({"mode": "data_parallel"}, {"mesh": sw.Mesh(tp=2), "strategies": {"0": "n@tp"}}, {"stages": 2})
    others = [
        sw.plan(module, x, 2, loss=F.mse_loss, **of_case)
        for of_case in (*options, {"mode": "data_parallel", "zero": 3})
    ]
    others.append(sw.plan(module, x, 1, loss=F.mse_loss))
    assert not any(plan.splits_nothing or "nothing is split" in str(plan) for plan in others)


def test_every_listed_collective_has_the_bytes_of_its_message(plan):
    """The gathered tensor of an all_gather, the input of the others, on the busiest rank."""
    found = {(c.value, e.kind): e.num_bytes for c in plan.conversions for e in (*c.forward, *c.backward)}
    assert found["down.weight", "all_reduce"] == 8 * 16 // 4 * 4
    assert found["down.bias", "all_reduce"] == 8 * 4
    assert found["/sum", "all_reduce"] == 4


# ------------------------------------------------------------------------------------------------- hand editing


def test_a_strategy_changed_by_hand_is_followed_and_the_plan_still_equals_one_device(edit):
    path = edit(lambda data: data["stages"][0]["operators"]["/relu"].update(strategy="d0@dp"))
    refused(path, "digest", "edited=True", edited=False)
    edited = sw.Plan.load(path, edited=True)
    assert edited.strategies["/relu"] == "d0@dp"
    report = prove(Mlp(), X, edited)
    assert "all_gather" in {collective.kind for collective in report.forward}


def test_a_layout_changed_by_hand_is_followed(edit):
    path = edit(lambda data: data["stages"][0]["parameters"]["up.weight"].update(layout="f32[16@(tp,dp), 8]"))
    edited = sw.Plan.load(path, edited=True)
    report = prove(Mlp(), X, edited)
    assert report.forward[0].kind == "all_gather"
    assert "collective_permute" not in {c.kind for c in report.forward}, "the order of the axes is the one asked for"


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ("j@tp", ["'j'", "m k, n k -> m n"]),
        ("P@tp k@dp I@tp", ["tp", "used more than once"]),
        ("n@tpp", ["'tpp'", "dp=2", "tp=4"]),
        ("n tp", ["m@dp n@tp", "^"]),
    ],
)
def test_a_wrong_strategy_names_its_operator_and_line_and_what_can_be_split(edit, strategy, said):
    path = edit(lambda data: data["stages"][0]["operators"]["up/linear"].update(strategy=strategy))
    with raises(sw.PlanError, said, "m k, n k -> m n", "up/linear (test_plan.py"):
        sw.verify(Mlp(), X, sw.Plan.load(path, edited=True))


def test_all_wrong_strategies_are_listed_at_once(edit):
    def change(data):
        data["stages"][0]["operators"]["up/linear"]["strategy"] = "j@tp"
        data["stages"][0]["operators"]["/relu"]["strategy"] = "P@tp"

    misfit(sw.Plan.load(edit(change), edited=True), Mlp(), "'j'", "up/linear (", "/relu (", "d0 d1 -> d0 d1", "partial")


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("f32[16@tp, 4]", "has shape [16, 4], the tensor [16, 8]"),
        ("f32[16@tq, 8]", "'tq'"),
        ("f32[16, 8] replicated(tp)", "never replicated or partial"),
        ("f32[16, 8] partial(sum@tp)", "never replicated or partial"),
        ("f32[16, 8", "']' is missing"),
        ("f32[16@tp, 8@tp]", "used more than once"),
    ],
)
def test_a_wrong_layout_names_its_parameter(edit, layout, said):
    path = edit(lambda data: data["stages"][0]["parameters"]["up.weight"].update(layout=layout))
    refused(path, said, "parameter up.weight")


def test_an_input_can_not_be_given_replicated(edit):
    path = edit(lambda data: data["stages"][0]["inputs"]["args[0]"].update(layout="f32[16, 8] replicated(dp)"))
    refused(path, "f32[16, 8] replicated(dp)", "inputs")


# ------------------------------------------------------------------------------------------------ damaged files


def test_a_truncated_file_says_where_it_ends(plan, tmp_path):
    path = tmp_path / "plan.json"
    text = plan.to_json()
    for length in (0, 10, len(text) // 2, len(text) - 1):
        path.write_text(text[:length])
        refused(path, "JSON", f"{length:,}", edited=False)


def test_a_file_that_was_tampered_with_is_refused_and_says_how_to_edit(edit):
    path = edit(lambda data: data["stages"][0]["operators"]["/relu"].update(strategy=""))
    refused(path, json.loads(path.read_text())["digest"][:12], "digest", "Plan.load(path, edited=True)", edited=False)


@pytest.mark.parametrize("content", ["[]", "3", '"plan"', "{}", '{"format": "other"}'])
def test_json_that_is_no_plan_is_refused(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_text(content)
    refused(path, "plan.json", "shardwise")


def test_another_version_is_refused(edit):
    refused(edit(lambda data: data.update(version=99)), "version", 99, VERSION, "sw.plan", edited=False)


def test_a_missing_or_binary_file_is_a_plan_error(tmp_path):
    refused(tmp_path / "none.json", "none.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    refused(tmp_path / "binary", "utf-8")


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("mesh",), "dp=2", 'mesh is "dp=2", not an object'),
        (("mesh",), {"dp": "2"}, ("mesh", "dp", "positive")),
        (("mesh",), {"d p": 2}, "'d p'"),
        (("mode",), 3, "mode is 3, not a text"),
        (("training",), "yes", 'training is "yes", not true or false'),
        (("inputs",), [], "inputs is [], not an object"),
        (("parameters", "up.weight"), "f32", ("parameters['up.weight']", '"f32"')),
        (("parameters", "up.weight", "shape"), "16", 'shape is "16", not a list'),
        (("parameters", "up.weight", "shape"), [16, "8"], 'shape is [16, "8"], not a list of sizes'),
        (("parameters", "up.weight", "shape"), [16, -8], ("parameters['up.weight'].shape", -8, "not a list of sizes")),
        (("parameters", "up.weight", "layout"), None, "stages[0].parameters['up.weight'].layout is null, not a text"),
        (("parameters", "up.weight", "colour"), "red", "unknown entry colour"),
        (("operators", "up/linear", "strategy"), ["n", "tp"], ("operators['up/linear'].strategy", '["n", "tp"]')),
        (("stages",), {}, "stages is {}, not a list"),
        (("stages",), [], "stages is [], a plan has one at least"),
        (("stages", 0), 3, "stages[0] is 3, not an object"),
        (("ranks",), "0-x", ("stages[0].ranks", "0-3,8", "'0-x'")),
        (("conversions",), {}, "conversions is {}, not a list"),
        (("conversions", 0, "path"), [3], "conversions[0].path[0] is 3, not a text"),
        (("conversions", 0, "path"), [], "conversions[0].path is [], and a conversion has moves"),
        (("conversions", 0, "path"), ["dp [16, 8]"], "[16@tp, 8] -> [16, 8]"),
        (("conversions", 0, "overlaps"), 1, "conversions[0].overlaps is 1, not true or false"),
        (("conversions", 0), 1, "conversions[0] is 1, not an object"),
        (("conversions", 0, "backward"), [3], "conversions[0].backward[0] is 3"),
        (("extra",), 1, "unknown entry extra"),
    ],
)  # fmt: skip
def test_an_entry_of_the_wrong_form_is_named(edit, path, value, said):
    def change(data):
        data = data if path[0] in ("mode", "training", "extra", "stages") else data["stages"][0]
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    refused(edit(change), said)


@pytest.mark.parametrize("key", ["mesh", "ranks", "training", "operators", "conversions", "stages"])
def test_a_missing_entry_is_named(edit, key):
    def change(data):
        del (data if key in data else data["stages"][0])[key]

    refused(edit(change), f"{key} is missing")


def test_a_missing_strategy_is_named(edit):
    path = edit(lambda data: data["stages"][0]["operators"]["/relu"].pop("strategy"))
    refused(path, "operators['/relu'].strategy is missing")


# ------------------------------------------------------------------------------------- another model or other inputs


def test_a_plan_for_another_model_names_the_parameters(plan):
    class Other(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.upper, self.down = self.up, nn.Linear(16, 8, bias=False)
            del self.up

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.relu(self.upper(x))).mean()

    misfit(
        plan,
        Other(),
        "parameter up.weight of the plan is missing",
        "the model has upper.weight",
        "parameter down.bias of the plan is missing",
        "parameter upper.bias of the model is not in the plan",
        "sw.plan",
    )


def test_a_plan_for_another_size_or_dtype_shows_both(plan):
    misfit(plan, Mlp(hidden=32), "up.weight is [32, 8]", "[16, 8]")
    graph = capture(Mlp().bfloat16(), (X.bfloat16(),)).graph
    with raises(sw.PlanError, "up.weight is bf16[16, 8]", "f32[16, 8]"):
        bind(plan, graph)


def test_a_plan_for_another_forward_names_the_operators(plan):
    misfit(plan, Mlp(act=torch.sigmoid), "/relu (test_plan.py", "/sigmoid (test_plan.py", "missing")


def test_a_plan_for_training_serves_evaluation_and_other_batch_sizes(plan):
    report = prove(Mlp().eval(), X, plan)
    for size in (8, 6, 3, 1):
        report = sw.verify(Mlp(), X[:size], plan)
        assert report.ok, f"{size}: {report}"


def test_inputs_of_another_dtype_or_rank_are_named_with_both(plan):
    misfit(plan, Scaled(), "args[0]", "dtype i64", "made for f32", inputs=torch.ones(16, 8).long())
    misfit(plan, Mlp(), "args[0]", "3 dims [4, 16, 8]", "made for [16, 8]", inputs=torch.randn(4, 16, 8))


class Scaled(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def test_a_plan_for_other_devices_does_not_plan_and_verifies_on_its_own_mesh(plan):
    with raises(sw.PlanError, "2 x 4 = 8", 16, section="mesh-size"):
        sw.plan(Mlp(), X, 16, mesh=plan.mesh, search="sharding_propagation")
    assert sw.verify(Mlp(), X, plan).ok


def test_planning_needs_no_values_and_changes_nothing(plan):
    with torch.device("meta"):
        model = Mlp()
    before = copy.deepcopy(model.state_dict())
    assert sw.plan(model, X.to("meta"), 8, mesh=MESH, strategies={"up": "n@tp"}) == plan
    assert model.state_dict().keys() == before.keys()
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_bound_plan_keeps_every_tensor_as_it_says_also_over_axes_in_another_order():
    """Ranks hold what the plan's layouts say; the program reads them as the bound layouts say."""
    model = Mlp()
    plan = sw.plan(model, X, 8, mesh=MESH, strategies={"up": "n@(tp,dp)"})
    graph = capture(model, (X,)).graph
    _, choice = bind(sw.Plan.from_json(plan.to_json()), graph, training=True)
    for name, layout in plan.layouts.items():
        value = next(source.value for source in graph.sources if name in source.names)
        assert choice.sources[value].canonical() == layout.canonical()
    assert "16@(tp,dp)" in plan.parameters[1].layout
    assert sw.verify(model, X, plan).ok


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"mesh": {"dp": 2}}, "mesh is {'dp': 2}"),
        ({"precision": torch.bfloat16}, ("torch.bfloat16", "sw.Precision(compute=")),
        ({"optimizer": "adamm"}, "'adamm' is not known"),
    ],
)
def test_settings_of_another_kind_are_refused_in_every_mode(settings: dict[str, Any], what: object) -> None:
    with raises(sw.ShardwiseError, what):
        sw.plan(torch.nn.Linear(4, 4), torch.ones(4, 4), 2, mode="data_parallel", **settings)


def test_predictions_of_stages_saved_before_later_fields_are_read():
    """Weight, send, update, bound and memory came to files of this version; those without say that they are not
    known."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    example = torch.zeros(8, 4), torch.zeros(8, 4)
    options = {"search": "sharding_propagation", "stages": 2, "micro_batch": 4, "loss": nn.functional.mse_loss}
    data = json.loads(sw.plan(model, example, 2, mesh=sw.Mesh(dp=1), **options).to_json())
    stage = {"forward": 1.0, "backward": 2.0, "peak_bytes": 3.0, "sent_bytes": 4.0, "bubble": 0.5}
    data["pipeline"] = {"step_seconds": 9.0, "bubble": 0.5, "stages": [stage, stage]}
    read = sw.Plan.from_json(json.dumps(data), edited=True).pipeline
    assert (read.bound_seconds, read.memory_bytes) == (0.0, 0.0)
    assert all((one.forward, one.weight, one.send, one.update) == (1.0, 0.0, 0.0, 0.0) for one in read.stages)
