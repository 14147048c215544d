"""Mixtures of experts written by hand, each in another way that people write them in."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwise as sw

EXPERTS, WIDTH, HIDDEN, EACH = 4, 8, 12, 2


class Mixture(nn.Module):
    """A router and two matrices per expert. ``mix`` gets tokens, weights and experts of each token."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.num_experts = nn.Linear(WIDTH, experts), experts
        self.up = nn.Parameter(torch.randn(experts, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(EACH, -1)
        return (self.mix(tokens, weights, chosen) - tokens).square().mean()

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        raise NotImplementedError


class Batched(Mixture):
    """A matrix per row: transformers' "batched_mm"; with a bias per expert."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__(experts)
        self.bias = nn.Parameter(torch.randn(experts, HIDDEN))

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        rows, of_rows = tokens.repeat_interleave(EACH, 0), chosen.reshape(-1)
        hidden = torch.bmm(rows.unsqueeze(1), self.up[of_rows]).squeeze(1) + self.bias[of_rows]
        results = torch.bmm(self.down[of_rows].transpose(1, 2), F.gelu(hidden).unsqueeze(-1)).squeeze(-1)
        return (results * weights.reshape(-1, 1)).view(-1, EACH, WIDTH).sum(1)


class Einsum(Mixture):
    """A matrix per token and choice: gpt-fast; the gate and the rest are two products."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__(experts)
        self.gate = nn.Parameter(torch.randn(experts, HIDDEN, WIDTH) / 3)

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        gate = F.silu(torch.einsum("ti,taoi->tao", tokens, self.gate[chosen]))
        hidden = gate * torch.einsum("ti,taio->tao", tokens, self.up[chosen])
        return torch.einsum("tai,ta->ti", torch.einsum("tao,taoi->tai", hidden, self.down[chosen]), weights)


class Loop(Mixture):
    """Rows of each expert by ``torch.where``, added where they came from: Mixtral's reference."""

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        masks = F.one_hot(chosen, self.num_experts).permute(2, 1, 0)
        for expert in range(self.num_experts):
            choice, token = torch.where(masks[expert])
            hidden = F.gelu(tokens[None, token].reshape(-1, WIDTH) @ self.up[expert])
            out.index_add_(0, token, hidden @ self.down[expert] * weights[token, choice, None])
        return out


class Added(Mixture):
    """Rows of each expert added by an index on both sides: Mistral's reference."""

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, choice = torch.where(chosen == expert)
            out[token] += weights[token, choice, None] * (F.gelu(tokens[token] @ self.up[expert]) @ self.down[expert])
        return out


class Expert(nn.Module):
    """A gated layer with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Modules(Mixture):
    """A module per expert: litgpt."""

    def __init__(self, experts: int = EXPERTS) -> None:
        super().__init__(experts)
        del self.up, self.down
        self.experts = nn.ModuleList(Expert() for _ in range(experts))

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        masks = (chosen.unsqueeze(-1) == torch.arange(self.num_experts)).permute(2, 0, 1)
        for mask, expert in zip(masks, self.experts, strict=True):
            token, choice = torch.where(mask)
            out = out.index_add(0, token, weights[token, choice, None] * expert(tokens[token]))
        return out


class Assigned(Modules):
    """Rows of each expert by a mask, written where they came from: DeepSeek's training."""

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        rows, of_rows = tokens.repeat_interleave(EACH, dim=0), chosen.view(-1)
        out = torch.empty_like(rows)
        for number, expert in enumerate(self.experts):
            out[of_rows == number] = expert(rows[of_rows == number])
        return (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


class ExpertChoice(Mixture):
    """Every expert takes the tokens with its highest scores."""

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        scores, taken = self.router(tokens).softmax(-1).t().topk(len(tokens) // self.num_experts)
        results = sw.shard(torch.bmm, "b@ep")(F.gelu(sw.shard(torch.bmm, "b@ep")(tokens[taken], self.up)), self.down)
        return torch.zeros_like(tokens).index_add(0, taken.flatten(), (results * scores.unsqueeze(-1)).flatten(0, 1))


class Dense(Mixture):
    """All tokens to all experts: Llama 4."""

    def mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        gates = torch.zeros(len(tokens), self.num_experts, dtype=weights.dtype).scatter(1, chosen, weights)
        rows = tokens.repeat(self.num_experts, 1).view(self.num_experts, -1, WIDTH)
        results = sw.shard(torch.bmm, "b@ep")(F.gelu(sw.shard(torch.bmm, "b@ep")(rows, self.up)), self.down)
        return (results * gates.t().unsqueeze(-1)).sum(0)


class Stack(nn.Module):
    """Two layers of experts of a form behind each other."""

    def __init__(self, kind: type[Mixture]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class _Layer(nn.Module):
    """A router, and experts as a module of their own."""

    def __init__(self, kind: type[Mixture]) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts: Mixture = type(kind.__name__, (kind,), {"forward": kind.mix})()
        del self.experts.router

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        mixed: Tensor = self.experts(tokens, weights, chosen)
        return x + mixed.view_as(x)


def eager_experts(name: str = "qwen3_moe") -> nn.Module:
    from models.breadth import tiny_of

    module: Any = tiny_of(name).build()
    module.set_experts_implementation("eager")
    return module


def experts_with_sinks() -> nn.Module:
    """GPT-OSS: every second layer's attention sees a window."""
    module: Any = eager_experts("gpt_oss")
    module.config.sliding_window = 3
    for layer in module.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    return module


def by_two_experts(rows: Tensor, chosen: Tensor, up: Tensor, down: Tensor, split: str) -> Tensor:
    """Return what the two of four experts that a row has chosen make of it, as products of sorted rows that are split
    as ``split``; where nothing is captured, of float64 too."""

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            return sw.shard(F.grouped_mm, split)(rows, weight, offs=ends)
        bounds = [0, *ends.tolist()]
        return torch.cat([rows[a:b] @ w for a, b, w in zip(bounds[:-1], bounds[1:], weight, strict=True)])

    expert, order = chosen.flatten().sort(stable=True)
    ends = F.one_hot(expert, 4).sum(0).cumsum(0).to(torch.int32)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return product(F.gelu(product(rows[order // 2], up)), down)[back].unflatten(0, (-1, 2))
