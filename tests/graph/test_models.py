"""Real models in train mode: the graph computes what the module computes, gradients included."""

from __future__ import annotations

import resource

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
    ViTConfig,
    ViTForImageClassification,
)

from graph.against_eager import check_against_eager, operators
from shardwise.graph.capture import capture

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
TINY = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}


def gpt2(dropout: float = 0.0) -> nn.Module:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=50, n_positions=16, bos_token_id=0, eos_token_id=0, **rates
    )
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**TINY, num_key_value_heads=2, vocab_size=50, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(**TINY, **NO_DROPOUT, vocab_size=50))


def vit() -> nn.Module:
    return ViTForImageClassification(ViTConfig(**TINY, **NO_DROPOUT, image_size=16, patch_size=4, num_labels=5))


@pytest.mark.parametrize("build", [gpt2, llama, bert], ids=lambda build: build.__name__)
def test_a_text_model_has_the_loss_outputs_and_gradients_of_the_eager_module(build):
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 8))
    labels = torch.where(torch.rand(2, 8) < 0.3, -100, ids)
    captured = check_against_eager(build().train(), input_ids=ids, labels=labels, tolerance=1e-9)
    assert captured.graph.loss is not None
    assert all(op.source and not op.source.startswith("linear.py") for op in captured.graph.ops)


def test_a_vision_model_has_the_loss_outputs_and_gradients_of_the_eager_module():
    torch.manual_seed(0)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    captured = check_against_eager(vit().train(), pixel_values=images, labels=torch.tensor([1, 3]), tolerance=1e-9)
    assert captured.graph.loss is not None


def test_a_padding_mask_is_an_input():
    torch.manual_seed(0)
    ids = torch.randint(0, 50, (2, 8))
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    captured = check_against_eager(llama().train(), input_ids=ids, attention_mask=mask, labels=ids, tolerance=1e-9)
    inputs = [source.names[0] for source in captured.graph.sources if source.kind == "input"]
    assert inputs == ["kwargs['input_ids']", "kwargs['attention_mask']", "kwargs['labels']"]


def test_dropout_in_a_model_becomes_the_hashed_one_with_one_seed_for_all():
    ids = torch.randint(0, 50, (2, 8))
    captured = capture(gpt2(dropout=0.1).train(), (), {"input_ids": ids, "labels": ids})
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
