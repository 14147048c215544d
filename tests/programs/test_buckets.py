"""Buckets: what shares a message, where it stands, and that a plan lists them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from proving import prove
from raising import raises
from search.small_models import Chain
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.programs.buckets import FIRST_BUCKET_BYTES, Bucket, fill_buckets
from shardwise.programs.spmd import build_spmd
from shardwise.programs.spmd_steps import Conversion
from shardwise.search.decide import decide


def deep() -> Chain:
    """Eight layers of 64 KiB of weights each."""
    return Chain(8, 128, bias=True, act=torch.tanh)


X = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
LAYER_BYTES = 4 * (128 * 128 + 128)


def gradient_messages(plan: sw.Plan) -> list[int]:
    return [entry.num_bytes for entry in plan.collectives(backward=True) if entry.num_bytes > 8]


def test_gradients_over_the_same_axes_are_one_message():
    plan = sw.plan(deep(), X, 4, search="sharding_propagation")
    assert gradient_messages(plan) == [8 * LAYER_BYTES]
    assert {entry.bucket for entry in plan.conversions if entry.value.startswith("layers.")} == {1}


def test_axes_are_urgent_whose_messages_are_mostly_of_values():
    def urgent(axes: dict[str, int], strategies: dict[str, str], **choices: Any) -> set[str]:
        chain = Chain(2, 128, bias=False, act=torch.tanh)
        mesh, choices = sw.Mesh(**axes), {"strategies": strategies, **choices}
        plan = sw.plan(chain, X, mesh.num_devices, mesh=mesh, search="sharding_propagation", **choices)
        return {"".join(sorted(each)) for each in program_of(plan, capture(chain, (X,)).graph).urgent_axes}

    both = {"layers.0": "n@tp", "layers.1": "k@tp"}
    assert urgent({"dp": 4}, {}) == set(), "the sum of the loss, if any, is nothing beside gradients"
    assert urgent({"tp": 2}, both) == {"tp"}
    assert urgent({"dp": 2, "tp": 2}, both, zero=3) == {"tp"}
    assert urgent({"dp": 2, "tp": 2}, both, bucket_bytes=0) == {"tp"}
    # One set with both kinds: 8 rows of activations are less than the gradient of a replicated layer.
    assert urgent({"a": 2}, {"layers.0": "n@a", "layers.1": "m@a"}) == set()


def test_without_buckets_every_gradient_is_a_message():
    plan = sw.plan(deep(), X, 4, bucket_bytes=0, search="sharding_propagation")
    assert len(gradient_messages(plan)) == 16
    assert not any(entry.bucket for entry in plan.conversions)


def test_gradients_that_take_two_messages_share_both():
    mesh, zero = sw.Mesh(node=2, gpu=2), sw.Zero(2, over=("gpu",))
    plan = sw.plan(deep(), X, 4, mesh=mesh, mode="data_parallel", zero=zero, bucket_bytes=4 * LAYER_BYTES)
    own = [entry for entry in plan.conversions if entry.value.startswith("layers.")]
    assert all(entry.overlaps and len(entry.backward) == 2 for entry in own)
    assert {entry.bucket for entry in own} == {1, 2}
    sent = [(entry.kind, entry.axes, entry.num_bytes) for entry in plan.collectives(backward=True)]
    half = [("reduce_scatter", "gpu", 4 * LAYER_BYTES), ("all_reduce", "node", 2 * LAYER_BYTES)]
    assert sent == [*half, *half]


def test_buckets_are_filled_from_the_end_and_hold_no_more_than_they_may():
    plan = sw.plan(deep(), X, 4, bucket_bytes=3 * LAYER_BYTES, search="sharding_propagation")
    assert gradient_messages(plan) == [3 * LAYER_BYTES, 3 * LAYER_BYTES, 2 * LAYER_BYTES]  # in the order of sending
    first = [entry.value for entry in plan.conversions if entry.bucket == 3]
    assert sorted(first) == sorted(f"layers.{i}.{name}" for i in (5, 6, 7) for name in ("weight", "bias"))


def test_the_first_message_to_leave_is_a_small_one():
    wide = Chain(4, 512, act=torch.tanh)  # 1 MiB each
    plan = sw.plan(wide, torch.randn(8, 512), 4, search="sharding_propagation")
    assert gradient_messages(plan) == [FIRST_BUCKET_BYTES, 3 * 2**20]


def test_what_forward_gathers_ends_its_message_with_a_block_once_it_is_worth_one():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(4))  # 1 MiB and 2 KiB each
            self.small = nn.ModuleList(nn.Linear(512, 2) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return sum(small(x).square().mean() for small in self.small)

    plan = sw.plan(Blocks(), torch.randn(8, 512), 2, mode="data_parallel", zero=2)
    together: dict[int, set[str]] = {}
    for entry in plan.conversions:
        if any(one.kind == "all_gather" for one in entry.forward):
            together.setdefault(entry.bucket, set()).add(entry.value.rpartition(".")[0])
    assert [sorted(names) for names in together.values()] == [
        ["layers.0"],
        ["layers.1"],
        ["layers.2"],
        ["layers.3", "small.0", "small.1"],
    ]


def test_a_first_message_is_no_smaller_than_it_need_be():
    """A bias alone is not worth one: the first message takes what reaches a mebibyte, as DistributedDataParallel's."""
    plan = sw.plan(Chain(2, 512, bias=True, act=torch.tanh), torch.randn(8, 512), 4, search="sharding_propagation")
    assert gradient_messages(plan) == [FIRST_BUCKET_BYTES + 2048] * 2


