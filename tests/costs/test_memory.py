"""Predicted memory of a training step: real gloo ranks, and published formulas."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from costs.live_bytes import LiveBytes
from search.small_models import Mlp
from shardwise.api import step_memory
from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.ledger import CATEGORIES
from shardwise.costs.memory import MemoryEstimate, busiest_program, memory_of
from shardwise.costs.prices import Prices
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.programs import moves
from shardwise.programs.casts import computed_name
from shardwise.programs.vjp import VjpCache

TOLERANCE = 0.03  # of the measured peak


def test_live_bytes_fall_when_tensors_go() -> None:
    with LiveBytes() as live:
        first = torch.zeros(100)
        second = first + 1
        del first
        third = second.view(10, 10)
        assert live.now == 400
        del second, third
    assert (live.now, live.peak) == (0, 800)


# ---------------------------------------------------------------------------------------------------------- real ranks


def _measured(text: str, name: str, large: int) -> tuple[int, int]:
    """Live before a step, and the most beyond it, on this rank. ``large``: elements of a tensor that a message does not
    copy."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    import step_memory as benchmark

    model, inputs = _model(name)
    with mock.patch.object(moves, "LARGE", large):
        found = benchmark.measure(model, inputs, sw.Plan.from_json(text))
    return found.before, found.beyond


def _model(name: str) -> tuple[nn.Module, Any]:
    if name == "transformer":
        sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
        import step_memory as benchmark

        return benchmark.transformer()
    torch.manual_seed(0)
    if name == "idle":
        return Idle(), (torch.randn(32, 64),)
    if name == "layers":
        return Layers(3, 128, 4), (torch.randn(8, 128, 128),)
    from models import tiny_models  # by those who need it only: every rank that imports transformers takes seconds

    tiny: tiny_models.TinyModel = getattr(tiny_models, name)()
    return tiny.build(), tiny.inputs(8)


