"""The models whose best plans the literature knows: a classifier of very many classes, recommenders, transformers.

Every model returns its loss. Sizes are arguments: the same classes serve on meta tensors at full width, on real ranks,
and in verification.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ReID(nn.Module):
    """Re-identification: a body of fully connected layers, and a classifier of very many persons."""

    def __init__(self, features: int, width: int, classes: int, layers: int = 3) -> None:
        super().__init__()
        sizes = [features] + [width] * layers
        self.body = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor, person: Tensor) -> Tensor:
        for layer in self.body:
            x = F.relu(layer(x))
        return F.cross_entropy(self.head(x), person)


class DLRM(nn.Module):
    """Deep learning recommendation model (Naumov and others, 2019): tables of embeddings, fully connected layers below
    and above, and the products of all pairs between."""

    def __init__(self, tables: int, rows: int, width: int, dense: int = 16, hidden: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU())
        features = width + (tables + 1) ** 2
        self.top = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense: Tensor, ids: Tensor, clicked: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(ids[:, i]) for i, table in enumerate(self.tables))], dim=1)
        pairs = (vectors @ vectors.transpose(1, 2)).flatten(1)
        score = self.top(torch.cat([x, pairs], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, clicked)


class WideAndDeep(nn.Module):
    """Wide & Deep (Cheng and others, 2016): a linear model of sparse features beside a deep one of their embeddings."""

    def __init__(self, fields: int, rows: int, width: int, hidden: int) -> None:
        super().__init__()
        self.wide = nn.Embedding(rows, 1)
        self.embedding = nn.Embedding(rows, width)
        self.deep = nn.Sequential(
            nn.Linear(fields * width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1)
        )

    def forward(self, ids: Tensor, clicked: Tensor) -> Tensor:
        score = self.wide(ids).sum((1, 2)) + self.deep(self.embedding(ids).flatten(1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(score, clicked)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before(x)
        q, k, v = (own(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for own in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.between(x))))
        return y


class Transformer(nn.Module):
    """Blocks between a given sequence and a mean squared error: no embedding, no head."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = F.mse_loss(x, target)
        return loss


class Residual(nn.Module):
    """A bottleneck of ResNet-50: 1x1, 3x3 and 1x1 convolutions beside the identity."""

    def __init__(self, inside: int, middle: int, outside: int, stride: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                nn.Conv2d(inside, middle, 1, bias=False),
                nn.Conv2d(middle, middle, 3, stride, 1, bias=False),
                nn.Conv2d(middle, outside, 1, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for channels in (middle, middle, outside))
        changes = stride > 1 or inside != outside
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(y))
            y = F.relu(y) if i < 2 else y
        return F.relu(y + self.short(x))


class ResNet(nn.Module):
    """ResNet-50 (He and others, 2015) with ``depths`` (3, 4, 6, 3) and ``width`` 64."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks, channels = [], width
        for stage, depth in enumerate(depths):
            middle = width << stage
            for i in range(depth):
                blocks.append(Residual(channels, middle, 4 * middle, 2 if stage and i == 0 else 1))
                channels = 4 * middle
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, label: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


class Bert(nn.Module):
    """BERT's masked language model (Devlin and others, 2018) without dropout, as ``transformers`` has it."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        self.model = BertForMaskedLM(config)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss


@dataclass(frozen=True)
class Case:
    """A model and one whole batch for it, both made by call: on meta tensors under ``torch.device("meta")``."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]


def reid(batch: int, features: int, width: int, classes: int) -> Case:
    return Case(
        lambda: ReID(features, width, classes),
        lambda: (torch.randn(batch, features), torch.randint(classes, (batch,))),
    )


def dlrm(batch: int, tables: int, rows: int, width: int, hidden: int = 64) -> Case:
    return Case(
        lambda: DLRM(tables, rows, width, 16, hidden),
        lambda: (torch.randn(batch, 16), torch.randint(rows, (batch, tables)), torch.rand(batch)),
    )


def wide_and_deep(batch: int, fields: int, rows: int, width: int, hidden: int) -> Case:
    return Case(
        lambda: WideAndDeep(fields, rows, width, hidden),
        lambda: (torch.randint(rows, (batch, fields)), torch.rand(batch)),
    )


def transformer(batch: int, time: int, layers: int, width: int, heads: int) -> Case:
    return Case(
        lambda: Transformer(layers, width, heads),
        lambda: (torch.randn(batch, time, width), torch.randn(batch, time, width)),
    )


def resnet(batch: int, depths: tuple[int, ...], width: int, classes: int, size: int) -> Case:
    return Case(
        lambda: ResNet(depths, width, classes),
        lambda: (torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))),
    )


def bert(batch: int, time: int, layers: int, width: int, heads: int, vocabulary: int) -> Case:
    def inputs() -> tuple[Tensor, ...]:
        return torch.randint(vocabulary, (batch, time)), torch.randint(vocabulary, (batch, time))

    return Case(lambda: Bert(layers, width, heads, vocabulary), inputs)
