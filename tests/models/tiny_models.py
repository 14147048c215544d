"""The four models of the papers, in widths that a laptop verifies in a second, with their default dropout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

VOCABULARY = 50
CLASSES = 12
WIDTH = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}


@dataclass(frozen=True)
class TinyModel:
    """``build``: the module; ``inputs``: from a batch size, its named inputs with values; ``strategies``: its tensor
    parallel plan."""

    build: Callable[[], nn.Module]
    inputs: Callable[[int], dict[str, Any]]
    strategies: Mapping[str, str]


def token_inputs(batch: int) -> dict[str, Any]:
    ids = torch.randint(0, VOCABULARY, (batch, 6))
    return {"input_ids": ids, "labels": torch.where(torch.rand(ids.shape) < 0.3, -100, ids)}


def image_inputs(batch: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(batch, 3, 8, 8), "labels": torch.randint(0, CLASSES, (batch,))}


def gpt2(heads: int = 4, layers: int = 2) -> TinyModel:
    config = GPT2Config(
        n_layer=layers,
        n_embd=8 * heads,
        n_head=heads,
        vocab_size=VOCABULARY,
        n_positions=8,
        bos_token_id=0,
        eos_token_id=0,
    )
    return TinyModel(
        lambda: GPT2LMHeadModel(deepcopy(config)),
        token_inputs,
        {
            "transformer.wte": "v@tp",
            "transformer.h.*.attn.c_attn": "n@tp",
            "transformer.h.*.mlp.c_fc": "n@tp",
            "lm_head": "n@tp",
        },
    )


def llama(heads: int = 8, key_heads: int = 2, layers: int = 2) -> TinyModel:
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=4 * heads,
        intermediate_size=48,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
    )
    return TinyModel(
        lambda: LlamaForCausalLM(deepcopy(config)),
        token_inputs,
        {
            "model.embed_tokens": "v@tp",
            "model.layers.*.self_attn.[qkv]_proj": "n@tp",
            "model.layers.*.mlp.gate_proj": "n@tp",
            "model.layers.*.mlp.up_proj": "n@tp",
            "lm_head": "n@tp",
        },
    )


def bert() -> TinyModel:
    config = BertConfig(**WIDTH, num_attention_heads=4, vocab_size=VOCABULARY, max_position_embeddings=8)
    return TinyModel(
        lambda: BertForMaskedLM(deepcopy(config)),
        token_inputs,
        {
            "bert.embeddings.word_embeddings": "v@tp",
            "bert.encoder.layer.*.attention.self.query": "n@tp",
            "bert.encoder.layer.*.attention.self.key": "n@tp",
            "bert.encoder.layer.*.attention.self.value": "n@tp",
            "bert.encoder.layer.*.intermediate.dense": "n@tp",
            "cls.predictions.transform.dense": "n@tp",
            "cls.predictions.decoder": "n@tp",
        },
    )


def vit() -> TinyModel:
    config = ViTConfig(**WIDTH, num_attention_heads=4, image_size=8, patch_size=4, num_labels=CLASSES)
    return TinyModel(
        lambda: ViTForImageClassification(deepcopy(config)),
        image_inputs,
        {
            "vit.embeddings.patch_embeddings.projection": "co@tp",
            "vit.layers.*.attention.[qkv]_proj": "n@tp",
            "vit.layers.*.mlp.fc1": "n@tp",
            "classifier": "n@tp",
        },
    )


def resnet() -> TinyModel:
    config = ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 2], layer_type="basic")
    config.num_labels = CLASSES
    return TinyModel(lambda: ResNetForImageClassification(deepcopy(config)), image_inputs, {})


MODELS = {"gpt2": gpt2(), "llama": llama(), "bert": bert(), "vit": vit()}


def without_dropout(module: nn.Module) -> nn.Module:
    """Return a model that draws nothing, also in training: eager masks are others than those of plans."""
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
        for name in ("dropout", "attention_dropout", "dropout_prob"):  # numbers that attention itself reads
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return module
