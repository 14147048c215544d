"""Plans that are known to be best: what the search by price finds for the models of the literature, on described
clusters, and what it does when links, memory or the user say otherwise."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import shardwise as sw
from models import paper_models, tiny_models
from models.paper_models import Case
from proving import prove
from shardwise.layouts.text import parse_layout

GPU = sw.Mesh(gpu=8)
NODE = "h100-1x8"
MATMULS = ("aten.linear.default", "aten.mm.default", "aten.addmm.default")
ATTENTION = "aten.scaled_dot_product_attention.default"


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("transformers").setLevel(logging.ERROR)


def auto(
    case: Case, cluster: str | sw.Cluster = NODE, mesh: sw.Mesh | None = GPU, *, half: bool = False, **options: Any
) -> sw.Plan:
    """The plan of a model on meta tensors. ``half``: in bfloat16."""
    with torch.device("meta"):
        module, inputs = case.build(), case.inputs()
    if half:
        module, inputs = module.bfloat16(), tuple(x.bfloat16() if x.is_floating_point() else x for x in inputs)
    return _auto(module, inputs, cluster, mesh, **options)


def language_model(kind: Any, config: Any, batch: int, length: int) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        ids = torch.zeros(batch, length, dtype=torch.int64)
        return kind(config).bfloat16(), {"input_ids": ids, "labels": ids}


def _auto(module: nn.Module, inputs: Any, cluster: str | sw.Cluster, mesh: sw.Mesh | None, **options: Any) -> sw.Plan:
    described = sw.Cluster.load(cluster) if isinstance(cluster, str) else cluster
    options.setdefault("search", "dynamic_programming")
    return sw.plan(module, inputs, described, mesh=mesh, **options)


def strategies(plan: sw.Plan, *targets: str) -> dict[str, str]:
    """Operator -> strategy, of some ATen operators."""
    return {op.name: op.strategy for op in plan.operators if op.target in targets}


def of(plan: sw.Plan, name: str) -> str:
    return plan.strategies[name]


def layouts(plan: sw.Plan) -> dict[str, str]:
    return {entry.name: entry.layout for entry in plan.parameters}


def sent(plan: sw.Plan, names: tuple[str, ...]) -> list[str]:
    """The collectives, forward and backward, that values of these names take part in."""
    return [
        collective.kind
        for entry in plan.conversions
        for collective in (*entry.forward, *entry.backward)
        if entry.value.startswith(names)
    ]


def test_a_classifier_of_very_many_classes_splits_its_head_and_not_its_body() -> None:
    """ReID: the body, whose activations are larger than its weights, is data parallel; the weight of the head and the
    scores are split over the classes, and the loss is computed on split scores: the head's gradient is never sent."""
    plan = auto(paper_models.reid(8192, 512, 512, 1_000_000))
    assert {of(plan, f"body.{i}/linear") for i in range(3)} == {"m@gpu"}
    assert of(plan, "head/linear") == "n@gpu"
    assert of(plan, "/cross_entropy_loss") == "c@gpu"
    assert layouts(plan)["head.weight"] == "f32[1000000@gpu, 512]"
    assert sent(plan, ("head.weight",)) == []
    assert plan.optimality_gap == 0  # the body is too small for the messages of a gathered head to hide behind


def test_recommenders_split_their_tables_and_their_perceptrons_over_the_batch() -> None:
    """DLRM: no table and no gradient of one is ever sent, only the rows that were read."""
    plan = auto(paper_models.dlrm(8192, 8, 1_000_000, 128, 1024))
    assert set(strategies(plan, "aten.embedding.default").values()) <= {"e@gpu", "v@gpu"}
    assert all("@gpu" in layouts(plan)[f"tables.{i}.weight"] for i in range(8))
    assert sent(plan, tuple(f"tables.{i}.weight" for i in range(8))) == []
    assert set(strategies(plan, *MATMULS).values()) == {"m@gpu"}


def test_wide_and_deep_splits_its_large_table() -> None:
    plan = auto(paper_models.wide_and_deep(8192, 16, 1_000_000, 64, 1024))
    assert of(plan, "embedding/embedding") in {"e@gpu", "v@gpu"}
    assert sent(plan, ("embedding.weight",)) == []
    assert of(plan, "deep.0/linear") == of(plan, "deep.2/linear") == "m@gpu"


