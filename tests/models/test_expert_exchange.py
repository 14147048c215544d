"""Tokens that travel to their experts: models of transformers and a model written by hand, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise as sw
from models.breadth import tiny_of
from models.expert_models import WIDTH, Batched, by_two_experts
from models.zoo_transformers import mixtral
from raising import raises
from shardwise.graph.capture import capture
from shardwise.layouts.text import parse_layout
from shardwise.plans.bind import program_of
from shardwise.programs.differentiate import differentiate
from shardwise.programs.instructions import Arrive, Depart
from shardwise.programs.keyed_rows import RowCounts
from shardwise.programs.program import localize
from shardwise.programs.vjp import VjpCache
from shardwise.proof.virtual import VirtualCluster

EP = sw.Mesh(ep=4)
CUBE = sw.Mesh(dp=2, ep=2, tp=2)


def planned(name: str, mesh: sw.Mesh, strategy: str = "e@ep", **options: Any) -> tuple[nn.Module, Any, Any]:
    """A small model of transformers, its batch, and its plan with split experts."""
    tiny = mixtral() if name == "mixtral" else tiny_of(name)
    torch.manual_seed(0)
    module, batch = tiny.build(), tiny.inputs(8)
    experts = {path for path, _ in module.named_modules() if path.endswith("experts") and "shared" not in path}
    strategies, devices = dict.fromkeys(experts, strategy), mesh.num_devices * options.get("stages", 1)
    return module, batch, sw.plan(module, batch, devices, mesh=mesh, strategies=strategies, **options)


def exchanges(plan: Any) -> list[Any]:
    return [collective for collective in plan.collectives() if collective.kind == "row_exchange"]


CASES: dict[str, tuple[str, sw.Mesh, str, dict[str, Any]]] = {
    "qwen3, all axes": ("qwen3_moe", CUBE, "e@ep n@tp", {}),
    "gpt_oss": ("gpt_oss", EP, "e@ep", {}),
    "deepseek_v3, ZeRO 3, recomputed": ("deepseek_v3", sw.Mesh(dp=2, ep=2), "e@ep", {"zero": 3, "recompute": "full"}),
    "granitemoe, two axes": ("granitemoe", sw.Mesh(ep=2, node=2), "K@(ep,node)", {}),
    "qwen3, micro-batches": ("qwen3_moe", EP, "K@ep", {"micro_batch": 4}),
}
NAMES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "olmoe", "granitemoe",
    "phimoe", "jamba",
)  # fmt: skip
MESHES = (EP, sw.Mesh(dp=2, ep=2), sw.Mesh(ep=2, tp=2), CUBE)
MORE: dict[str, tuple[str, sw.Mesh, str, dict[str, Any]]] = {
    f"{name} {mesh}": (name, mesh, "e@ep", {}) for name in NAMES for mesh in MESHES
}


@pytest.mark.filterwarnings("ignore:no rule for shardwise.function")  # phimoe's router is an autograd.Function
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
@pytest.mark.sampled(1)
def test_tokens_travel_and_every_number_is_that_of_one_device(case: str) -> None:
    name, mesh, strategy, options = (CASES | MORE)[case]
    module, batch, plan = planned(name, mesh, strategy, **options)
    sent = exchanges(plan)
    assert sent, plan
    assert {collective.axes for collective in sent} == {"(ep,node)" if "node" in dict(mesh.axes) else "ep"}
    report = sw.verify(module, batch, plan)
    assert report.is_equal, report
    assert report.ok, report


@pytest.mark.long
def test_experts_with_biases_are_searched() -> None:
    module, batch, plan = planned("gpt_oss", EP, search="dynamic_programming")
    assert sw.verify(module, batch, plan).is_equal


def test_what_is_exchanged_is_the_tokens_and_the_results() -> None:
    _, batch, plan = planned("qwen3_moe", EP)
    hidden, copies, tokens, layers = 32, 2, batch["input_ids"].numel(), 2
    rows = -(-tokens * copies * 12 // 10 // 4)  # as many as are expected on the busiest of four devices
    assert [collective.num_bytes for collective in exchanges(plan)] == [
        num_bytes for _ in range(layers) for num_bytes in (rows * hidden * 4, rows * hidden * 4)
    ], "tokens and results in float32; their experts are known from the counts"


class Routed(nn.Module):
    """Two experts of four for every token, chosen by the first values of the tokens themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 3) for shape in ((8, 12), (12, 8)))
        self.mix = nn.Linear(8, 8)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        rows = self.mix(x).flatten(0, 1)
        return (by_two_experts(rows, chosen, self.up, self.down, "K@ep").sum(1) - rows).square().mean()


