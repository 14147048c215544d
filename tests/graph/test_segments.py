"""What of a model is to be made again in backward: said by ``sw.recompute``, by the model's own checkpoints, and by
``sw.plan``; and what a plan makes of it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import shardwise as sw
from raising import raises
from search.small_models import PreNorm
from shardwise.api import step_memory
from shardwise.graph.capture import capture
from shardwise.graph.segments import Segment, block_of


class Net(nn.Module):
    """Blocks, some of which are checkpointed by the model itself."""

    def __init__(self, depth: int = 3, width: int = 8, own: tuple[int, ...] = (), **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PreNorm(width, 4 * width, 0.1) for _ in range(depth))
        self.own, self.options = own, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False, **self.options) if i in self.own else block(x)
        return x.square().mean()


X = torch.randn(8, 4, 8)


def segments(model: nn.Module) -> list[tuple[str, str, set[str]]]:
    found: tuple[Segment, ...] = capture(model, (X,)).segments
    return [(s.name, s.how, {block_of(op) for op in s.operators}) for s in found]


def again(plan: sw.Plan) -> set[str]:
    return {block_of(entry.name) for entry in plan.operators if entry.again}


def planned(model: nn.Module, **choices: Any) -> sw.Plan:
    return sw.plan(model, X, 4, mode="data_parallel", **choices)


def test_what_is_named_and_what_the_model_checkpoints_are_segments() -> None:
    net = Net(own=(2,))
    sw.recompute(net.blocks[0])
    sw.recompute(net.blocks[1], "cheap")
    assert segments(net) == [
        ("blocks.0", "full", {"blocks.0"}),
        ("blocks.1", "cheap", {"blocks.1"}),
        ("checkpoint", "full", {"blocks.2"}),
    ]
    assert segments(Net()) == []


def test_of_nested_segments_the_outer_counts_unless_the_inner_is_made_again_otherwise() -> None:
    net = sw.recompute(Net())
    sw.recompute(net.blocks[0])
    sw.recompute(net.blocks[1], "none")
    assert segments(net) == [("", "full", {"blocks.0", "blocks.2", ""}), ("blocks.1", "none", {"blocks.1"})]


def test_a_checkpoint_that_chooses_what_it_keeps_is_announced() -> None:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])

    with pytest.warns(sw.errors.CaptureWarning, match="uses context_fn"):
        assert segments(Net(own=(0,), context_fn=contexts)) == [("checkpoint with context_fn", "full", {"blocks.0"})]


@pytest.mark.long
def test_a_model_of_transformers_that_enables_checkpointing_is_made_again() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=32, use_cache=False
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = {"input_ids": torch.randint(32, (4, 8)), "labels": torch.randint(32, (4, 8))}
    assert not again(sw.plan(model, ids, 2, mode="data_parallel"))
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # another name from transformers 6 on
        model.gradient_checkpointing_enable({"use_reentrant": False})
    plan = sw.plan(model, ids, 2, mode="data_parallel")
    assert again(plan) == {"model.layers.0", "model.layers.1"}
    assert sw.verify(model, ids, plan).ok
    assert not again(sw.plan(model.eval(), ids, 2, mode="data_parallel")), "checkpoints are for training"


def test_what_is_asked_of_a_plan_comes_on_top_of_what_the_model_asks() -> None:
    net = Net()
    sw.recompute(net.blocks[1], "none")
    assert again(planned(net, recompute="full")) == {"blocks.0", "blocks.2"}
    assert again(planned(net)) == set()
    sw.recompute(net.blocks[1])
    assert again(planned(net)) == again(planned(net, recompute=None)) == {"blocks.1"}
    assert again(planned(net, recompute="none")) == set()


def test_more_is_made_again_and_less_is_held() -> None:
    held = {}
    for how in (None, "cheap", "full"):
        net, plan = Net(depth=6), None
        plan = planned(net, recompute=how)
        assert sw.verify(net, X, plan).ok
        memory = step_memory(net, X, plan)
        held[how] = memory.kept_bytes
    assert held["full"] < held["cheap"] < held[None], held
    # Of every block what comes in and goes out is kept; the first one's input is the batch, which is there anyway.
    # One number and the last output's gradient belong to the loss.
    one = 8 // 4 * 4 * 8 * 4
    assert 5 * one <= held["full"] <= 8 * one, held


def test_products_are_not_done_twice_where_only_what_is_cheap_is() -> None:
    plan = planned(Net(), recompute="cheap")
    repeated = {entry.target for entry in plan.operators if entry.again}
    assert "aten.gelu.default" in repeated
    assert "aten.linear.default" not in repeated
    assert "aten.linear.default" in {
        entry.target for entry in planned(Net(), recompute="full").operators if entry.again
    }


def test_a_plan_says_what_it_makes_again_and_reads_it_back() -> None:
    plan = planned(Net(), recompute="full", zero=3)
    assert "again in backward: " in str(plan)
    assert "18 of 18 parameters are gathered" in str(plan)
    copy = sw.Plan.from_json(plan.to_json())
    assert copy == plan
    assert [e.again for e in copy.operators] == [e.again for e in plan.operators]
    assert plan != planned(Net(), zero=3)
    assert "again in backward" in str(planned(Net()).diff(plan))


class Called(nn.Module):
    """A function whose results are made again, between products; ``how`` of the call."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(8, 32), nn.Linear(32, 8), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(sw.recompute(F.gelu, self.how)(self.up(x))).square().mean()


def test_results_of_a_function_are_made_again() -> None:
    found = {}
    for how in ("all", "full", "none"):
        net = Called(how)
        plan = planned(net)
        assert sw.verify(net, X, plan).ok
        found[how] = {entry.name for entry in plan.operators if entry.again}
    assert found == {"all": {"/gelu"}, "full": set(), "none": set()}


def test_mistakes_are_named() -> None:
    with raises(sw.ShardwiseError, "'every'"):
        sw.recompute(nn.Linear(2, 2), "every")  # type: ignore[arg-type]
    with raises(sw.ShardwiseError, "not int", fix="recompute(model.layers[3])"):
        sw.recompute(7)  # type: ignore[type-var]
    with raises(sw.ShardwiseError, "'some'", "messages"):
        sw.recompute(nn.Linear(2, 2), messages="some")  # type: ignore[arg-type]
    with raises(sw.ShardwiseError, "'some'", "'auto'"):
        planned(Net(), recompute="some")
    with raises(sw.ShardwiseError, "recompute='full'"):
        sw.plan(nn.Linear(8, 8), X, 2, mode="data_parallel", recompute="full", loss=lambda y: y.sum())
    with raises(sw.ShardwiseError, "zero is 4", fix="1, 2 or 3"):
        planned(Net(), zero=4)
    with raises(sw.errors.LayoutError, "'tp'", "split"):
        planned(Net(), zero=sw.Zero(3, over=("tp",)))
