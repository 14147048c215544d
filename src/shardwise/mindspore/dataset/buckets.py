"""Batches of rows of similar length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shardwise.errors import problem
from shardwise.mindspore.dataset.batches import PaddedBatch
from shardwise.mindspore.dataset.pipeline import Dataset
from shardwise.mindspore.dataset.values import Row, once


class Buckets(PaddedBatch):
    """Batches of rows by length. Bucket i has lengths from ``boundaries[i - 1]`` to below ``boundaries[i]`` and batches
    of ``sizes[i]``. Full batches come at once, incomplete ones at the end, bucket by bucket, unless ``drop``.
    ``to_boundary``: a dim without a size in ``pad_info`` is padded to the boundary minus one."""

    def __init__(
        self,
        source: Dataset,
        columns: Sequence[str],
        boundaries: Sequence[int],
        sizes: Sequence[int],
        length: Callable[..., Any] | None,
        pad_info: dict[str, tuple[Any, Any]] | None,
        to_boundary: bool,
        drop: bool,
    ) -> None:
        super().__init__(source, 1, drop, pad_info)
        once(tuple(str(boundary) for boundary in boundaries))
        if list(boundaries) != sorted(boundaries) or not boundaries or boundaries[0] < 1:
            raise ValueError(problem(f"bucket_boundaries are {list(boundaries)}", fix="ascending numbers from 1"))
        if len(sizes) != len(boundaries) + 1:
            what = f"{len(sizes)} bucket_batch_sizes for {len(boundaries)} boundaries"
            raise ValueError(problem(what, fix=f"{len(boundaries) + 1}: one more"))
        if length is None and len(columns) != 1:
            raise ValueError(problem(f"the length of {list(columns)}", fix="element_length_function, or one column"))
        self._boundaries, self._bucket_sizes, self._to_boundary = list(boundaries), list(sizes), to_boundary
        self._length, self._places = length or len, [self._columns.index(name) for name in columns]
        self._end: int | None = None  # length to which the current batch is padded
        self._counted: int | None = None

    def rows(self, number: int) -> Iterator[Row]:
        waiting: list[list[Row]] = [[] for _ in self._bucket_sizes]
        for row in self._source.rows(number):
            size = int(np.asarray(self._length(*(row[place] for place in self._places))))
            bucket = bisect_right(self._boundaries, size)
            waiting[bucket].append(row)
            if len(waiting[bucket]) == self._bucket_sizes[bucket]:
                yield self._row(waiting[bucket], bucket)
                waiting[bucket] = []
        for bucket, rest in enumerate(waiting):
            if rest and not self._drop:
                yield self._row(rest, bucket)

    def _row(self, rows: list[Row], bucket: int) -> Row:
        last = bucket == len(self._boundaries)
        self._end = None if last or not self._to_boundary else self._boundaries[bucket] - 1
        columns = zip(self._columns, zip(*rows, strict=True), strict=True)
        return tuple(self._stacked(name, parts) for name, parts in columns)

    def filled(self, size: Any) -> Any:
        return self._end if size is None else size

    def get_dataset_size(self) -> int:
        """Return the number of batches, counted once."""
        if self._counted is None:
            self._counted = sum(1 for _ in self.rows(0))
        return self._counted