ROUTINGS: dict[str, Callable[[int], tuple[int, int]]] = {
    "evenly": lambda token: (token % 4, (token + 1) % 4),
    "to one device": lambda token: (0, 1),
    "to one expert twice": lambda token: (3, 3),
    "no token of the last device": lambda token: (token % 2, token % 3),
    "by device": lambda token: (token // 8, token // 8),
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("devices", "row_chunks"), [(2, 1), (4, 1), (2, 2), (4, 2)])
@pytest.mark.sampled(3)
def test_any_routing_is_exact(routing: str, devices: int, row_chunks: int) -> None:
    module, tokens = Routed(), range(32)
    batch = torch.randn(4, 8, 8), torch.tensor([ROUTINGS[routing](token) for token in tokens]).view(4, 8, 2)
    plan = sw.plan(module, batch, devices, mesh=sw.Mesh(ep=devices), row_chunks=row_chunks)
    assert len(exchanges(plan)) == 2 * row_chunks, plan
    report = sw.verify(module, batch, plan)
    assert report.is_equal, report


UNEVEN = {  # samples, positions, devices
    "rows that devices do not divide": (3, 7, 2),
    "fewer samples than devices": (3, 7, 4),
    "one token for four devices": (1, 1, 4),
    "more devices than experts": (4, 8, 8),
}


@pytest.mark.parametrize("case", UNEVEN)
@pytest.mark.sampled(1)
def test_any_number_of_tokens_travels(case: str) -> None:
    samples, positions, devices = UNEVEN[case]
    module, generator = Routed(), torch.Generator().manual_seed(0)
    batch = torch.randn(samples, positions, 8), torch.randint(4, (samples, positions, 2), generator=generator)
    plan = sw.plan(module, batch, devices, mesh=sw.Mesh(ep=devices))
    assert len(exchanges(plan)) == 2, plan
    report = sw.verify(module, batch, plan)
    assert report.is_equal, report


@pytest.mark.long
def test_the_host_reads_sizes_once_a_layer_when_all_is_recomputed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[RowCounts] = []
    original = RowCounts.__init__

    def noted(counts: RowCounts, sent: Tensor, received: Tensor) -> None:
        reads.append(counts)
        original(counts, sent, received)

    monkeypatch.setattr(RowCounts, "__init__", noted)
    counts = []
    for recompute in (None, "full"):
        module, batch, plan = planned("qwen3_moe", sw.Mesh(ep=2), recompute=recompute)
        reads.clear()
        assert sw.verify(module, batch, plan).is_equal
        counts.append(len(reads))
    layers_and_ranks = 2 * 2
    assert counts[0], "rows travel"
    assert counts[0] % layers_and_ranks == 0
    assert counts[1] == counts[0], "forward tells backward"


def test_cotangents_travel_while_the_gradient_of_the_weight_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    lists: list[list[Any]] = []
    original = VirtualCluster.execute

    def noted(cluster: VirtualCluster, programs: Any, values: Any) -> None:
        lists.append(list(programs[0]))
        original(cluster, programs, values)

    monkeypatch.setattr(VirtualCluster, "execute", noted)
    module, batch, plan = planned("qwen3_moe", sw.Mesh(ep=2))
    assert sw.verify(module, batch, plan).is_equal
    backward = next(each for each in lists if any(getattr(item, "backward", False) for item in each))
    departs = [i for i, item in enumerate(backward) if isinstance(item, Depart) and item.conversions[0].ways]
    assert len(departs) == 4, "two a layer"
    for results, tokens in zip(departs[::2], departs[1::2], strict=True):
        arrives = next(i for i in range(results, tokens) if isinstance(backward[i], Arrive))
        beside = [item.origin.op for item in backward[results + 1 : arrives]]
        assert any(op.endswith("gate/linear") for op in beside), "cotangents of results, beside the router"
        assert str(backward[tokens + 1].target) == "shardwise.grouped_mm_of_weight.default", backward[tokens + 1]


@pytest.mark.filterwarnings("ignore:no rule for shardwise.function")
@pytest.mark.parametrize(
    "name", ["qwen3_moe", *(pytest.param(name, marks=pytest.mark.long) for name in NAMES if name != "qwen3_moe")]
)
def test_tokens_travel_in_stages(name: str) -> None:
    # Whether samples meet in an autograd.Function without a rule is not known: its loss is no sum over micro-batches.
    # Mixtral's has a term of balance.
    terms = {"per_micro_batch": [own]} if (own := {"phimoe": "loss", "mixtral": "aux_loss"}.get(name)) else {}
    module, batch, plan = planned(name, sw.Mesh(ep=2), stages=2, micro_batch=4, **terms)
    assert exchanges(plan), plan
    assert sw.verify(module, batch, plan).is_equal


@pytest.mark.long
@pytest.mark.parametrize("mesh", [*MESHES, "stages"], ids=str)
def test_experts_that_compute_all_tokens_are_split(mesh: sw.Mesh | str) -> None:
    if isinstance(mesh, sw.Mesh):
        module, batch, plan = planned("llama4_text", mesh, "b@ep")
    else:
        module, batch, plan = planned("llama4_text", sw.Mesh(ep=2), "b@ep", stages=2, micro_batch=4)
    layouts = {
        str(layout)
        for stage in plan.stages
        for name, layout in stage.layouts.items()
        if name.endswith("experts.gate_up_proj")
    }
    assert layouts
    assert all("[4@ep" in layout for layout in layouts), layouts
    assert sw.verify(module, batch, plan).is_equal


class Block(Routed):
    """A layer that routes its tokens by what they are."""

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        assert chosen is None
        rows = self.mix(x).flatten(0, 1)
        chosen = rows[:, :4].topk(2).indices
        return x + by_two_experts(rows, chosen, self.up, self.down, "K@ep").sum(1).view_as(x)


class Blocks(nn.Module):
    """Equal layers of experts behind each other."""

    def __init__(self, count: int, layer: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer() for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_equal_stages_that_are_searched_once_follow_their_own_keys() -> None:
    module, batch = Blocks(4), (torch.randn(8, 8, 8),)
    for number, layer in enumerate(module.layers):
        sw.stage(layer, number)
    options = {"mesh": sw.Mesh(ep=2), "search": "dynamic_programming", "stages": "marked", "micro_batch": 4}
    plan = sw.plan(module, batch, 4, schedule="Interleaved1F1B", **options)
    assert len(plan.stages) == 4
    assert len(exchanges(plan)) == 2 * 4
    assert sw.verify(module, batch, plan).is_equal


def test_a_plan_with_travelling_tokens_is_read_again(tmp_path: Any) -> None:
    module, batch, plan = planned("qwen3_moe", EP)
    plan.save(tmp_path / "plan.json")
    again = sw.Plan.load(tmp_path / "plan.json")
    assert exchanges(again) == exchanges(plan)
    assert sw.verify(module, batch, again).is_equal


def test_a_layout_of_keyed_rows_is_a_text() -> None:
    for text in ("[64, 32] keyed(ep)", "[32@dp, 32] keyed(2@ep)", "[32, 32@tp] replicated(dp) keyed(8@ep)"):
        layout = parse_layout(text, CUBE)
        assert str(layout) == text
        assert layout.dual == parse_layout(text.replace(" replicated(dp)", " partial(sum@dp)"), CUBE)
    with raises(sw.errors.NotationError, "x@ep"):
        parse_layout("[64, 32] keyed(x@ep)", CUBE)


def test_rows_that_cannot_follow_keys_are_refused() -> None:
    module, batch, _ = planned("qwen3_moe", EP)
    with raises(sw.errors.LayoutError, op="model.layers.0.self_attn.q_proj/linear"):
        sw.plan(module, batch, 4, mesh=EP, strategies={"model.layers.*.self_attn.q_proj": "K@ep"})


def test_samples_that_one_axis_splits_stay_there_while_another_splits_positions() -> None:
    """Two samples, which four owners along two axes do not divide."""
    module, batch = nn.Sequential(nn.Linear(WIDTH, WIDTH), Batched()), (torch.randn(2, 8, WIDTH),)
    strategies, mesh = {"0": "b@ep", "1": "K@(ep,tp)"}, sw.Mesh(ep=2, tp=2)
    plan = sw.plan(module, batch, 4, mesh=mesh, strategies=strategies, search="sharding_propagation")
    assert len(exchanges(plan)) == 3
    (counts,) = (c for c in plan.collectives() if c.kind == "all_to_all")
    assert counts.num_bytes == 4 * 2 * 8, "the numbers of rows alone: of an expert each, and of none"
    assert sw.verify(module, batch, plan).is_equal


class WithShared(Block):
    """A layer whose tokens all pass a shared network as well, which is computed behind the experts."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(8, 12), nn.SiLU(), nn.Linear(12, 8))

    def forward(self, x: Tensor, chosen: Tensor | None = None) -> Tensor:
        return super().forward(x, chosen) + self.shared(x)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_tokens_travel_while_a_shared_expert_is_computed(recompute: str | None) -> None:
    module, batch = Blocks(2, WithShared), (torch.randn(4, 8, 8),)
    plan = sw.plan(module, batch, 2, mesh=sw.Mesh(ep=2), recompute=recompute)
    assert len(exchanges(plan)) == 4, plan
    assert sw.verify(module, batch, plan).is_equal
    program = differentiate(localize(program_of(plan, capture(module, batch).graph), 0), VjpCache())
    beside: list[list[str]] = []
    for i, item in enumerate(program.forward):
        if isinstance(item, Depart) and item.conversions[0].ways:
            arrival = next(j for j in range(i, len(program.forward)) if isinstance(program.forward[j], Arrive))
            beside.append([other.origin.op for other in program.forward[i + 1 : arrival]])
    layers = [[f"layers.{i}.shared.{n}/linear" for n in (0, 2)] for i in range(2)]
    assert [[op for op in ops if "linear" in op] for ops in beside] == [[op] for layer in layers for op in layer]
