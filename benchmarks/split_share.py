"""Prints what a 2 x 4 data-by-tensor plan really splits of GPT-2, Llama 3, BERT and ViT at full width.

Two layers each, on the meta device: neither devices nor memory are needed.
Run ``python benchmarks/split_share.py [model ...]``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
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

import shardwise as sw
from shardwise.graph.capture import capture
from shardwise.plans.printing import format_bytes

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from models.share import SplitShare, share_of_plan

MESH = sw.Mesh(dp=2, tp=4)
MIN_PRINTED = 1e-4  # hides small remainders of sizes that do not divide


@dataclass(frozen=True)
class Case:
    """A model on the meta device, the named inputs of one whole batch, and its tensor parallel strategies."""

    build: Callable[[], nn.Module]
    inputs: Mapping[str, torch.Tensor]
    strategies: Mapping[str, str]


def tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(batch, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


def images(batch: int, size: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.zeros(batch, 3, size, size, device="meta"),
        "labels": torch.zeros(batch, dtype=torch.int64, device="meta"),
    }


def vit() -> nn.Module:
    config = ViTConfig(num_hidden_layers=2)
    config.num_labels = 1000
    return ViTForImageClassification(config)


# Megatron's plan: the first matrix of every pair is split by columns; attention, the second matrix and its sum follow.
GPT2_STRATEGIES = {
    "transformer.wte": "v@tp",
    "transformer.h.*.attn.c_attn": "n@tp",
    "transformer.h.*.mlp.c_fc": "n@tp",
    "lm_head": "n@tp",
}
LLAMA_STRATEGIES = {
    "model.embed_tokens": "v@tp",
    "model.layers.*.self_attn.[qkv]_proj": "n@tp",
    "model.layers.*.mlp.gate_proj": "n@tp",
    "model.layers.*.mlp.up_proj": "n@tp",
    "lm_head": "n@tp",
}
BERT_STRATEGIES = {
    "bert.embeddings.word_embeddings": "v@tp",
    "bert.encoder.layer.*.attention.self.query": "n@tp",
    "bert.encoder.layer.*.attention.self.key": "n@tp",
    "bert.encoder.layer.*.attention.self.value": "n@tp",
    "bert.encoder.layer.*.intermediate.dense": "n@tp",
    "cls.predictions.transform.dense": "n@tp",
    "cls.predictions.decoder": "n@tp",
}
VIT_STRATEGIES = {
    "vit.embeddings.patch_embeddings.projection": "co@tp",
    "vit.layers.*.attention.[qkv]_proj": "n@tp",
    "vit.layers.*.mlp.fc1": "n@tp",
    "classifier": "n@tp",
}

CASES = {
    "gpt2": Case(lambda: GPT2LMHeadModel(GPT2Config(n_layer=2)), tokens(8, 1024), GPT2_STRATEGIES),
    "llama-3-8b": Case(
        lambda: LlamaForCausalLM(
            LlamaConfig(
                num_hidden_layers=2,
                hidden_size=4096,
                intermediate_size=14336,
                num_attention_heads=32,
                num_key_value_heads=8,
                vocab_size=128256,
                max_position_embeddings=8192,
                rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            )
        ),
        tokens(8, 8192),
        LLAMA_STRATEGIES,
    ),
    "bert-base": Case(lambda: BertForMaskedLM(BertConfig(num_hidden_layers=2)), tokens(32, 512), BERT_STRATEGIES),
    "vit-base": Case(
        vit,
        images(64, 224),
        VIT_STRATEGIES,
    ),
}


def measure(case: Case, mesh: sw.Mesh = MESH) -> SplitShare:
    """Plan a case in train mode, and the share that the plan splits."""
    with torch.device("meta"):
        model = case.build().train()
    named: dict[str, Any] = dict(case.inputs)
    plan = sw.plan(model, (), mesh.num_devices, kwargs=named, mesh=mesh, strategies=case.strategies)
    return share_of_plan(plan, capture(model, (), named).graph)


def share_table(shares: Mapping[str, SplitShare], *, num_worst: int = 3) -> Table:
    """Return a table with a row per model, and the operators and parameters that reduce its share the most."""
    table = Table(show_lines=True, title="What the plan really splits")
    for header in ("model", "mesh", "ops", "no rule", "FLOPs", "parameter bytes", "sent per device", "worst items"):
        table.add_column(header, justify="left" if header in ("model", "mesh", "worst items") else "right")
    for model, share in shares.items():
        sent = share.bytes_sent
        table.add_row(
            model,
            str(share.mesh),
            str(share.num_operators),
            str(len(share.without_rule)),
            _percent(share.flops) + ("\nof the others" if share.without_rule else ""),
            _percent(share.parameters),
            f"{format_bytes(sent.forward)} forward\n{format_bytes(sent.backward)} backward\n"
            f"{format_bytes(sent.delivered)} outputs",
            "\n".join(_worst(share, num_worst)) or "-",
        )
    return table


def _worst(share: SplitShare, number: int) -> list[str]:
    """Return lines for the worst ``number`` of operators without a rule, other operators, and parameters."""
    lines = [[f"{name}: no rule" for name in share.without_rule]]
    for items in (share.operators_unsplit, share.parameters_unsplit):
        printed = [item for item in items if item.lost >= MIN_PRINTED]
        lines.append([f"{item.name}: {item.of_total:.2%} of all, {item.reason}" for item in printed])
    return [
        line
        for of_kind in lines
        for line in of_kind[:number] + [f"... {len(of_kind) - number} more"] * (len(of_kind) > number)
    ]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def main(names: list[str]) -> None:
    shares = {}
    for name in names or CASES:
        start = time.perf_counter()
        shares[name] = measure(CASES[name])
        print(f"{name}: planned in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    Console(width=180).print(share_table(shares, num_worst=4))


if __name__ == "__main__":
    main(sys.argv[1:])