class Idle(nn.Module):
    """Most of its parameters have no gradient: one is not used, one only by what is detached, one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.detached, self.frozen = (nn.Linear(64, 64, bias=False) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(512, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.frozen(self.used(x)) * self.detached(x).detach()).square().mean()


def _largest_before_update(memory: MemoryEstimate) -> int:
    return max(peak.num_bytes for phase, peak in memory.peak_of.items() if phase != "update")


# More of them in benchmarks/step_memory.py.
TENSOR_PARALLEL = {"blocks.*.up": "n@tp", "blocks.*.down": "k@tp"}
MEGATRONS = {"layers.*.qkv": "n@tp", "layers.*.out": "k@tp", "layers.*.up": "n@tp", "layers.*.down": "k@tp"}
SEQUENCES: dict[str, Any] = {"mesh": sw.Mesh(tp=2), "strategies": MEGATRONS, "search": "sharding_propagation"}
HYBRID: dict[str, Any] = {"mode": "data_parallel", "mesh": sw.Mesh(node=2, gpu=2), "zero": sw.Zero(3, over=("gpu",))}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("transformer", 2, {"mode": "data_parallel", "zero": 3, "recompute": "full"}),
    ("transformer", 2, {"mode": "data_parallel", "zero": 3, "recompute": "full", "prefetch": 3}),
    ("transformer", 2, {"mode": "data_parallel", "zero": 3, "large": 2**15}),
    ("transformer", 2, {"search": "dynamic_programming", "mesh": sw.Mesh(dp=2), "memory_bytes": 25e6}),
    ("transformer", 4, {"mesh": sw.Mesh(dp=2, tp=2), "strategies": TENSOR_PARALLEL, "search": "sharding_propagation"}),
    ("transformer", 4, {**HYBRID, "recompute": "full", "bucket_bytes": 2**20}),
    ("gpt2", 2, {"mode": "data_parallel"}),
    ("gpt2", 2, {"mode": "data_parallel", "zero": 3}),
    ("gpt2", 2, {"mode": "data_parallel", "zero": 2, "micro_batch": 2, "global_batch": 8}),
    ("llama", 2, {"mode": "data_parallel", "zero": 3, "recompute": "cheap", "micro_batch": 4, "global_batch": 8}),
    ("vit", 2, {"mode": "data_parallel", "zero": 2, "recompute": "full", "micro_batch": 4, "global_batch": 8}),
    ("resnet", 2, {"mode": "data_parallel"}),
    ("layers", 2, {**SEQUENCES, "recompute": "none"}),
    ("layers", 2, {**SEQUENCES, "recompute": "gathers"}),
    ("layers", 2, {**SEQUENCES, "recompute": "cheap+gathers"}),
    ("idle", 2, {"mode": "data_parallel"}),
    ("idle", 2, {"search": "dynamic_programming"}),
]


@pytest.mark.parametrize(("name", "ranks", "options"), CASES)
@pytest.mark.sampled(1)
def test_predicted_memory_is_that_of_real_ranks(name: str, ranks: int, options: dict[str, Any], run_ranks: Any) -> None:
    model, inputs = _model(name)
    large, depth = options.get("large", moves.LARGE), options.get("prefetch", 1)
    options = {key: value for key, value in options.items() if key not in ("large", "prefetch")}
    kwargs = inputs if isinstance(inputs, dict) else None
    args = () if kwargs else inputs
    plan = replace(sw.plan(model, args, ranks, kwargs=kwargs, **options).plan, prefetch=depth)
    if "gathers" in options.get("recompute", ""):
        assert any(own.again and own.forward for stage in plan.stages for own in stage.conversions or ())
    with mock.patch.object(moves, "LARGE", large):
        predicted = _largest_before_update(step_memory(model, args, plan, kwargs=kwargs))
    measured = max(map(sum, run_ranks(_measured, ranks, plan.to_json(), name, large)))
    assert predicted == pytest.approx(measured, rel=TOLERANCE), f"predicted / measured {predicted / measured:.3f}"


# ------------------------------------------------------------------------------------------------------------ the walk


def memory_of_mlp(batch: int = 32, **options: Any) -> MemoryEstimate:
    model, inputs = Mlp(64, 256, bias=False), (torch.empty(batch, 64, device="meta"),)
    return step_memory(model, inputs, sw.plan(model, inputs, 4, **options))


def test_what_is_there_before_the_step_is_counted_by_hand() -> None:
    parts = memory_of_mlp(mode="stand_alone", optimizer="adamw").peak_of["forward"].parts
    weights = 2 * 64 * 256 * 4
    assert parts["parameters"] == weights
    assert parts["optimizer states"] == 2 * weights
    assert parts["inputs"] == 32 * 64 * 4
    assert parts["gradients"] == 0


def test_saved_values_are_counted_by_hand() -> None:
    # relu keeps its result, which the second product keeps as well; the square keeps its operand; the input stays.
    assert memory_of_mlp(mode="stand_alone").kept_bytes == 32 * 256 * 4 + 32 * 64 * 4


def test_the_parts_of_a_peak_add_up() -> None:
    for peak in memory_of_mlp(mode="data_parallel").peak_of.values():
        assert sum(peak.parts.values()) == peak.num_bytes
        assert set(peak.parts) == set(CATEGORIES)
        assert min(peak.parts.values()) >= 0


def test_all_gradients_are_there_for_the_update() -> None:
    parts = memory_of_mlp(mode="data_parallel").peak_of["update"].parts
    assert parts["gradients"] == 2 * 64 * 256 * 4
    assert parts["saved"] == 0


def test_a_larger_batch_moves_the_peak_and_names_the_operator() -> None:
    small, large = memory_of_mlp(32, mode="data_parallel"), memory_of_mlp(4096, mode="data_parallel")
    assert large.peak.num_bytes > small.peak.num_bytes
    assert large.peak.phase in ("forward", "backward")
    assert "/" in large.peak.op


@pytest.mark.parametrize("num_devices", [2, 3])
def test_parameters_without_gradient_are_kept_and_nothing_more(num_devices: int) -> None:
    """No gradient, no optimizer states, no update; but a plan must find room for them, and may divide them."""
    model, inputs = _model("idle")
    plan = sw.plan(model, inputs, num_devices, search="dynamic_programming")
    assert plan.layouts["unused"].max_local_numel == -(-512 // num_devices) * 64, "nothing else would be gained"
    held = {entry.name: 4 * plan.layouts[entry.name].max_local_numel for entry in plan.parameters}
    kept = plan.prediction.num_bytes - sum(held.values())
    parts = step_memory(model, inputs, plan).peak_of["update"].parts
    assert parts["parameters"] == sum(held.values())
    assert (parts["gradients"], parts["optimizer states"]) == (held["used.weight"], 2 * held["used.weight"])
    assert 3 * held["used.weight"] <= kept <= 3 * held["used.weight"] + 3 * 32 * 64 * 4, "and some values for backward"
    assert sw.verify(model, inputs, plan, steps=2).ok


def test_the_update_of_parameters_without_gradient_takes_no_time() -> None:
    model, inputs = _model("idle")
    plan = sw.plan(model, inputs, 2, search="dynamic_programming", optimizer="adamw")
    without = sw.plan(model, inputs, 2, search="dynamic_programming", optimizer="sgd")
    prices = Prices(Links(Cluster.local(2), plan.mesh))
    numel = plan.layouts["used.weight"].max_local_numel
    value = capture(model, inputs, {}).graph.by_name["used.weight"]
    more = prices.update(value, numel) - replace(prices, optimizer="sgd").update(value, numel)
    assert plan.strategies == without.strategies
    for own in ("step_seconds", "simulated_seconds"):
        difference = getattr(plan.prediction, own) - getattr(without.prediction, own)
        assert difference == pytest.approx(more, rel=1e-6), own


def test_gradients_of_earlier_passes_are_there_all_the_time() -> None:
    model, inputs = Mlp(64, 256, bias=False), (torch.empty(32, 64, device="meta"),)
    plan = sw.plan(model, inputs, 4, mode="data_parallel")
    spmd = program_of(plan, capture(model, inputs, {}).graph, training=True)
    prices = Prices(Links(Cluster.local(4), plan.mesh))
    once, four = (memory_of(spmd, replace(prices, passes=count)) for count in (1, 4))
    weights = 2 * 64 * 256 * 4
    assert four.peak_of["forward"].num_bytes == once.peak_of["forward"].num_bytes + weights
    assert four.peak_of["backward"].num_bytes == once.peak_of["backward"].num_bytes + weights
    assert four.peak_of["update"].parts == once.peak_of["update"].parts


def test_the_update_holds_the_temporaries_of_the_devices_optimizer() -> None:
    model, inputs = Mlp(64, 256, bias=False), (torch.empty(32, 64, device="meta"),)
    plan = sw.plan(model, inputs, 4, mode="data_parallel")
    spmd = program_of(plan, capture(model, inputs, {}).graph, training=True)
    own, gpus = Links(Cluster.local(4), plan.mesh), Links(Cluster.load("h100").with_devices(4), plan.mesh)
    weight = 64 * 256 * 4
    for links, optimizer, expected in (
        (own, "adamw", 3 * weight),
        (gpus, "adamw", 2 * weight),
        (gpus, "adamw fused", 0),
        (gpus, "adamw single", 3 * weight),
        (gpus, "momentum", 0),
    ):
        parts = memory_of(spmd, Prices(links, optimizer)).peak_of["update"].parts
        assert parts["temporaries"] == expected, optimizer


# Llama 3 8B, equal weights of all layers as one.
LLAMA_8B = {
    "tokens": (128_256, 4096), "head": (128_256, 4096), "query": (32, 4096, 4096), "key": (32, 1024, 4096),
    "value": (32, 1024, 4096), "out": (32, 4096, 4096), "gate": (32, 14_336, 4096), "up": (32, 14_336, 4096),
    "down": (32, 14_336, 4096), "norms": (65, 4096),
}  # fmt: skip


class Weights(nn.Module):
    """Parameters of given shapes, each of which some scalar depends on."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = x.mean()
        for parameter in self.parameters():
            total = total * parameter.mean()
        return total


