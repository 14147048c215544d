"""Which rows of a source are read, and in which order: iterables of indices, told the number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from shardwise.mindspore.common.seed import data_seed


class Sampler:
    """Base: ``__iter__`` of indices; ``num_rows`` is how many rows the source has, ``number`` counts passes."""

    num_rows = 0
    number = 0

    def __init__(self, num_samples: int | None = None) -> None:
        self.num_samples = num_samples

    def order(self) -> Sequence[int]:
        return range(self.num_rows)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.order())[: self.num_samples])

    @property
    def chance(self) -> np.random.Generator:
        """Random numbers of this pass."""
        return np.random.default_rng([data_seed(), self.number])


class SequentialSampler(Sampler):
    """In order, from ``start_index`` on."""

    def __init__(self, start_index: int | None = None, num_samples: int | None = None) -> None:
        super().__init__(num_samples)
        self.start = start_index or 0

    def order(self) -> Sequence[int]:
        return range(self.start, self.num_rows)


class RandomSampler(Sampler):
    """In a random order; with ``replacement`` rows may come again."""

    def __init__(self, replacement: bool = False, num_samples: int | None = None) -> None:
        super().__init__(num_samples)
        self.replacement = replacement

    def order(self) -> Any:
        count = self.num_samples or self.num_rows
        return self.chance.integers(0, self.num_rows, count) if self.replacement else (
            self.chance.permutation(self.num_rows)
        )  # fmt: skip


class SubsetSampler(Sampler):
    """These rows."""

    def __init__(self, indices: Sequence[int], num_samples: int | None = None) -> None:
        super().__init__(num_samples)
        self.indices = list(indices) if not isinstance(indices, int) else [indices]

    def order(self) -> Sequence[int]:
        return self.indices


class SubsetRandomSampler(SubsetSampler):
    """These rows, in a random order."""

    def order(self) -> Any:
        return self.chance.permutation(self.indices)


class WeightedRandomSampler(Sampler):
    """Drawn with these weights."""

    def __init__(self, weights: Sequence[float], num_samples: int | None = None, replacement: bool = True) -> None:
        super().__init__(num_samples)
        self.weights, self.replacement = np.asarray(weights, float), replacement

    def order(self) -> Any:
        count = self.num_samples or len(self.weights)
        return self.chance.choice(len(self.weights), count, self.replacement, self.weights / self.weights.sum())


class DistributedSampler(Sampler):
    """Every ``num_shards``-th row, from ``shard_id`` on; shards are equally long, the first rows again at the end."""

    def __init__(
        self, num_shards: int, shard_id: int, shuffle: bool = True, num_samples: int | None = None, offset: int = -1
    ) -> None:
        super().__init__(num_samples)
        self.shards, self.shard, self.shuffle = num_shards, shard_id, shuffle

    def order(self) -> Any:
        rows = self.chance.permutation(self.num_rows) if self.shuffle else np.arange(self.num_rows)
        length = -(-self.num_rows // self.shards)
        return [rows[(self.shard + i * self.shards) % self.num_rows] for i in range(length)]


__all__ = [
    "DistributedSampler", "RandomSampler", "Sampler", "SequentialSampler", "SubsetRandomSampler", "SubsetSampler",
    "WeightedRandomSampler",
]  # fmt: skip