def test_a_transformer_with_a_large_batch_is_data_parallel() -> None:
    """With sharded storage: gathering and scattering send what reducing would."""
    plan = auto(paper_models.transformer(256, 512, 2, 1024, 16), half=True)
    assert set(strategies(plan, *MATMULS, ATTENTION).values()) == {"b@gpu"}
    assert all("@gpu" in layout for layout in layouts(plan).values())
    assert plan.optimality_gap == 0


def test_a_wide_transformer_splits_columns_then_rows_as_in_megatron() -> None:
    """One sum forward and one backward for attention, and for the perceptron; no weight matrix is sent."""
    plan = auto(paper_models.transformer(1, 256, 2, 12288, 96), half=True)
    for block in ("blocks.0", "blocks.1"):
        assert {of(plan, f"{block}.{name}/linear") for name in "qkv"} == {"n.0@gpu"}
        assert of(plan, f"{block}/scaled_dot_product_attention") == "h@gpu"
        assert of(plan, f"{block}.out/linear") == "k.0@gpu"
        assert of(plan, f"{block}.up/linear") == "n@gpu"
        assert of(plan, f"{block}.down/linear") == "k@gpu"
    values = [entry for entry in plan.conversions if entry.value not in layouts(plan)]
    forward = [collective.kind for entry in values for collective in entry.forward]
    backward = [collective.kind for entry in values for collective in entry.backward]
    assert forward == backward == ["all_reduce"] * 4
    matrices = tuple(f"{name}.weight" for name in layouts(plan) if "norm" not in name)
    assert sent(plan, tuple(name for name in matrices if "before" not in name and "between" not in name)) == []


def test_resnet_50_is_data_parallel_and_splits_a_wide_head() -> None:
    """One bottleneck of each stage. With a million classes the head is split over them, and of the body only the last
    3x3 and 1x1 convolutions may split channels, where images are 14 and 7 pixels wide. The loss in bfloat16 takes whole
    rows: exchanging them (0.42 ms each way) and one kernel per pass (0.38 ms in all) are faster than the passes of the
    loss on split scores, which works in float32 and element by element (1.6 ms, sums 0.17 ms); the simulation agrees
    (34.2 and 34.6 ms). In float32, as in ReID, there is nothing to cast and twice as much to exchange."""
    depths = (1, 1, 1, 1)
    plan = auto(paper_models.resnet(2048, depths, 64, 1000, 224), half=True)
    assert set(strategies(plan, "aten.conv2d.default").values()) == {"n@gpu"}
    assert of(plan, "head/linear") == "m@gpu"
    wide = auto(paper_models.resnet(512, depths, 64, 1_000_000, 224), half=True)
    convolutions = strategies(wide, "aten.conv2d.default")
    assert {own for name, own in convolutions.items() if not name.startswith("blocks.3")} == {"n@gpu"}
    assert of(wide, "head/linear") == "n@gpu"
    assert of(wide, "/cross_entropy_loss") == "n@gpu"


