"""Real models in train mode: the graph computes what the module computes, gradients included."""

from __future__ import annotations

import resource

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from graph.against_eager import check_against_eager, operators
from models.tiny_models import MODELS, without_dropout
from shardwise.graph.capture import capture


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_loss_outputs_and_gradients_of_the_eager_module(name):
    torch.manual_seed(0)
    model, inputs = without_dropout(MODELS[name].build()).train(), MODELS[name].inputs(2)
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in inputs.items()}
    captured = check_against_eager(model, **inputs, tolerance=1e-9)
    assert captured.graph.loss is not None
    assert all(op.source and not op.source.startswith("linear.py") for op in captured.graph.ops)


def test_a_padding_mask_is_an_input():
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 8))
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    model = without_dropout(MODELS["llama"].build()).train()
    captured = check_against_eager(model, input_ids=ids, attention_mask=mask, labels=ids, tolerance=1e-9)
    inputs = [source.names[0] for source in captured.graph.sources if source.kind == "input"]
    assert inputs == ["kwargs['input_ids']", "kwargs['attention_mask']", "kwargs['labels']"]


def test_dropout_in_a_model_becomes_the_hashed_one_with_one_seed_for_all():
    ids = torch.randint(0, 50, (2, 8))
    captured = capture(MODELS["gpt2"].build().train(), (), {"input_ids": ids, "labels": ids})
    drops = [op for op in captured.graph.ops if str(op.target) == "shardwise.dropout.default"]
    assert [op.args[3] for op in drops] == list(range(len(drops)))
    assert len(drops) == 7
    assert {op.args[1].name for op in drops} == {"_shardwise_seed"}
    assert "scaled_dot_product_attention.default" not in operators(captured)


def test_llama_405b_at_full_width_needs_no_memory():
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=16384, intermediate_size=53248, num_attention_heads=128, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(8, 8192, dtype=torch.long)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    captured = capture(model, (), {"input_ids": ids, "labels": ids})
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < 300, f"{grown:.0f} MiB"
    assert sum(captured.graph.by_name[s.value].num_bytes for s in captured.graph.sources) > 30e9
    assert all(parameter.is_meta for parameter in model.parameters())
