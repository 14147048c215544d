"""Datasets of Python objects and arrays, and samplers, which decide the order of their rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import note
from shardwise.mindspore.common.seed import data_seed
from shardwise.mindspore.dataset.pipeline import Dataset
from shardwise.mindspore.dataset.transforms import Row, as_array, count_of, names_of
from shardwise.mindspore.named import SETTINGS, Function, WithSettings, classes_of


class Sampler(WithSettings, num_samples=None):
    """Base of samplers: ``__iter__`` yields indices; ``num_rows``: rows of the source, ``number``: of the pass."""

    num_rows = 0
    number = 0
    function: Function = staticmethod(lambda rows, chance, *, num_samples: range(rows))

    def __iter__(self) -> Iterator[int]:
        chance = np.random.default_rng([data_seed(), self.number])
        return iter(list(type(self).function(self.num_rows, chance, **self._chosen()))[: self.num_samples])


def _shard(rows: Sequence[int], count: int, number: int) -> list[int]:
    """Return every ``count``-th row from ``number`` on. Shards are equally long: the first rows repeat at the end."""
    return [rows[(number + i * count) % len(rows)] for i in range(-(-len(rows) // count))] if len(rows) else []


def _listed(name: str, indices: Any) -> list[Any]:
    return [indices] if isinstance(indices, (int, np.integer)) else list(indices)


# Functions of the number of rows, and of the random generator of the pass.
SAMPLERS = classes_of({
    "DistributedSampler": lambda rows, chance, *, num_shards, shard_id, shuffle=True, num_samples=None, offset=-1: (
        _shard(chance.permutation(rows) if shuffle else range(rows), num_shards, shard_id)),
    "RandomSampler": lambda rows, chance, *, replacement=False, num_samples=None: (
            chance.integers(0, rows, num_samples or rows) if replacement else chance.permutation(rows)),
    "SequentialSampler": lambda rows, chance, *, start_index=None, num_samples=None: range(start_index or 0, rows),
    "SubsetRandomSampler": lambda rows, chance, *, indices, num_samples=None: chance.permutation(indices),
    "SubsetSampler": lambda rows, chance, *, indices, num_samples=None: indices,
    "WeightedRandomSampler": lambda rows, chance, *, weights, num_samples=None, replacement=True: chance.choice(
            len(weights), num_samples or len(weights), replacement, weights / weights.sum()),
}, Sampler, __name__, checks={
    "indices": _listed, "weights": lambda _, weights: np.asarray(weights, float),
})  # fmt: skip
globals().update(SAMPLERS)


class GeneratorDataset(WithSettings, Dataset, **SETTINGS["dataset.GeneratorDataset"]):
    """A dataset of rows from Python.

    Only a source with ``__getitem__`` can be shuffled, which is its default, and sharded. Shard ``shard_id`` of
    ``num_shards`` has every ``num_shards``-th row. Shards are equally long: the first rows repeat at the end if the
    number is not divisible.

    Args:
        source: a function that returns an iterable (a generator function), an iterable, or an object with
            ``__getitem__`` and ``__len__``. An item is a tuple of arrays (tensors, numbers), or one array if there is
            one column.
        column_types: dtypes to which columns are converted.
        num_samples: the largest number of rows.
    """

    def _take(self, values: dict[str, Any]) -> None:
        Dataset.__init__(self, names_of(values["column_names"]))
        types, samples, shuffle, shards = (
            values[name] for name in ("column_types", "num_samples", "shuffle", "num_shards")
        )
        self._source, self._sampler = values["source"], values["sampler"]
        kinds = [] if types is None else [_numpy_dtype(column_type) for column_type in types]
        if types is not None and len(kinds) != len(self._columns):
            what = f"there are {len(self._columns)} columns and {len(kinds)} column_types"
            raise ValueError(problem(what, fix="give one type for every column"))
        self._types = dict(zip(self._columns, kinds, strict=False))
        self._samples = None if samples is None else count_of("num_samples", samples)
        self._by_index = hasattr(self._source, "__getitem__") and hasattr(self._source, "__len__")
        if not (self._by_index or callable(self._source) or isinstance(self._source, Iterable)):
            fix = "give a generator function, an iterable, or an object with __getitem__ and __len__"
            raise TypeError(problem(f"a {type(self._source).__name__} is not a source of rows", fix=fix))
        self._shuffle = self._by_index and self._sampler is None if shuffle is None else shuffle
        self._shards = _shards(shards, values["shard_id"])
        requested = {"shuffle": shuffle, "sampler": self._sampler is not None, "num_shards": shards is not None}
        wrong = [name for name, is_set in requested.items() if is_set]
        if wrong and not self._by_index:
            what = f"{wrong[0]} needs rows by index, but the source (a {type(self._source).__name__}) has none"
            fix = "give an object with __getitem__ and __len__, or call .shuffle(buffer_size)"
            raise ValueError(problem(what, fix=fix))
        if "sampler" in wrong and len(wrong) > 1:
            raise ValueError(problem("a sampler decides the order by itself", fix="leave shuffle and num_shards out"))

    def rows(self, number: int) -> Iterator[Row]:
        return map(self._row, itertools.islice(self._items(number), self._samples))

    def _items(self, number: int) -> Iterator[Any]:
        if self._by_index:
            return (self._source[i] for i in self._order(number))
        if callable(self._source):
            return iter(self._source())
        if number and iter(self._source) is self._source:
            raise _used_up("the source is an iterator, which has only one pass")
        return iter(self._source)

    def _order(self, number: int) -> Sequence[int]:
        if self._sampler is not None:
            if isinstance(self._sampler, Sampler):
                self._sampler.num_rows, self._sampler.number = len(self._source), number
            return [int(i) for i in self._sampler]
        order = list(range(len(self._source)))
        if self._shuffle:
            np.random.default_rng([data_seed(), number]).shuffle(order)
        return _shard(order, *self._shards)

    def _row(self, item: Any) -> Row:
        if not isinstance(item, Mapping):
            is_alone = not isinstance(item, tuple | list) or len(self._columns) == 1 != len(item)
            values = (item,) if is_alone else item
            if len(values) != len(self._columns):
                what = f"the source gives {len(values)} values a row, but the columns are {', '.join(self._columns)}"
                raise RuntimeError(problem(what, fix="name as many columns as there are values"))
            item = dict(zip(self._columns, values, strict=True))
        arrays = {name: as_array(item[name]) for name in self._columns}
        return arrays | {name: arrays[name].astype(kind) for name, kind in self._types.items()}

    @cached_property
    def _count(self) -> int:
        if self._by_index:
            return len(self._order(0))
        if hasattr(self._source, "__len__"):
            return len(self._source)
        if not callable(self._source) and iter(self._source) is self._source:
            raise _used_up("the source is an iterator, whose rows cannot be counted without using them up")
        return sum(1 for _ in self._items(0))

    def get_dataset_size(self) -> int:
        """Return the number of rows per pass. If the source has no length, one pass is counted, once."""
        return self._count if self._samples is None else min(self._count, self._samples)


def _used_up(what: str) -> RuntimeError:
    return RuntimeError(problem(what, fix="give the generator function itself, without calling it"))


class NumpySlicesDataset(GeneratorDataset, **SETTINGS["dataset.NumpySlicesDataset"]):
    """The slices of arrays along dim 0. ``data`` is an array, a tuple of arrays, or a dictionary of them by column.
    Columns are named column_0, column_1, ... by default."""

    def _take(self, values: dict[str, Any]) -> None:
        data, names = values.pop("data"), values["column_names"]
        parts = list(data.values()) if isinstance(data, Mapping) else list(data) if isinstance(data, tuple) else [data]
        arrays = [as_array(part) for part in parts]
        lengths = {len(array) if array.ndim else 0 for array in arrays}
        if len(lengths) != 1 or not lengths - {0}:
            what = f"the arrays have the shapes {', '.join(str(list(array.shape)) for array in arrays)}"
            raise ValueError(problem(what, fix="give arrays of the same first size, at least 1"))
        default = list(data) if isinstance(data, Mapping) else [f"column_{i}" for i in range(len(arrays))]
        rows, names = list(zip(*arrays, strict=True)), default if names is None else names
        super()._take({**values, "source": rows, "column_names": names, "column_types": None})


class PaddedDataset(GeneratorDataset, padded_samples=...):
    """Rows that fill up others: ``data + PaddedDataset([{"image": zeros}])``. ``padded_samples``: a dictionary per row,
    whose columns are in alphabetical order."""

    def _take(self, values: dict[str, Any]) -> None:
        samples = values["padded_samples"]
        if not samples or not all(isinstance(sample, Mapping) and sample for sample in samples):
            raise ValueError(
                problem(f"padded_samples is {samples!r}", fix='a list of dictionaries: [{"image": zeros}]')
            )
        of_rows = {"source": list(samples), "column_names": sorted(samples[0]), "shuffle": False}
        super()._take({**GeneratorDataset.settings, **of_rows})


class DatasetCache:
    """A server that keeps rows, which there is not: accepted by datasets, which read rows again."""

    def __init__(self, session_id: int, size: int = 0, spilling: bool = False, **settings: Any) -> None:
        note("DatasetCache has no effect here: datasets read rows again")


def _shards(num_shards: int | None, shard_id: int | None) -> tuple[int, int]:
    if num_shards is None and shard_id is None:
        return 1, 0
    if num_shards is None or shard_id is None:
        what = f"num_shards is {num_shards} and shard_id is {shard_id}"
        raise ValueError(problem(what, fix="give both: num_shards=get_group_size(), shard_id=get_rank()"))
    if count_of("shard_id", shard_id, low=0) >= count_of("num_shards", num_shards):
        what = f"shard_id is {shard_id}, but there are {num_shards} shards"
        raise ValueError(problem(what, fix=f"give a number from 0 to {num_shards - 1}"))
    return num_shards, shard_id


def _numpy_dtype(column_type: Any) -> np.dtype[Any]:
    is_torchs = isinstance(column_type, torch.dtype)
    return torch.empty(0, dtype=column_type).numpy().dtype if is_torchs else np.dtype(column_type)


__all__ = [
    "DatasetCache", "GeneratorDataset", "NumpySlicesDataset", "PaddedDataset", "Sampler", *SAMPLERS,
]  # fmt: skip
