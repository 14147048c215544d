"""A small model with all that may cross between stages, and batches for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Staged(nn.Module):
    """Tied embeddings in the first and the last stage, a mask of booleans that all stages read, a value that skips, and
    a mean over labels that count."""

    def __init__(self, layers: int = 4, width: int = 8, vocab: int = 20, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.drop = dropout

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        mask = ids != 0
        first = x = self.tokens(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + F.dropout(torch.tanh(block(norm(x))), self.drop, self.training) * mask[..., None]
        logits = F.linear(x + first, self.tokens.weight)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


def staged_batch(size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids and labels, of which every sample has another number that count."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 20, (size, 5), generator=generator)
    labels = torch.randint(0, 20, (size, 5), generator=generator)
    for i in range(size):
        labels[i, : i % 4] = -100
    return ids, labels
