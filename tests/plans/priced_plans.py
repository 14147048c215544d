"""Plans chosen by price, as text for a person to review: five models on three clusters.

A file under ``tests/golden/priced/`` says what was decided: the strategy of every operator, how inputs and parameters
are stored, and which conversions that needs. Seconds, digests and gaps are not in it. It changes only with a decision.
``make golden``, or ``python -m plans.priced_plans`` in tests/, writes the files anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw
from models.paper_models import Case, dlrm, resnet
from runtime.small_gpt import example_module

FOLDER = Path(__file__).parents[1] / "golden" / "priced"
SECTIONS = ("inputs:", "parameters:", "buffers:", "operators:", "delivered:")


@dataclass(frozen=True)
class Target:
    name: str
    cluster: str
    mesh: sw.Mesh


class BigEmbedding(nn.Module):
    """A table of very many rows under a small stack of fully connected layers."""

    def __init__(self, rows: int, width: int, classes: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor, label: Tensor) -> Tensor:
        x = self.table(ids).mean(1)
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x), label)


class LlamaBlock(nn.Module):
    """RMSNorm, attention whose keys and values serve several heads each, and a gated MLP."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        head_width = width // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, key_heads * head_width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q = self.q(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (
            projection(normed).unflatten(-1, (self.key_heads, -1)).transpose(1, 2) for projection in (self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        y: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return y


class Llama(nn.Module):
    """Blocks between a token embedding and a head with cross entropy."""

    def __init__(self, layers: int, width: int, heads: int, key_heads: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, key_heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def _gpt() -> nn.Module:
    gpt = example_module("gpt")
    model: nn.Module = gpt.GPT(gpt.GPTConfig(vocab=4096, layers=1, heads=8, width=512, context=64))
    return model


def _tokens(vocabulary: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    return torch.randint(vocabulary, (batch, length)), torch.randint(vocabulary, (batch, length))


MODELS = {
    "gpt": Case(_gpt, lambda: _tokens(4096, 64, 64)),
    "big-embedding": Case(
        lambda: BigEmbedding(2_000_000, 64, 100), lambda: (torch.randint(10, (16384, 8)), torch.randint(100, (16384,)))
    ),
    "resnet": resnet(256, (1, 1), 64, 1000, 128),
    "llama": Case(lambda: Llama(1, 1024, 16, 4, 8192), lambda: _tokens(8192, 16, 128)),
    "dlrm": dlrm(16384, 4, 500_000, 64, 512),
}
TARGETS = (
    Target("one-axis", "h100-1x8", sw.Mesh(dp=8)),
    Target("two-axes", "h100-1x8", sw.Mesh(dp=2, tp=4)),
    Target("two-nodes", "a100-80-2x4", sw.Mesh(node=2, gpu=4)),
)


def decisions(model: str, target: Target) -> str:
    case = MODELS[model]
    with torch.device("meta"):
        module, inputs = case.build(), case.inputs()
    plan = sw.plan(module, inputs, sw.Cluster.load(target.cluster), mesh=target.mesh)
    lines = str(plan).splitlines()
    begin = min(lines.index(section) for section in SECTIONS if section in lines)
    return "\n".join([lines[0], *lines[begin:], ""])


def file_of(model: str, target: Target) -> Path:
    return FOLDER / f"{model}-{target.name}.txt"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for model in MODELS:
        for target in TARGETS:
            file_of(model, target).write_text(decisions(model, target))
            print(file_of(model, target))


if __name__ == "__main__":
    main()