def test_bert_with_a_large_batch_is_data_parallel() -> None:
    config = BertConfig(num_hidden_layers=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    plan = _auto(*language_model(BertForMaskedLM, config, 1024, 128), NODE, GPU)
    assert set(strategies(plan, *MATMULS, ATTENTION).values()) == {"b@gpu"}
    assert plan.optimality_gap == 0


def test_gpt_2_with_a_large_batch_is_data_parallel() -> None:
    config = GPT2Config(n_layer=1, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    plan = _auto(*language_model(GPT2LMHeadModel, config, 256, 1024), NODE, GPU)
    assert set(strategies(plan, *MATMULS, ATTENTION).values()) == {"b@gpu", "m.0@gpu"}
    assert plan.optimality_gap == pytest.approx(plan.prediction.given_away), "the cheapest plan is proven to be that"


def test_llama_8b_is_data_parallel_on_a_node_and_ulysses_inside_the_nodes_of_32() -> None:
    """On 8: data parallel with sharded storage. On 32 x 8 with 128 sequences: data parallel between the nodes, inside
    them sequences are split except in attention, whose heads are (Jacobs and others, "DeepSpeed Ulysses", 2023), and
    the vocabulary of the loss."""
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        max_position_embeddings=8192,
        use_cache=False,
    )
    module, inputs = language_model(LlamaForCausalLM, config, 128, 8192)
    room = 1e15  # without recomputation the batch does not fit
    plan = _auto(module, inputs, NODE, GPU, memory_bytes=room)
    assert set(strategies(plan, *MATMULS, ATTENTION).values()) == {"b@gpu"}
    assert all("@gpu" in layout for layout in layouts(plan).values())
    plan = _auto(module, inputs, "h100-32x8", sw.Mesh(dp=32, tp=8), memory_bytes=room)
    layer = "model.layers.0."
    assert {own for name, own in strategies(plan, *MATMULS).items() if name.startswith(layer)} == {"b@dp m@tp"}
    assert of(plan, f"{layer}self_attn/scaled_dot_product_attention") == "b@dp g@tp"
    assert of(plan, "lm_head/linear") == "b@dp n@tp"
    assert of(plan, "/cross_entropy_loss") == "n.0@dp c@tp"


# -- the cluster -------------------------------------------------------------------------------------------------------

FEW_LONG = paper_models.transformer(4, 4096, 1, 4096, 32)


def _swapped(cluster: sw.Cluster) -> sw.Cluster:
    inner, outer = cluster.levels
    figures = ("bandwidth", "latency", "launch", "in_switch")
    return replace(
        cluster,
        levels=(
            replace(inner, **{name: getattr(outer, name) for name in figures}),
            replace(outer, **{name: getattr(inner, name) for name in figures}),
        ),
    )


def test_the_tensor_axis_lies_where_links_are_fast() -> None:
    """Four long sequences on 4 nodes of 4: data parallel between the nodes, as in Megatron inside them. Where links are
    fast between the nodes it is the other way round, for the same model on the same mesh."""
    cluster, mesh = sw.Cluster.load("h100-4x4"), sw.Mesh(outer=4, inner=4)
    plan = auto(FEW_LONG, cluster, mesh, half=True)
    assert of(plan, "blocks.0/scaled_dot_product_attention") == "b@outer h@inner"
    assert of(plan, "blocks.0.up/linear") == "b@outer n@inner"
    assert of(plan, "blocks.0.down/linear") == "b@outer k@inner"
    other = auto(FEW_LONG, _swapped(cluster), mesh, half=True)
    assert of(other, "blocks.0/scaled_dot_product_attention") == "h@outer b@inner"
    assert of(other, "blocks.0.up/linear") == "n@outer b@inner"
    assert of(other, "blocks.0.down/linear") == "k@outer b@inner"


def test_the_best_mesh_shape_respects_the_levels() -> None:
    """Searched over shapes: one axis between the nodes and one inside them, clearly better than a single axis."""
    cluster = sw.Cluster.load("h100-4x4")
    plan = auto(FEW_LONG, cluster, None, half=True)
    assert dict(plan.mesh.axes) == {"dp": 4, "tp": 4}, "batch between the nodes, features inside them"
    flat = auto(FEW_LONG, cluster, sw.Mesh(x=16), half=True)
    assert plan.prediction.step_seconds < 0.9 * flat.prediction.step_seconds


# -- what the user says ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("search", ["dynamic_programming", "recursive_programming", "sharding_propagation"])
def test_what_the_user_fixes_is_kept(search: str) -> None:
    case = paper_models.transformer(256, 512, 1, 1024, 16)
    plan = auto(case, half=True, search=search, strategies={"blocks.0.up": "n@gpu"})
    assert of(plan, "blocks.0.up/linear") == "n@gpu"
    if plan.predicted is not None and search == "dynamic_programming":
        free = auto(case, half=True).prediction
        assert free is not None
        assert plan.prediction.step_seconds > free.step_seconds
        assert of(plan, "blocks.0.q/linear") == "b@gpu"


def test_less_memory_shards_storage_and_is_never_faster() -> None:
    """On CPU ranks an all-reduce is cheaper than scattering and gathering: without a limit matrices are stored whole,
    with one more and more of them are sharded (ZeRO), which takes longer. The gap is to the bound under the limit
    itself; the plan keeps a little less, so that its peak with temporaries fits."""
    case = paper_models.transformer(1024, 8, 2, 128, 4)
    cluster, mesh = sw.Cluster.local(4), sw.Mesh(x=4)
    plan = auto(case, cluster, mesh)
    peak, states = plan.prediction.peak_bytes, 16 * _stored(plan)  # parameter, gradient and two moments in float32
    seconds, stored = [plan.prediction.step_seconds], [_stored(plan)]
    for part in (0.05, 0.1, 0.3):
        plan = auto(case, cluster, mesh, memory_bytes=peak - part * states)
        assert plan.prediction.peak_bytes <= peak - part * states
        assert plan.optimality_gap is not None
        assert plan.optimality_gap < 0.05
        seconds.append(plan.prediction.step_seconds)
        stored.append(_stored(plan))
    assert seconds == sorted(set(seconds))
    assert stored == sorted(set(stored), reverse=True)
    assert set(strategies(plan, *MATMULS, ATTENTION).values()) == {"b@x"}


def _stored(plan: sw.Plan) -> int:
    return sum(parse_layout(entry.layout, plan.mesh).max_local_numel for entry in plan.parameters)


def test_many_small_gradients_travel_together() -> None:
    """A narrow transformer on CPU ranks: sent one by one, the sums of gradients take longer than those of a plan as in
    Megatron; in one message they do not. Prices know it as the simulated step does."""
    cluster, mesh, case = sw.Cluster.local(2), sw.Mesh(x=2), paper_models.transformer(32, 64, 2, 64, 4)
    plan = auto(case, cluster, mesh)
    assert set(strategies(plan, *MATMULS, ATTENTION).values()) == {"b@x"}
    assert plan.prediction.simulated_seconds == pytest.approx(plan.prediction.additive_price, rel=0.05)
    assert plan.optimality_gap is not None
    assert plan.optimality_gap < 0.05
    alone = auto(case, cluster, mesh, bucket_bytes=0)
    assert set(strategies(alone, *MATMULS, ATTENTION).values()) != {"b@x"}
    assert alone.prediction.additive_price > 1.1 * plan.prediction.additive_price


# -- the plans compute what one device computes ------------------------------------------------------------------------

TINY: dict[str, Case] = {
    "reid": paper_models.reid(8, 6, 8, 60),
    "dlrm": paper_models.dlrm(8, 3, 40, 8, 8),
    "wide_and_deep": paper_models.wide_and_deep(8, 4, 40, 4, 8),
    "transformer of a large batch": paper_models.transformer(16, 4, 1, 16, 4),
    "wide transformer": paper_models.transformer(1, 4, 1, 32, 4),
    "resnet": paper_models.resnet(8, (1, 1), 4, 40, 16),
}


def _without_latency(cluster: sw.Cluster) -> sw.Cluster:
    """Where small models are split as large ones are: nothing takes time but FLOPs and bytes."""
    device = replace(cluster.device, kernel_latency=0.0, matmul_half_flops=0.0, launch=0.0)
    levels = tuple(replace(level, latency=0.0, launch=0.0) for level in cluster.levels)
    return replace(cluster, device=device, levels=levels)


MESHES = [(NODE.replace("x8", "x4"), sw.Mesh(x=4)), ("h100-2x2", sw.Mesh(outer=2, inner=2))]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.sampled(2)
def test_plans_of_small_models_verify(name: str) -> None:
    cluster, mesh = MESHES[list(TINY).index(name) % 2]
    torch.manual_seed(0)
    module, inputs = TINY[name].build(), TINY[name].inputs()
    plan = _auto(module, inputs, _without_latency(sw.Cluster.load(cluster)), mesh)
    assert any("@" in op.strategy for op in plan.operators)
    prove(module, inputs, plan)


@pytest.mark.parametrize(("name", "number"), [("gpt2", 1), ("llama", 0)])
@pytest.mark.long
def test_plans_of_small_language_models_verify(name: str, number: int) -> None:
    cluster, mesh = MESHES[number]
    torch.manual_seed(0)
    model = tiny_models.MODELS[name]
    module, inputs = model.build(), model.inputs(4)
    plan = _auto(module, inputs, _without_latency(sw.Cluster.load(cluster)), mesh)
    assert any("@" in op.strategy for op in plan.operators)
    prove(module, inputs, plan)
