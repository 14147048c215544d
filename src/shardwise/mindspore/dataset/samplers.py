"""Samplers: iterables of row indices, which are given the number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardwise.mindspore.common.seed import data_seed
from shardwise.mindspore.named import WithSettings


class Sampler(WithSettings, num_samples=None):
    """Base of samplers: ``__iter__`` yields indices; ``num_rows``: rows of the source, ``number``: of the pass."""

    num_rows = 0
    number = 0

    def order(self) -> Sequence[int]:
        return range(self.num_rows)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.order())[: self.num_samples])

    @property
    def chance(self) -> np.random.Generator:
        """Return the random generator of this pass."""
        return np.random.default_rng([data_seed(), self.number])


class SequentialSampler(Sampler, start_index=None, num_samples=None):
    """Rows in order, from ``start_index`` on."""

    def order(self) -> Sequence[int]:
        return range(self.start_index or 0, self.num_rows)


class RandomSampler(Sampler, replacement=False, num_samples=None):
    """Rows in a random order; with ``replacement`` rows may repeat."""

    def order(self) -> Any:
        count = self.num_samples or self.num_rows
        return self.chance.integers(0, self.num_rows, count) if self.replacement else (
            self.chance.permutation(self.num_rows)
        )  # fmt: skip


class SubsetSampler(Sampler, indices=..., num_samples=None):
    """The given rows."""

    indices: Any

    def _settle(self) -> None:
        self.indices = list(self.indices) if not isinstance(self.indices, int) else [self.indices]

    def order(self) -> Any:
        return self.indices


class SubsetRandomSampler(SubsetSampler):
    """The given rows, in a random order."""

    def order(self) -> Any:
        return self.chance.permutation(self.indices)


class WeightedRandomSampler(Sampler, weights=..., num_samples=None, replacement=True):
    """Rows drawn with these weights."""

    weights: Any

    def _settle(self) -> None:
        self.weights = np.asarray(self.weights, float)

    def order(self) -> Any:
        count = self.num_samples or len(self.weights)
        return self.chance.choice(len(self.weights), count, self.replacement, self.weights / self.weights.sum())


class DistributedSampler(Sampler, num_shards=..., shard_id=..., shuffle=True, num_samples=None, offset=-1):
    """Every ``num_shards``-th row, from ``shard_id`` on. Shards are equally long: the first rows repeat at the end."""

    def order(self) -> Any:
        rows = self.chance.permutation(self.num_rows) if self.shuffle else np.arange(self.num_rows)
        length = -(-self.num_rows // self.num_shards)
        return [rows[(self.shard_id + i * self.num_shards) % self.num_rows] for i in range(length)]


__all__ = [
    "DistributedSampler", "RandomSampler", "Sampler", "SequentialSampler", "SubsetRandomSampler", "SubsetSampler",
    "WeightedRandomSampler",
]  # fmt: skip
