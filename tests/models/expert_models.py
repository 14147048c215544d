"""Mixtures of experts written by hand, each in another way that people write them in."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
