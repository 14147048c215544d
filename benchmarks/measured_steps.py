"""Models whose training steps were measured on one device, and what is predicted for them (``kernel_prices.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from compiled_prices import price_section
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from shardwise.costs.cluster import Cluster
from shardwise.costs.collectives import Links
from shardwise.costs.memory import busiest_program, memory_of_program
from shardwise.costs.prices import Prices
from shardwise.costs.timeline import simulate_program
from shardwise.graph.capture import capture
from shardwise.plans.bind import program_of
from shardwise.programs.vjp import VjpCache
from shardwise.runtime.compiled import compiled_program

UNMASKED = "without_mask"  # attention that is told to be causal, as transformers does where nothing is traced
MASKED = "with_mask"  # attention that gets a mask as a tensor, as under the compiler when steps were measured


def unmasked(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, scaling: float | None = None, **options: Any
) -> tuple[Tensor, None]:
    if k.shape[1] != q.shape[1]:
        count = q.shape[1] // k.shape[1]
        k, v = (x[:, :, None].expand(-1, -1, count, -1, -1).reshape(q.shape) for x in (k, v))
    given = options.get("is_causal")
    causal = bool(getattr(module, "is_causal", False) if given is None else given)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scaling).transpose(1, 2).contiguous(), None


def build(row: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Tensor]] | None:
    """The model and a batch on meta tensors, in bfloat16; None for one that is not known. Under ``torch.compile``
    language models got their masks as tensors. Attention is without dropout, which plans write out."""
    transformers.AttentionInterface.register(UNMASKED, unmasked)
    transformers.AttentionInterface.register(MASKED, masked)
    how = MASKED if row["mode"] == "compiled" and row["model"] in ("llama", "gpt2") else UNMASKED
    sizes = {"num_hidden_layers": row["layers"], "hidden_size": row["hidden"], "num_attention_heads": row["heads"]}
    sizes |= {"intermediate_size": row["ffn"], "attn_implementation": how}
    with torch.device("meta"):
        if row["model"] == "llama":
            heads, length = row["kv_heads"], row["seq"]
            model: nn.Module = transformers.LlamaForCausalLM(
                transformers.LlamaConfig(
                    **sizes, num_key_value_heads=heads, vocab_size=row["vocab"], use_cache=False,
                    max_position_embeddings=length,
                )
            )  # fmt: skip
        elif row["model"] == "gpt2":
            model = transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    n_embd=row["hidden"], n_layer=row["layers"], n_head=row["heads"], vocab_size=row["vocab"],
                    n_positions=row["seq"], use_cache=False, attn_pdrop=0.0, attn_implementation=how,
                )
            )  # fmt: skip
        elif row["model"] == "bert":
            config = transformers.BertConfig(**sizes, vocab_size=row["vocab"], attention_probs_dropout_prob=0.0)
            model = transformers.BertForMaskedLM(config)
        elif row["model"] == "vit":
            model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, num_labels=1000))
        else:
            return None
        model = model.to(torch.bfloat16).train()
        if row["model"] == "vit":
            images = torch.empty(row["batch"], 3, 224, 224, dtype=torch.bfloat16)
            return model, {"pixel_values": images, "labels": torch.empty(row["batch"], dtype=torch.int64)}
        ids = torch.empty(row["batch"], row["seq"], dtype=torch.int64)
        inputs = {"input_ids": ids, "labels": ids}
        if how == MASKED:  # given from outside: a causal one that is computed would be recognised
            inputs["attention_mask"] = torch.empty(row["batch"], 1, row["seq"], row["seq"], dtype=torch.bool)
        return model, inputs


def masked(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, scaling: float | None = None, **options: Any
) -> tuple[Tensor, None]:
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling).transpose(1, 2).contiguous(), None


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of a step, and the most bytes of its tensors."""

    seconds: float
    num_bytes: float


def predicted(row: Mapping[str, Any], cluster: str) -> Predicted | None:
    """What is predicted for a measured step; None for a model that is not known."""
    found = build(row)
    if found is None:
        return None
    model, inputs = found
    one = Cluster.load(cluster).with_devices(1)
    plan = sw.plan(model, inputs, one, recompute="none" if row["recompute"] == "none" else "full")
    spmd = program_of(plan, capture(model, (), inputs).graph, training=True)
    program = busiest_program(spmd, VjpCache())
    if row["mode"] == "compiled":
        nobody: Any = None  # one device sends nothing
        program = compiled_program(program, nobody, torch.device("cpu"), generate=price_section)
    prices = Prices(Links(one, plan.mesh), row["optimizer"].lower())
    step = simulate_program(program, prices)
    return Predicted(step.seconds, memory_of_program(program, prices).peak.num_bytes)
