"""The networks that the slides name, small: ReID (faces), DLRM, Wide&Deep (recommendation), a Transformer (language).

Each returns its loss. None of them knows of devices: ``train_networks.py`` adds the context.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

import shardwise.mindspore as ms
from shardwise.mindspore import nn, ops
from shardwise.mindspore.common.initializer import Normal, initializer

Batch = tuple[ms.Tensor, ...]


class ReID(nn.Cell):
    """Images -> features of norm 1 -> cosines to one vector per person -> softmax cross entropy."""

    def __init__(self, people: int = 512, features: int = 64, channels: int = 16):
        super().__init__()
        self.body = nn.SequentialCell(
            nn.Conv2d(3, channels, 3, stride=2, pad_mode="pad", padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, pad_mode="pad", padding=1),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
        )
        self.pool = ops.ReduceMean()
        self.neck = nn.Dense(2 * channels, features)
        self.people = ms.Parameter(initializer(Normal(0.02), [people, features]), "people")
        self.normalize, self.normalize_people = ops.L2Normalize(axis=-1), ops.L2Normalize(axis=-1)
        self.cosines = ops.MatMul(transpose_b=True)
        self.loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

    def construct(self, images, labels):
        features = self.normalize(self.neck(self.pool(self.body(images), (2, 3))))
        return self.loss(16 * self.cosines(features, self.normalize_people(self.people)), labels)

    @staticmethod
    def batch(rows: int, seed: int) -> Batch:
        numbers = np.random.RandomState(seed)
        return ms.Tensor(numbers.rand(rows, 3, 16, 16).astype(np.float32)), ms.Tensor(numbers.randint(0, 512, rows))


class MLP(nn.Cell):
    """Dense layers with ReLU between them."""

    def __init__(self, *sizes: int):
        super().__init__()
        last = len(sizes) - 2
        self.layers = nn.CellList(
            [nn.Dense(a, b, activation=None if i == last else "relu")
             for i, (a, b) in enumerate(pairwise(sizes))]
        )  # fmt: skip

    def construct(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class DLRM(nn.Cell):
    """Numbers through a network and categories through tables; all pairs of their vectors interact (Naumov et al.,
    2019)."""

    def __init__(self, tables: int = 3, entries: int = 1024, features: int = 16, numbers: int = 8):
        super().__init__()
        self.bottom = MLP(numbers, 32, features)
        self.tables = nn.CellList([nn.Embedding(entries, features, embedding_table=Normal(0.1)) for _ in range(tables)])
        self.interact = ops.BatchMatMul(transpose_b=True)
        self.top = MLP(features + (tables + 1) ** 2, 64, 1)
        self.loss = nn.BCEWithLogitsLoss()

    def construct(self, numbers, categories, clicked):
        dense = self.bottom(numbers)
        vectors = [dense, *(table(categories[:, i]) for i, table in enumerate(self.tables))]
        stacked = torch.stack(vectors, dim=1)
        pairs = self.interact(stacked, stacked).flatten(1)
        return self.loss(self.top(torch.cat([dense, pairs], dim=1)), clicked)

    @staticmethod
    def batch(rows: int, seed: int) -> Batch:
        numbers = np.random.RandomState(seed)
        return (
            ms.Tensor(numbers.rand(rows, 8).astype(np.float32)),
            ms.Tensor(numbers.randint(0, 1024, (rows, 3))),
            ms.Tensor(numbers.randint(0, 2, (rows, 1)).astype(np.float32)),
        )


class WideAndDeep(nn.Cell):
    """A linear model of all categories beside a network over their vectors (Cheng et al., 2016)."""

    def __init__(self, fields: int = 6, entries: int = 2048, features: int = 16):
        super().__init__()
        self.wide = nn.Embedding(entries, 1, embedding_table=Normal(0.1))
        self.deep = nn.Embedding(entries, features, embedding_table=Normal(0.1))
        self.network = MLP(fields * features, 128, 64, 1)
        self.loss = nn.BCEWithLogitsLoss()

    def construct(self, categories, values, clicked):
        wide = (self.wide(categories) * values[:, :, None]).sum(1)
        deep = self.network((self.deep(categories) * values[:, :, None]).flatten(1))
        return self.loss(wide + deep, clicked)

    @staticmethod
    def batch(rows: int, seed: int) -> Batch:
        numbers = np.random.RandomState(seed)
        return (
            ms.Tensor(numbers.randint(0, 2048, (rows, 6))),
            ms.Tensor(numbers.rand(rows, 6).astype(np.float32)),
            ms.Tensor(numbers.randint(0, 2, (rows, 1)).astype(np.float32)),
        )


class Block(nn.Cell):
    """Attention to what came before, and two dense layers, each added to its input."""

    def __init__(self, size: int, heads: int, length: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm((size,)), nn.LayerNorm((size,))
        self.query, self.key, self.value, self.output = (nn.Dense(size, size) for _ in range(4))
        self.scores, self.mix, self.softmax = ops.BatchMatMul(transpose_b=True), ops.BatchMatMul(), ops.Softmax(axis=-1)
        self.up, self.down = nn.Dense(size, 4 * size, activation="gelu"), nn.Dense(4 * size, size)
        self.register_buffer("mask", torch.full((length, length), -1e4).triu(1))

    def construct(self, x):
        own = self.norm1(x)
        query, key, value = (
            dense(own).reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for dense in (self.query, self.key, self.value)
        )
        weights = self.softmax(self.scores(query, key) / query.shape[-1] ** 0.5 + self.mask)
        x = x + self.output(self.mix(weights, value).transpose(1, 2).reshape(x.shape))
        return x + self.down(self.up(self.norm2(x)))


class Transformer(nn.Cell):
    """A language model: the next token at every position."""

    def __init__(self, vocabulary: int = 256, size: int = 32, layers: int = 2, heads: int = 4, length: int = 16):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, size, embedding_table=Normal(0.02))
        self.positions = ms.Parameter(initializer(Normal(0.02), [length, size]), "positions")
        self.blocks = nn.CellList([Block(size, heads, length) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm((size,)), nn.Dense(size, vocabulary, has_bias=False)
        self.loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

    def construct(self, ids, following):
        x = self.tokens(ids) + self.positions
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return self.loss(logits.flatten(0, 1), following.flatten())

    @staticmethod
    def batch(rows: int, seed: int) -> Batch:
        text = np.random.RandomState(seed).randint(0, 256, (rows, 17))
        return ms.Tensor(text[:, :-1].copy()), ms.Tensor(text[:, 1:].copy())


NETWORKS = {"reid": ReID, "dlrm": DLRM, "wide_and_deep": WideAndDeep, "transformer": Transformer}
