"""Models of published runs that are no GPT-2 (for ``published_prices.py``): Llama, with root-mean-square norms, rotated
positions and grouped heads, its network gated or not (Nemotron), its attention latent or not (DeepSeek)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from published_experts import Experts
from published_memory import Shape
from published_rows import LATENT, Row
from torch import Tensor, nn
from torch.nn import functional as F

# Columns and rows, as Megatron splits; what is between follows.
COLUMNS, ROWS = "n@tp", "k@tp"


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of latent attention (DeepSeek-V2, 2024): ranks of queries (0: they have none) and of keys and values, and
    what a head has of both."""

    q_rank: int
    kv_rank: int
    whole: int
    rotated: int
    value: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a Llama has beside a ``Shape``: heads of queries, of keys and values, their size, and the width of the
    network between, ``gated`` or squared."""

    heads: int
    kv_heads: int
    head_size: int
    width: int
    gated: bool = True
    latent: Latent | None = None

    def strategies(self) -> dict[str, str]:
        """Return how Megatron splits the products of a layer."""
        columns = ("q", "k", "v") if self.latent is None else ("q_up", "kv_up")
        columns += ("gate", "up") if self.gated else ("up",)
        return {f"*.{name}": COLUMNS for name in columns} | {f"*.{name}": ROWS for name in ("out", "down")}


class Attention(nn.Module):
    """Projections to heads, which may share keys and values."""

    def __init__(self, width: int, sizes: Sizes) -> None:
        super().__init__()
        self.size = sizes.head_size
        self.repeats = sizes.heads // sizes.kv_heads
        self.q = nn.Linear(width, sizes.heads * self.size, bias=False)
        self.k, self.v = (nn.Linear(width, sizes.kv_heads * self.size, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(2, (-1, self.size)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (rotated(part, cos, sin) for part in (q, k))
        if self.repeats > 1:
            k, v = (part.repeat_interleave(self.repeats, 1) for part in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class LatentAttention(nn.Module):
    """Queries, keys and values from a few latent ones, of which one key is rotated and shared."""

    def __init__(self, width: int, sizes: Sizes, latent: Latent) -> None:
        super().__init__()
        self.latent = latent
        query = sizes.heads * (latent.whole + latent.rotated)
        self.q_down = nn.Linear(width, latent.q_rank, bias=False) if latent.q_rank else nn.Identity()
        self.q_norm = nn.RMSNorm(latent.q_rank or width)
        self.q_up = nn.Linear(latent.q_rank or width, query, bias=False)
        self.kv_down = nn.Linear(width, latent.kv_rank + latent.rotated, bias=False)
        self.kv_norm = nn.RMSNorm(latent.kv_rank)
        self.kv_up = nn.Linear(latent.kv_rank, sizes.heads * (latent.whole + latent.value), bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        own = self.latent
        q = self.q_up(self.q_norm(self.q_down(x))).unflatten(2, (-1, own.whole + own.rotated)).transpose(1, 2)
        low, shared = self.kv_down(x).split([own.kv_rank, own.rotated], -1)
        kv = self.kv_up(self.kv_norm(low)).unflatten(2, (-1, own.whole + own.value)).transpose(1, 2)
        key, value = kv.split([own.whole, own.value], -1)
        whole, turned = q.split([own.whole, own.rotated], -1)
        turned, shared = rotated(turned, cos, sin), rotated(shared.unsqueeze(1), cos, sin)
        q, k = torch.cat((whole, turned), -1), torch.cat((key, shared.expand(turned.shape)), -1)
        return F.scaled_dot_product_attention(q, k, value, is_causal=True).transpose(1, 2).flatten(2)


class LlamaLayer(nn.Module):
    """A layer of Llama."""

    def __init__(self, width: int, sizes: Sizes) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        latent, inner = sizes.latent, sizes.heads * sizes.head_size
        self.mix = Attention(width, sizes) if latent is None else LatentAttention(width, sizes, latent)
        self.out = nn.Linear(inner if latent is None else sizes.heads * latent.value, width, bias=False)
        self.gate = nn.Linear(width, sizes.width, bias=False) if sizes.gated else None
        self.up = nn.Linear(width, sizes.width, bias=False)
        self.down = nn.Linear(sizes.width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.out(self.mix(self.before(x), cos, sin))
        y = self.between(x)
        inner = self.up(y)
        inner = F.relu(inner).square() if self.gate is None else F.silu(self.gate(y)) * inner
        found: Tensor = x + self.down(inner)
        return found


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Llama(nn.Module):
    """Layers between an embedding and the scores of the next token."""

    def __init__(self, shape: Shape, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LlamaLayer(shape.width, sizes) for _ in range(shape.layers))
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        size = (shape.sequence, sizes.head_size if sizes.latent is None else sizes.latent.rotated)
        self.register_buffer("cos", torch.empty(size))
        self.register_buffer("sin", torch.empty(size))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        scores = self.head(self.norm(x))
        return F.cross_entropy(scores.float().flatten(0, 1), labels.flatten())


def sizes_of(row: Row) -> Sizes | None:
    """Return the sizes of a row's Llama; None of a GPT-2. Heads and widths that ``tp`` does not divide are padded, as
    XLA pads what it splits; ranks that have no heads of keys and values for themselves share some."""
    arch, tp, experts = row["arch"], row["tp"], Experts.of(row)
    size = arch.get("head_dim") or arch["hidden"] // arch["heads"]
    heads, kv_heads = (ceil(max(count, tp) / tp) * tp for count in (arch["heads"], arch["kv_heads"]))
    kv_heads = kv_heads if not heads % kv_heads else heads
    width = ceil((arch["ffn"] if experts is None else experts.computed_width) / tp) * tp
    is_gpt = heads == kv_heads == arch["heads"] and width == 4 * arch["hidden"] == 4 * heads * size
    if is_gpt and not arch.get("gated_mlp") and not arch.get("kv_lora_rank"):
        return None
    latent = Latent(*(arch.get(name) or 0 for name in LATENT)) if arch.get("kv_lora_rank") else None
    return Sizes(heads, kv_heads, size, width, bool(arch.get("gated_mlp")), latent)


def parameters(row: Row) -> tuple[float, float]:
    """Return a device's parameters of a layer, and of embedding and positions (of a Llama: of embedding or head)."""
    arch, width, tp, sizes, experts = row["arch"], row["arch"]["hidden"], row["tp"], sizes_of(row), Experts.of(row)
    if sizes is None and experts is None:
        layer = 4 * width**2 + 2 * width * arch["ffn"] + 13 * width
        return layer / tp, (arch["vocab"] + row["seq"]) * width / tp
    if sizes is None:
        layer = 4 * width**2 + 2 * width
    elif sizes.latent is None:
        layer = 2 * width * sizes.head_size * (sizes.heads + sizes.kv_heads) + 2 * width
    else:
        own = sizes.latent
        query = (own.q_rank or width) * sizes.heads * (own.whole + own.rotated) + width * own.q_rank
        keys = width * (own.kv_rank + own.rotated) + own.kv_rank * sizes.heads * (own.whole + own.value)
        layer = query + keys + sizes.heads * own.value * width + 2 * width
    matrices = 3 if arch.get("gated_mlp") else 2
    if experts is None:
        return (layer + matrices * width * arch["ffn"]) / tp, arch["vocab"] * width / tp
    layer += width * experts.number + matrices * width * experts.shared * experts.width
    return layer / tp + experts.numel(width), arch["vocab"] * width / tp