def test_other_dtypes_and_other_axes_travel_in_other_messages():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
            self.scale = nn.Parameter(torch.ones(16, dtype=torch.float64))
            self.shift = nn.Parameter(torch.zeros(16, dtype=torch.float64))

        def forward(self, x):
            return (self.down(torch.tanh(self.up(x))) * self.scale + self.shift).square().mean()

    plan = sw.plan(Mixed(), torch.randn(8, 16), 4, mesh=sw.Mesh(dp=2, tp=2), strategies={"up": "n@tp"})
    buckets = {}
    for entry in plan.conversions:
        if entry.bucket:
            buckets.setdefault(entry.bucket, set()).add(entry.value)
    assert list(map(sorted, buckets.values())) == [["down.weight", "up.weight"]]  # scale over dp and tp, shift over dp
    prove(Mixed(), torch.randn(8, 16), plan)


def test_keys_and_values_of_split_queries_travel_together():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x):
            heads = [layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
            mixed = sw.shard(F.scaled_dot_product_attention, "t@cp")(*heads, is_causal=True)
            return mixed.square().mean()

    x = torch.randn(2, 8, 16)
    plan = sw.plan(Attention(), x, 2, mesh=sw.Mesh(cp=2), search="sharding_propagation")
    shared = {entry.bucket for entry in plan.conversions if entry.value in ("/transpose_1", "/transpose_2")}
    assert len(shared) == 1
    assert shared != {0}
    reduced = [entry.num_bytes for entry in plan.collectives(backward=True)]
    assert 2 * (2 * 8 * 16 * 4) in reduced  # the gradients of keys and values, in one message
    prove(Attention(), x, plan)


def test_a_plan_with_buckets_is_that_of_one_device_and_its_record_is_its_list():
    for bucket_bytes in (0, 2 * LAYER_BYTES, 2**30):
        plan = sw.plan(
            deep(), X, 4, mesh=sw.Mesh(dp=2, tp=2), strategies={"layers.0": "n@tp"}, bucket_bytes=bucket_bytes
        )
        report = prove(deep(), X, plan)
        assert report.matches_plan
        loaded = sw.Plan.from_json(plan.to_json())
        assert loaded.bucket_bytes == bucket_bytes
        assert loaded == plan


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "25MB"])
def test_a_wrong_bucket_size_is_refused(wrong):
    with raises(sw.ShardwiseError, "bucket_bytes"):
        sw.plan(deep(), X, 4, bucket_bytes=wrong, search="sharding_propagation")


def test_a_conversion_by_itself_is_no_bucket():
    filled = fill_buckets([], frozenset(), {}.__getitem__, lambda _: True, ends=())
    assert filled == ()
    plan = sw.plan(Chain(1, 4), torch.randn(8, 4), 2, search="sharding_propagation")
    assert not any(entry.bucket for entry in plan.conversions)


