"""The operators of GPT-2, Llama, BERT and ViT: every one has a rule, and what stays whole has a reason."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
import transformers

from shardwise.graph.capture import capture
from shardwise.graph.ir import Graph
from shardwise.rules import rule_of
from shardwise.rules.atoms import factor_graph
from shardwise.rules.rule import OpRule

# Which text transformers and torch.export print on the way is of no interest here.
pytestmark = pytest.mark.filterwarnings("ignore")

# Operators with a dim that can not be split, on values that a gradient flows through, and why.
WHOLE = {
    "aten.slice.Tensor": "which half of a rotary embedding; where in the half is split",
    "aten.split.Tensor": "which of query, key and value; heads are split",
    "aten.select.int": "one row is taken: the class token",
    "aten.conv2d.default": "the inside of a window; windows and channels are split",
}
# The same on integers and booleans: positions, without gradient and small.
WHOLE_INDICES = {"aten.slice.Tensor": "the first half of a table of positions"}
NAMES = ("gpt2", "gpt2-eager", "llama", "llama-eager", "bert", "bert-eager", "vit", "vit-eager")


@cache
def captured(name: str) -> Graph:
    """A tiny model in training, with labels; the eager variants have dropout and, for text, a padding mask."""
    torch.manual_seed(5)
    kind, _, eager = name.partition("-")
    p = 0.1 if eager else 0.0
    attention = {"attn_implementation": "eager" if eager else "sdpa"}
    sizes = {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = {**sizes, **attention, "hidden_dropout_prob": p, "attention_probs_dropout_prob": p}
    ids = torch.randint(0, 64, (4, 8))
    text = {"input_ids": ids, "labels": ids} | ({"attention_mask": torch.ones_like(ids)} if eager else {})
    if kind == "gpt2":
        shape = {"n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
        drop = {"resid_pdrop": p, "embd_pdrop": p, "attn_pdrop": p}
        config = transformers.GPT2Config(vocab_size=64, use_cache=False, **shape, **drop, **attention)
        return capture(transformers.GPT2LMHeadModel(config).train(), (), text).graph
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=64, num_key_value_heads=2, use_cache=False, attention_dropout=p, **sizes, **attention
        )
        return capture(transformers.LlamaForCausalLM(config).train(), (), text).graph
    if kind == "bert":
        config = transformers.BertConfig(vocab_size=64, max_position_embeddings=16, **encoder)
        return capture(transformers.BertForMaskedLM(config).train(), (), text).graph
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=6, **encoder)
    images = {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.randint(0, 6, (4,))}
    return capture(transformers.ViTForImageClassification(config).train(), (), images).graph


def rules_of(graph: Graph) -> dict[str, OpRule]:
    found = {op.name: rule_of(op, graph) for op in graph.ops}
    missing = sorted({str(op.target) for op in graph.ops if found[op.name] is None})
    assert not missing, f"operators without a rule: {missing}"
    return {name: rule for name, rule in found.items() if rule is not None}


def unsplittable(graph: Graph, differentiable: bool) -> Iterator[str]:
    for op in graph.ops:
        rule = rule_of(op, graph)
        assert rule is not None
        windowed = {name for name, _ in rule.windows}
        if any(graph.by_name[name].requires_grad for name in op.results) == differentiable and any(
            f.kind == "whole" and f.size > 1 and f.name not in windowed for f in rule.factors
        ):
            yield str(op.target)


@pytest.mark.parametrize("name", NAMES)
def test_every_operator_of_the_model_has_a_rule(name: str) -> None:
    graph = captured(name)
    assert len(rules_of(graph)) == len(graph.ops) > 60


def test_only_what_has_a_reason_stays_whole() -> None:
    """Equality, not inclusion: a reason that no model needs any more is to be removed."""
    for differentiable, reasons in ((True, WHOLE), (False, WHOLE_INDICES)):
        found = {target for name in NAMES for target in unsplittable(captured(name), differentiable)}
        assert found == reasons.keys()


@pytest.mark.parametrize("name", NAMES)
def test_heads_can_be_split_from_the_weight_to_the_attention(name: str) -> None:
    """The atoms that views cut travel back to the weights: 4 heads, or 2 groups, are a parallel factor of a linear."""
    graph = captured(name)
    divided = factor_graph(graph, rules_of(graph)).rules
    heads = 0
    for op in graph.ops:
        if str(op.target) in ("aten.linear.default", "aten.mm.default"):
            parts = [f for f in divided[op.name].factors if f.name.startswith("n")]
            kinds = {f.kind for f in parts}
            assert kinds == {"parallel"}, f"{op.target}: {divided[op.name]}"
            heads += any(f.size in (2, 4) for f in parts) and len(parts) > 1
    assert heads >= 2  # at least one per layer