def gib_of_update(shapes: dict[str, tuple[int, ...]], mesh: sw.Mesh, precision: sw.Precision) -> dict[str, float]:
    """GiB of a rank that has its part, over the axis ``tp``, of the last dim of every parameter."""
    with torch.device("meta"):
        model, x = Weights(shapes), torch.empty(64)
    layouts = {name: f"[{', '.join(map(str, shape))}@tp]" for name, shape in shapes.items()}
    plan = sw.plan(model, (x,), mesh.num_devices, mesh=mesh, mode="data_parallel", layouts=layouts, precision=precision)
    spmd = program_of(plan, capture(model, (x,), {}, precision=precision).graph, training=True)
    prices = Prices(Links(Cluster.load("h100-16x8").with_devices(mesh.num_devices), mesh), "adamw")
    forms = busiest_program(spmd, VjpCache()).forms
    casts = sum(forms[name].num_bytes for name in map(computed_name, shapes) if name in forms)
    parts = {**memory_of(spmd, prices).peak_of["update"].parts, "casts": casts}
    return {name: parts[name] / 2**30 for name in ("parameters", "casts", "optimizer states", "gradients")}


def test_8b_parameters_with_float32_masters_take_what_is_known_on_8_by_8() -> None:
    """Stored over one axis of 8: 4 bytes and a cast of 2, two states of 4, a gradient of 4."""
    mixed = sw.Precision(torch.bfloat16, torch.float32, torch.float32)
    gib = gib_of_update(LLAMA_8B, sw.Mesh(dp=8, tp=8), mixed)
    assert {name: round(own, 2) for name, own in gib.items()} == {
        "parameters": 3.74, "casts": 1.87, "optimizer states": 7.48, "gradients": 3.74
    }  # fmt: skip
    assert sum(gib.values()) == pytest.approx(16.83, abs=0.005)


