"""Strategies that the user fixes: what the plan makes of them, the collectives, and that the result equals one
device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from proving import prove
from runtime.small_gpt import example_module
from search.small_models import Mlp, TwoProducts, conversions_into, counts, kinds, planned, strategies

MESH = sw.Mesh(dp=2, tp=4)
gpt = example_module("gpt")
matmul = torch.matmul


@pytest.fixture
def x() -> Tensor:
    return torch.randn(16, 32)


# ------------------------------------------------------------------------------- the specification's examples


def test_the_quick_start_propagates_a_product_split_2_by_4_to_its_activation_and_the_next_product(x):
    """Case doc-003-prop: relu gets ((2, 4),), the second product ((2, 4), (4, 1))."""
    plan = planned(TwoProducts(first=sw.shard(matmul, ((2, 4), (4, 1)))), (x,))
    assert counts(plan, "/matmul") == ((2, 4), (4, 1))
    assert counts(plan, "/relu") == ((2, 4),)
    assert counts(plan, "/matmul_1") == ((2, 4), (4, 1))
    # the documents print AllReduce in groups of 4, then StridedSlice: one reduce-scatter
    assert conversions_into(plan, "/relu") == ["reduce_scatter@(dp.1,dp.2)"]


def test_a_product_split_2_by_4_meets_a_relu_split_8_by_1_in_one_collective_of_groups_of_4(x):
    """Document 002; it prints AllReduce, then a slice."""
    first, act = sw.shard(matmul, ((2, 4), (4, 1))), sw.shard(torch.relu, ((8, 1),))
    plan = planned(TwoProducts(first, act), (x,), mode="semi_auto")
    assert counts(plan, "/matmul") == ((2, 4), (4, 1))
    assert counts(plan, "/relu") == ((8, 1),)
    assert conversions_into(plan, "/relu") == ["reduce_scatter@(dp.1,dp.2)"]
    assert counts(plan, "/matmul_1") == ((8, 1), (1, 1))  # without a strategy: data parallelism


@pytest.mark.parametrize(
    ("first", "second", "between"),
    [
        pytest.param(((4, 1), (1, 1)), ((1, 1), (1, 4)), ["all_gather@dp"], id="data then model: ReID"),
        pytest.param(((1, 1), (1, 4)), ((4, 1), (1, 1)), ["all_to_all@dp"], id="model then data: DLRM"),
        pytest.param(((2, 1), (1, 2)), ((2, 2), (2, 1)), [], id="both: Transformer"),
    ],
)
@pytest.mark.parametrize("mode", ["semi_auto", "auto"])
def test_the_products_of_the_slides_need_the_collective_that_the_slides_name(x, first, second, between, mode):
    model = TwoProducts(sw.shard(matmul, first), None, sw.shard(matmul, second))
    plan = planned(model, (x,), 4, mode=mode)
    assert (counts(plan, "/matmul"), counts(plan, "/matmul_1")) == (first, second)
    assert conversions_into(plan, "/matmul_1", "/matmul") == between


def test_the_transformer_of_the_slides_all_reduces_in_groups_of_2(x):
    class Products(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.v = nn.Parameter(torch.randn(32, 16)), nn.Parameter(torch.randn(16, 16))

        def forward(self, x: Tensor) -> Tensor:
            z = sw.shard(matmul, ((2, 2), (2, 1)))(sw.shard(matmul, ((2, 1), (1, 2)))(x, self.w), self.v)
            return sw.shard(torch.relu, ((2, 1),))(z).mean()

    plan = planned(Products(), (x,), 4)
    assert conversions_into(plan, "/relu") == ["all_reduce@dp.1"]
    assert plan.mesh.sizes["dp.1"] == 2


def test_two_devices_split_a_contraction_and_slice_the_sum(x):
    """Document 004: MatMul ((1,2),(2,1)), ReLU ((2,1),)."""
    model = TwoProducts(sw.shard(matmul, ((1, 2), (2, 1))), sw.shard(torch.relu, ((2, 1),)))
    plan = planned(model, (x,), 2, mode="semi_auto")
    assert conversions_into(plan, "/relu") == ["reduce_scatter@dp"]


# --------------------------------------------------------------------------------------- ways to say the same


def test_calls_submodules_and_patterns_say_the_same_thing():
    x = torch.randn(8, 8)
    on_module = Mlp()
    sw.shard(on_module.up, "m@dp n@tp")
    by_counts = Mlp()
    sw.shard(by_counts.up, ((2, 1), (4, 1)))
    plans = [
        planned(on_module, (x,), mesh=MESH),
        planned(by_counts, (x,), mesh=MESH),
        planned(Mlp(), (x,), mesh=MESH, strategies={"up": "n@tp"}),
        planned(Mlp(), (x,), mesh=MESH, strategies={"u*": "m@dp n@tp"}),
        planned(Mlp(), (x,), mesh=MESH, strategies={"up": [[2, 1], [4, 1]]}),
    ]
    assert all(plan == plans[0] for plan in plans)
    assert strategies(plans[0], "up/linear", "down/linear") == ["m@dp n@tp", "m@dp k@tp"]


def test_a_strategy_on_a_call_holds_for_that_call_alone(x):
    plan = planned(TwoProducts(second=sw.shard(matmul, "n@tp")), (x,), mesh=MESH, mode="semi_auto")
    assert strategies(plan, "/matmul", "/matmul_1") == ["m@dp", "m@dp n@tp"]


def test_axes_of_one_factor_are_major_first_in_the_order_written():
    plan = planned(Mlp(), (torch.randn(8, 8),), mesh=MESH, strategies={"up": "n@(tp,dp)"})
    assert strategies(plan, "up/linear") == ["n@(tp,dp)"]
    assert plan.layouts["up.weight"].dims[0][0].axes == ("tp.0", "tp.1", "dp")


def test_an_axis_may_be_told_to_repeat_the_work():
    plan = planned(Mlp(), (torch.randn(8, 8),), mesh=MESH, strategies={"up": "n@tp I@dp"})
    assert strategies(plan, "up/linear") == ["n@tp"]


# --------------------------------------------------------------------------------------------------- constrain


def test_a_constrained_residual_stream_gives_megatrons_sequence_parallelism():
    class SequenceParallel(gpt.Block):
        def forward(self, x: Tensor) -> Tensor:
            x = sw.constrain(x, "[8@dp, 16@tp, 32]")
            x = x + self.attention(self.attention_norm(x))
            x = sw.constrain(x, "[8@dp, 16@tp, 32]")
            return x + self.mlp(self.mlp_norm(x))

    config = gpt.GPTConfig(layers=1, context=16, width=32, heads=4)
    model = gpt.GPT(config)
    model.blocks = nn.ModuleList([SequenceParallel(config)])
    batch = torch.randint(0, 256, (8, 16)), torch.randint(0, 256, (8, 16))
    wanted = {"blocks.*.attention.qkv": "n@tp", "blocks.*.mlp.up": "n@tp"}
    plan = planned(model, batch, mesh=MESH, strategies=wanted)
    forward = [kind for kind in kinds(plan) if kind.endswith("@tp")]
    assert forward == ["all_gather@tp", "reduce_scatter@tp", "all_gather@tp", "reduce_scatter@tp"]
    norms = strategies(plan, "blocks.0.attention_norm/layer_norm", "blocks.0.mlp_norm/layer_norm")
    assert norms == ["b0@dp b1@tp", "b0@dp b1@tp"]
    products = strategies(plan, "blocks.0.attention.out/linear", "blocks.0.mlp.down/linear")
    assert products == ["b@dp k.0@tp", "b@dp k@tp"]


def test_a_constraint_may_ask_for_a_replicated_value(x):
    class Constrained(TwoProducts):
        def forward(self, x: Tensor) -> Tensor:
            return (sw.constrain(x @ self.w, "[16@dp, 16] replicated(tp)") @ self.v).square().mean()

    plan = planned(Constrained(), (x,), mesh=MESH)
    assert strategies(plan, "/matmul") == ["m@dp"]


def test_an_out_strategy_says_how_the_result_is_split(x):
    first = sw.shard(matmul, ((2, 4), (4, 1)), ((8, 1),))
    plan = planned(TwoProducts(first), (x,))
    assert conversions_into(plan, "/alias") == ["reduce_scatter@(dp.1,dp.2)"]
    assert counts(plan, "/relu") == ((8, 1),)
    whole = planned(TwoProducts(sw.shard(matmul, ((2, 4), (4, 1)), ((1, 1),))), (x,))
    assert counts(whole, "/relu") == ((1, 1),)
    same = planned(TwoProducts(sw.shard(matmul, ((2, 4), (4, 1)), "[16@dp, 16]")), (x,))
    assert same.operators == plan.operators


# ----------------------------------------------------------------------------------------- splits that need lowerings


class SplitAttention(gpt.Attention):
    strategy = ""

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        mixed = sw.shard(F.scaled_dot_product_attention, self.strategy)(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, time, width))


def attention_gpt(strategy: str) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    config = gpt.GPTConfig(layers=1, context=16, width=32, heads=4)
    model = gpt.GPT(config)
    model.blocks[0].attention = SplitAttention(config)
    model.blocks[0].attention.strategy = strategy
    return model, (torch.randint(0, 256, (8, 16)), torch.randint(0, 256, (8, 16)))


def test_queries_split_over_time_gather_keys_and_values_and_split_the_whole_model_over_time():
    model, batch = attention_gpt("b@dp t@cp")
    plan = planned(model, batch, mesh=sw.Mesh(dp=2, cp=4))
    name = "blocks.0.attention/scaled_dot_product_attention"
    assert conversions_into(plan, name) == ["all_gather@cp", "all_gather@cp"]
    assert strategies(plan, "tokens/embedding", "blocks.0.attention.qkv/linear", "blocks.0.mlp.up/linear") == [
        "b0@dp b1@cp",
        "b@dp m@cp",
        "b@dp m@cp",
    ]


def test_keys_split_over_time_combine_maxima_and_sums():
    model, batch = attention_gpt("b@dp s@cp")
    plan = planned(model, batch, mesh=sw.Mesh(dp=2, cp=4))
    inside = conversions_into(plan, "blocks.0.attention/scaled_dot_product_attention")
    assert inside.count("all_reduce@cp") >= 2  # of the maximum and of the denominator


def test_split_rows_of_an_embedding_and_split_classes_need_no_gathered_logits():
    class Language(nn.Module):
        """53 tokens: prime, as 50,257 is."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(53, 8), nn.Linear(8, 53, bias=False)

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.head(self.tokens(ids)).flatten(0, 1), labels.flatten())

    ids, labels = torch.randint(0, 53, (6, 5)), torch.randint(0, 53, (6, 5))
    labels[0] = -100
    plan = planned(Language(), (ids, labels), mesh=MESH, strategies={"tokens": "v@tp", "head": "n@tp"})
    assert strategies(plan, "tokens/embedding", "/cross_entropy_loss") == ["b0@dp v@tp", "n.0@dp c@tp"]
    assert set(kinds(plan)) == {"all_reduce@tp", "all_reduce@dp"}
    whole = 6 * 5 * 53 * 4
    assert all(c.num_bytes < whole / 2 for c in plan.collectives())