def test_a_gradient_larger_than_a_bucket_leaves_early_too():
    """It shares its message with nobody, and is sent while backward goes on all the same."""
    captured = capture(deep(), (X,))
    factored, choice = decide(captured.graph, (), sw.Mesh(dp=4), "data_parallel")
    spmd = build_spmd(captured.graph, factored.rules, choice, sw.Mesh(dp=4), bucket_bytes=1000)
    alone = [step for step in spmd.steps if isinstance(step, Bucket) and len(step.conversions) == 1]
    assert [step.of_parameters for step in alone] == [True] * 16  # two biases are more than 1,000 bytes
    parameters = {source.value for source in captured.graph.sources if source.kind == "parameter"}
    assert not any(step.value in parameters for step in spmd.steps if isinstance(step, Conversion))


def test_what_is_frozen_shares_a_message_with_what_is_not_where_backward_sends_none():
    """PyTorch refuses a target that carries a gradient: results of one message have it one by one."""

    class Moved(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.target = nn.Parameter(torch.randn(6, 8)), nn.Parameter(torch.ones(6, 8), False)

        def forward(self):
            weight = sw.constrain(self.weight.exp(), "[6@tp, 8]")
            target = sw.constrain(self.target.neg(), "[6@tp, 8]")
            weight, target = sw.constrain(weight, "[6, 8]"), sw.constrain(target, "[6, 8]")
            return F.soft_margin_loss(weight, target, reduction="none")

    plan = sw.plan(Moved(), (), 2, mesh=sw.Mesh(tp=2), search="sharding_propagation")
    assert [entry.kind for entry in plan.collectives()] == ["all_gather"]
    assert sw.verify(Moved(), (), plan).ok


def test_a_loss_and_the_number_of_its_tokens_are_summed_in_one_message():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 8)

        def forward(self, x, labels):
            return F.cross_entropy(self.head(x), labels, ignore_index=0)

    batch = torch.randn(12, 16), torch.randint(8, (12,))
    plan = sw.plan(Loss(), batch, 4, mesh=sw.Mesh(dp=4), mode="data_parallel")
    assert [entry.kind for entry in plan.collectives()] == ["all_reduce"]
    assert sw.verify(Loss(), batch, plan).ok


def test_what_only_a_call_returns_shares_no_message_with_what_a_step_needs():
    class Returned(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 8)

        def forward(self, x, labels):
            found = sw.constrain(labels * 3, "[12@dp]")
            targets = sw.constrain(sw.constrain(labels.abs(), "[12@dp]"), "[12]")
            return {"loss": F.cross_entropy(self.head(x), targets), "found": found}

    batch = torch.randn(12, 16), torch.randint(8, (12,))
    plan = sw.plan(Returned(), batch, 4, mesh=sw.Mesh(dp=4), search="sharding_propagation")
    gathered = [entry for entry in plan.conversions if any(one.kind == "all_gather" for one in entry.forward)]
    assert [(entry.op == "", entry.bucket) for entry in gathered] == [(False, 0), (True, 0)], "each by itself"
    assert sw.verify(Returned(), batch, plan).ok


def test_parameters_gathered_again_travel_with_their_part_of_the_model():
    """The embedding ahead of the blocks and the head behind them are apart: backward, which does not read the former,
    gathers only the latter again."""

    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.norm, self.head = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16, bias=False)
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, ids):
            x = self.table(ids)
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return F.cross_entropy(self.head(self.norm(x)), ids)

    ids = torch.arange(8)
    plan = sw.plan(Ends(), ids, 2, mode="data_parallel", zero=3)
    gathered = [e for e in plan.conversions if any(each.kind == "all_gather" for each in e.forward)]
    together: dict[object, list[str]] = {}
    for entry in gathered:
        together.setdefault(entry.bucket or entry.value, []).append(entry.value)
    assert [sorted(names) for names in together.values()] == [
        ["table.weight"],
        ["layers.0.bias", "layers.0.weight"],
        ["layers.1.bias", "layers.1.weight"],
        ["head.weight", "norm.bias", "norm.weight"],
    ]
    assert {entry.value for entry in gathered if not entry.again} == {"table.weight"}
    assert sw.verify(Ends(), ids, plan).ok