def test_200_billion_parameters_take_what_is_known() -> None:
    gib = gib_of_update({"weight": (200_000_000, 1000)}, sw.Mesh(tp=1), sw.Precision())
    assert gib["parameters"] == pytest.approx(745.06, abs=0.005)
    assert sum(gib.values()) == pytest.approx(2980.23, abs=0.005)


def test_sharded_storage_holds_its_part() -> None:
    strategies = {"up": "n@tp", "down": "k@tp"}
    parts = memory_of_mlp(mesh=sw.Mesh(tp=4), strategies=strategies, search="sharding_propagation").peak.parts
    assert parts["parameters"] == 2 * 64 * 256 * 4 // 4


# -------------------------------------------------------------------------------------------------- published formulas

# Korthikanti et al. (2022), figure 1, the model of 22 billion parameters on eight GPUs of one tensor parallel group, as
# the validation data of Calculon record it. GiB a device of parameters, gradients and optimizer states.
PUBLISHED = {
    "layers": 48, "width": 6144, "heads": 64, "sequence": 2048, "micro_batch": 4, "state_gib": 45.5625
}  # fmt: skip


class Layer(nn.Module):
    """A layer as Korthikanti et al. (2022) count it: attention with its scores kept, dropout left out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.transpose(1, 2) for part in self.qkv(self.before(x)).unflatten(2, (3, self.heads, -1)).unbind(2)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Layers(nn.Module):
    def __init__(self, count: int, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().mean()


@pytest.mark.parametrize(("how", "expected"), [("none", (34 - 2 - 4) / 8 + 4), ("gathers", (34 - 2) / 8)])
def test_kept_values_of_a_layer_are_the_published_ones(how: Any, expected: float) -> None:
    """With sequence parallelism Megatron keeps 34 s b h / t bytes of a layer whose scores are not kept (their section
    4.2.2): inputs of the norms 4, of the products after them 4, masks of dropout 2, all else 24. It gathers the inputs
    of those products again in backward; where a plan does not, it keeps them gathered. The model has no dropout."""
    one, two = (memory_of_layers(count, how) for count in (1, 2))
    elements = PUBLISHED["micro_batch"] * PUBLISHED["sequence"] * PUBLISHED["width"]
    per_layer = (two.kept_bytes - one.kept_bytes) / elements
    assert per_layer == pytest.approx(expected, rel=0.01)


def test_bytes_of_parameters_and_optimizer_are_the_published_ones() -> None:
    """Half precision with float32 weights, gradients and Adam: 18 bytes a parameter. The figure leaves the embedding
    out."""

    def state_bytes(memory: MemoryEstimate) -> int:
        parts = memory.peak_of["update"].parts  # the copies in half precision are gone by then
        return memory.peak_of["forward"].parts["parameters"] + parts["gradients"] + parts["optimizer states"]

    one, two = (memory_of_layers(count) for count in (1, 2))
    of_layers = (state_bytes(two) - state_bytes(one)) * PUBLISHED["layers"]
    assert of_layers / 2**30 == pytest.approx(PUBLISHED["state_gib"], rel=0.005)


def memory_of_layers(count: int, how: Any = "none") -> MemoryEstimate:
    """Of some of the published model's layers, by Megatron's plan, in mixed precision. ``how``: what is made again."""
    width = int(PUBLISHED["width"])
    with torch.device("meta"):
        model = Layers(count, width, int(PUBLISHED["heads"])).to(torch.float16)
        x = torch.empty(int(PUBLISHED["micro_batch"]), int(PUBLISHED["sequence"]), width, dtype=torch.float16)
    half = sw.Precision(torch.float16, torch.float32)
    settings = {"mesh": sw.Mesh(tp=8), "strategies": MEGATRONS, "search": "sharding_propagation", "precision": half}
    settings["recompute"] = how
    plan = sw.plan(model, (x,), 8, **settings)
    graph = capture(model, (x,), {}, precision=half).graph
    return memory_of(program_of(plan, graph, training=True), Prices(Links(Cluster.local(8), plan.mesh), "adamw"))