@pytest.mark.parametrize("mode", ["auto", "data_parallel", "semi_auto"])
def test_a_batch_of_6_is_shared_out_over_4_devices(mode):
    plan = planned(Mlp(), (torch.randn(6, 8),), 4, mode=mode, search="sharding_propagation")
    assert strategies(plan, "up/linear") == ["m@dp"]


def test_7_columns_are_shared_out_over_4_devices():
    plan = planned(Mlp(hidden=7), (torch.randn(6, 8),), mesh=MESH, strategies={"up": "n@tp"})
    assert plan.parameters[0].layout == "f32[7@tp, 8]"


def test_split_counts_of_a_concatenated_dim_split_every_operand():
    class Joins(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(8, 12)), nn.Parameter(torch.randn(8, 12))

        def forward(self):
            y = sw.shard(torch.cat, ((2, 2), (2, 2)))((self.a, self.b), 1)
            return (y.sin() * y).sum(), y

    torch.manual_seed(0)
    model = Joins()
    for settings in ({"mode": "semi_auto"}, {"search": "sharding_propagation"}):
        plan = sw.plan(model, (), 4, mesh=sw.Mesh(x=4), **settings)
        assert [entry.layout for entry in plan.parameters] == ["f32[8@x.0, 12@x.1]"] * 2
        prove(model, (), plan)


class Grouped(nn.Module):
    """Several operators in one region, with a constraint inside, between operators that split their batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        def normalised(y: Tensor) -> Tensor:
            y = sw.constrain(y, "((2, 4),)")
            return y.sigmoid() * y.cos()

        return sw.shard(normalised, None)(x @ self.weight).relu().square().sum()


@pytest.mark.parametrize("mode", ["semi_auto", "auto"])
def test_operators_of_a_region_follow_its_constraint_and_not_their_neighbours(mode: str) -> None:
    plan = sw.plan(Grouped(), torch.randn(16, 8), 8, mesh=sw.Mesh(data=8), mode=mode, search="sharding_propagation")
    chosen = {entry.name: entry.strategy for entry in plan.operators}
    assert chosen["/sigmoid"] == chosen["/cos"] == chosen["/mul"] == "d0@data.0 d1@(data.1,data.2)"
    if mode == "semi_auto":
        assert chosen["/relu"] == "d0@data"
    assert sw.verify(Grouped(), torch.randn(16, 8), plan, steps=1).ok
