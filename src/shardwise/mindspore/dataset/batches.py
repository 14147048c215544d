"""Batches of rows: stacked, optionally after a mapping or padding."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.errors import problem
from shardwise.mindspore.dataset.pipeline import Dataset, Over
from shardwise.mindspore.dataset.transforms import PadEnd
from shardwise.mindspore.dataset.values import Array, Row, as_array, count_of


@dataclass(frozen=True)
class BatchInfo:
    """Position of a batch, for ``per_batch_map`` and for a function that returns its size."""

    batch: int
    epoch: int

    def get_batch_num(self) -> int:
        return self.batch

    def get_epoch_num(self) -> int:
        return self.epoch


class Batch(Over):
    """Batches of a fixed size, or of the size a function of ``BatchInfo`` returns, stacked along a new dim 0."""

    def __init__(self, source: Dataset, size: int | Callable[[BatchInfo], int], drop_remainder: bool) -> None:
        super().__init__(source)
        self._sizes = size if callable(size) else None
        self._size = 0 if callable(size) else count_of("batch_size", size)
        self._drop = drop_remainder

    def _batch_size(self, info: BatchInfo) -> int:
        """Return the number of items of a batch."""
        return self._size if self._sizes is None else count_of("what batch_size returns", self._sizes(info))

    def batches(self, number: int) -> Iterator[tuple[BatchInfo, list[Row]]]:
        """Yield the rows of every batch of a pass."""
        rows = self._source.rows(number)
        for place in itertools.count():
            info = BatchInfo(place, number)
            size = self._batch_size(info)
            members = list(itertools.islice(rows, size))
            if not members or (len(members) < size and self._drop):
                return
            yield info, members

    def rows(self, number: int) -> Iterator[Row]:
        for _, members in self.batches(number):
            columns = zip(self._columns, zip(*members, strict=True), strict=True)
            yield tuple(self._stacked(name, parts) for name, parts in columns)

    def _stacked(self, name: str, parts: Sequence[Array]) -> Array:
        shapes = sorted({part.shape for part in parts})
        if len(shapes) > 1:
            what = f'the column "{name}" has rows of the shapes {list(shapes[0])} and {list(shapes[1])} in one batch'
            raise RuntimeError(problem(what, fix="pad them in map() first"))
        return np.stack(parts)

    def get_dataset_size(self) -> int:
        left, batches = super().get_dataset_size(), 0
        if self._sizes is None:
            full, rest = divmod(left, self._size)
            return full + (rest > 0 and not self._drop)
        while left > 0 and (left >= (size := self._batch_size(BatchInfo(batches, 0))) or not self._drop):
            left, batches = left - size, batches + 1
        return batches

    def get_batch_size(self) -> int:
        """Return the batch size; if sizes differ, that of the first batch."""
        return self._batch_size(BatchInfo(0, 0)) * super().get_batch_size()


class MappedBatch(Batch):
    """Batches that a function transforms before they are stacked."""

    def __init__(
        self, source: Dataset, size: Any, drop: bool, function: Any, inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        super().__init__(source, size, drop)
        self._function, self._inputs, self._outputs = function, tuple(inputs), tuple(outputs)
        if self._inputs != self._outputs:
            self._columns = (*(name for name in self._columns if name not in inputs), *outputs)

    def rows(self, number: int) -> Iterator[Row]:
        names = self._source.get_col_names()
        for info, members in self.batches(number):
            values: dict[str, Any] = dict(zip(names, map(list, zip(*members, strict=True)), strict=True))
            mapped = self._function(*(values[name] for name in self._inputs), info)
            listed = mapped if isinstance(mapped, tuple) else (mapped,)
            if len(listed) != len(self._outputs):
                what = f"per_batch_map gives {len(listed)} values for the columns {', '.join(self._outputs)}"
                raise RuntimeError(problem(what, fix="name them: output_columns=[...]"))
            values |= zip(self._outputs, listed, strict=True)
            yield tuple(self._stacked(name, [as_array(value) for value in values[name]]) for name in self._columns)


class PaddedBatch(Batch):
    """Batches of rows of different lengths, padded to the longest, or as ``pad_info`` says."""

    def __init__(self, source: Dataset, size: Any, drop: bool, pad_info: dict[str, tuple[Any, Any]] | None) -> None:
        super().__init__(source, size, drop)
        self._info = pad_info

    def _stacked(self, name: str, parts: Sequence[Array]) -> Array:
        if self._info is not None and name not in self._info:
            return super()._stacked(name, parts)
        shape, value = (None, 0) if self._info is None else self._info[name]
        longest = np.max([part.shape for part in parts], 0) if parts[0].ndim else ()
        padded_sizes = [self.filled(size) for size in shape or [None] * 9]
        sizes = [length if size is None else size for length, size in zip(longest, padded_sizes, strict=False)]
        return np.stack([PadEnd([int(size) for size in sizes], value)(part) for part in parts])

    def filled(self, size: int | None) -> int | None:
        """Return the padded size of a dim; None: the longest."""
        return size
