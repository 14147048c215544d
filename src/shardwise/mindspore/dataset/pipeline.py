"""Chains of operations on rows.

A row is a dictionary of numpy arrays, one per column in order. Rows are read lazily, in this process. Every pass over a
dataset restarts its source. Shuffled orders depend on the dialect's seed and the pass number, so that all ranks draw
the same one.
"""

from __future__ import annotations

import itertools
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import unknown_words
from shardwise.mindspore.common.seed import data_seed
from shardwise.mindspore.dataset import records
from shardwise.mindspore.dataset.transforms import (
    Array,
    Columns,
    Row,
    applied,
    as_array,
    count_of,
    named,
    names_of,
    pad_end,
)
from shardwise.mindspore.tensor import Tensor

RowsOf = Callable[[int], Iterator[Row]]
PadInfo = dict[str, tuple[Any, Any]] | None  # column -> (shape or None for the longest, value)


class Dataset:
    """Rows of named columns. Every operation returns a new dataset based on this one. ``rows_of``: returns the rows of
    a pass, counted from 0; ``size``: the number of rows per pass; ``batch_size``: that of source items per row."""

    def __init__(
        self, columns: Sequence[str], rows_of: RowsOf | None = None, size: Callable[[], int] | None = None,
        batch_size: Callable[[], int] = lambda: 1,
    ) -> None:  # fmt: skip
        self._columns, self._passes = tuple(columns), 0
        self._rows_of, self._size, self._batch_size = rows_of, size, batch_size
        self._parent: Dataset | None = None  # that this one is made from

    def _derived(
        self, rows_of: RowsOf, columns: Sequence[str] | None = None, size: Callable[[], int] | None = None,
        batch_size: Callable[[], int] | None = None,
    ) -> Dataset:  # fmt: skip
        """Return a dataset made from this one's rows, by default with the same columns and number of rows."""
        names = self._columns if columns is None else columns
        derived = Dataset(names, rows_of, size or self.get_dataset_size, batch_size or self.get_batch_size)
        derived._parent = self
        return derived

    def _named(self, columns: Columns) -> Sequence[str]:
        """Return the names of some columns, by default of all. Raises ValueError for unknown ones."""
        return named(columns, self._columns) if columns else self._columns

    def get_class_indexing(self) -> dict[str, Any]:
        """Return class name -> class index of the files behind this dataset; of others nothing."""
        return {} if self._parent is None else self._parent.get_class_indexing()

    def rows(self, number: int) -> Iterator[Row]:
        """Return the rows of a pass; ``number`` counts passes, from 0."""
        assert self._rows_of is not None, "a subclass returns its own rows"
        return self._rows_of(number)

    def get_dataset_size(self) -> int:
        """Return the number of rows per pass."""
        assert self._size is not None, "a subclass counts its own rows"
        return self._size()

    def get_col_names(self) -> list[str]:
        return list(self._columns)

    def get_batch_size(self) -> int:
        """Return the number of source items per row."""
        return self._batch_size()

    def __len__(self) -> int:
        return self.get_dataset_size()

    def __iter__(self) -> Iterator[list[Any]]:
        return self.create_tuple_iterator(num_epochs=1)

    def create_tuple_iterator(
        self, columns: Columns = None, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = True
    ) -> Iterator[list[Any]]:
        """Return an iterator over rows as lists of tensors, or of numpy arrays, which are copies. A ``for`` loop ends
        with a pass, and the next one continues with the next pass, up to ``num_epochs``; -1: any number."""
        return _Passes(self, columns, num_epochs, output_numpy, lambda row: [*row.values()])

    def create_dict_iterator(
        self, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Return an iterator like ``create_tuple_iterator``, with rows as dictionaries by column name."""
        return _Passes(self, None, num_epochs, output_numpy, dict)

    def next_pass(self) -> Iterator[Row]:
        """Return the rows of the next pass."""
        self._passes += 1
        return self.rows(self._passes - 1)

    def batch(
        self, batch_size: int | Callable[[Any], int], drop_remainder: bool = False,
        num_parallel_workers: int | None = None, per_batch_map: Callable[..., Any] | None = None,
        input_columns: Columns = None, output_columns: Columns = None, **settings: Any,
    ) -> Dataset:  # fmt: skip
        """Batch rows along a new dim 0. The last batch may be smaller, or is dropped.

        Args:
            batch_size: number of rows, or a function of an object with ``get_batch_num()`` and ``get_epoch_num()`` that
                returns it.
            per_batch_map: transforms lists of some columns before they are stacked; it takes these lists and the same
                object.
        """
        unknown_words(settings, "python_multiprocessing", "max_rowsize")
        names = self._columns
        inputs = names if per_batch_map is None else self._named(input_columns)
        outputs = inputs if output_columns is None or per_batch_map is None else names_of(output_columns)
        columns = names if tuple(inputs) == tuple(outputs) else [*(n for n in names if n not in inputs), *outputs]

        def form(info: BatchInfo, members: list[Row]) -> Row:
            values: dict[str, Any] = {name: [row[name] for row in members] for name in names}
            if per_batch_map is not None:
                values |= _assigned("per_batch_map", outputs, per_batch_map(*(values[name] for name in inputs), info))
            return {name: _stack(name, [as_array(value) for value in values[name]]) for name in columns}

        return _batched(self, batch_size, drop_remainder, form, columns)

    def padded_batch(
        self, batch_size: int, drop_remainder: bool = False, num_parallel_workers: int | None = None,
        pad_info: PadInfo = None,
    ) -> Dataset:  # fmt: skip
        """Batch rows of different lengths, padded. ``pad_info``: column -> (shape or None for the longest, value)."""
        return _batched(self, batch_size, drop_remainder, lambda _, rows: _padded(rows, pad_info))

    def bucket_batch_by_length(
        self, column_names: Sequence[str], bucket_boundaries: Sequence[int], bucket_batch_sizes: Sequence[int],
        element_length_function: Callable[..., Any] | None = None, pad_info: PadInfo = None,
        pad_to_bucket_boundary: bool = False, drop_remainder: bool = False,
    ) -> Dataset:  # fmt: skip
        """Return padded batches of rows of similar length. Bucket i has lengths from ``bucket_boundaries[i - 1]`` to
        below ``bucket_boundaries[i]`` and batches of ``bucket_batch_sizes[i]``. Full batches come at once, incomplete
        ones at the end, bucket by bucket, unless ``drop_remainder``. ``element_length_function``: length of a row by
        its columns; by default that of the only column. ``pad_to_bucket_boundary``: a dim without a size in
        ``pad_info`` is padded to the boundary minus one."""
        ends, sizes, names = list(bucket_boundaries), list(bucket_batch_sizes), self._named(column_names)
        length = element_length_function or len
        if any(end <= last for last, end in itertools.pairwise((0, *ends))) or not ends:
            raise ValueError(problem(f"bucket_boundaries are {ends}", fix="ascending numbers from 1"))
        if len(sizes) != len(ends) + 1:
            what = f"{len(sizes)} bucket_batch_sizes for {len(ends)} boundaries"
            raise ValueError(problem(what, fix=f"{len(ends) + 1}: one more"))
        if element_length_function is None and len(names) != 1:
            raise ValueError(problem(f"the length of {column_names}", fix="element_length_function, or one column"))
        paddings = [end - 1 if pad_to_bucket_boundary else None for end in ends] + [None]

        def rows(number: int) -> Iterator[Row]:
            waiting: list[list[Row]] = [[] for _ in sizes]
            for row in self.rows(number):
                bucket = bisect_right(ends, int(np.asarray(length(*(row[name] for name in names)))))
                waiting[bucket].append(row)
                if len(waiting[bucket]) == sizes[bucket]:
                    yield _padded(waiting[bucket], pad_info, paddings[bucket])
                    waiting[bucket] = []
            for rest, end in zip(waiting, paddings, strict=True):
                if rest and not drop_remainder:
                    yield _padded(rest, pad_info, end)

        return self._derived(rows, size=_counted(rows))

    def save(self, file_name: str, num_files: int = 1, file_type: str = "mindrecord") -> None:
        """Write the rows of the next pass into files that ``MindDataset`` reads."""
        if file_type != "mindrecord":
            raise ValueError(problem(f"file_type is {file_type!r}", fix='"mindrecord"'))
        records.save(self, file_name, num_files)

    def zip(self, datasets: Any) -> Dataset:
        """Combine the columns of this and other datasets, as long as the shortest."""
        return zipped((self, *_listed(datasets)))

    def concat(self, datasets: Any) -> Dataset:
        """Append the rows of other datasets."""
        sources = (self, *_listed(datasets))
        for dataset in sources:
            if tuple(dataset.get_col_names()) != self._columns:
                what = f"concat of the columns {list(self._columns)} and {dataset.get_col_names()}"
                raise ValueError(problem(what, fix="the same names: rename(input_columns, output_columns)"))
        return Dataset(
            self._columns, lambda number: itertools.chain(*(source.rows(number) for source in sources)),
            lambda: sum(source.get_dataset_size() for source in sources),
        )  # fmt: skip

    __add__ = concat

    def rename(self, input_columns: Columns, output_columns: Columns) -> Dataset:
        """Rename columns."""
        old, new = named(input_columns or (), self._columns), names_of(output_columns or ())
        if len(old) != len(new):
            raise ValueError(problem(f"rename of {len(old)} columns to {len(new)} names", fix="one name for each"))
        names = {name: name for name in self._columns} | dict(zip(old, new, strict=True))
        return self._derived(
            lambda number: ({names[name]: value for name, value in row.items()} for row in self.rows(number)),
            [*names.values()],
        )

    def filter(
        self, predicate: Callable[..., Any], input_columns: Columns = None, num_parallel_workers: int | None = None
    ) -> Dataset:
        """Keep the rows for which a function of some columns, by default all, is true."""
        names = self._named(input_columns)

        def rows(number: int) -> Iterator[Row]:
            return (row for row in self.rows(number) if predicate(*(row[name] for name in names)))

        return self._derived(rows, size=_counted(rows))

    def apply(self, apply_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Return the result of a function of this dataset."""
        return apply_func(self)

    def split(self, sizes: Sequence[float], randomize: bool = True) -> list[Dataset]:
        """Split into parts of the given numbers of rows, or fractions of all."""
        total = self.get_dataset_size()
        counts = [round(size * total) if isinstance(size, float) else size for size in sizes]
        if sum(counts) != total:
            what = f"split into {counts} of {total} rows"
            raise ValueError(problem(what, fix=f"numbers whose sum is {total}, or shares whose sum is 1"))
        source, ends = self.shuffle(total) if randomize else self, list(itertools.accumulate(counts))
        return [source._slice(end - count, end, fixed=True) for end, count in zip(ends, counts, strict=True)]

    def get_repeat_count(self) -> int:
        return 1

    def output_shapes(self, estimate: bool = False) -> list[list[int]]:
        """Return the shapes of the first row."""
        return [list(array.shape) for array in next(self.rows(0)).values()]

    def output_types(self) -> list[Any]:
        """Return the dtypes of the first row."""
        return [array.dtype for array in next(self.rows(0)).values()]

    def reset(self) -> None:
        """Restart with the first pass."""
        self._passes = 0

    def repeat(self, count: int | None = None) -> Dataset:
        """Repeat the rows ``count`` times; None or -1: for ever."""
        times = None if count is None or count == -1 else count_of("count", count)

        def rows(number: int) -> Iterator[Row]:
            for i in itertools.count() if times is None else range(times):
                yield from self.rows(number * (times or 0) + i)

        return self._derived(rows, size=lambda: self.get_dataset_size() * (times or 1))

    def map(
        self, operations: Callable[..., Any] | Sequence[Callable[..., Any]], input_columns: Columns = None,
        output_columns: Columns = None, column_order: Columns = None, num_parallel_workers: int | None = None,
        **settings: Any,
    ) -> Dataset:  # fmt: skip
        """Transform columns by functions in turn. Each takes the numpy arrays of the columns, by default the first, and
        returns one array or a tuple. ``output_columns``: names of the results, if they differ."""
        names = self._columns
        inputs = named(input_columns, names) if input_columns is not None else names[:1]
        outputs = inputs if output_columns is None else names_of(output_columns)
        unknown_words(settings, "python_multiprocessing", "cache", "callbacks", "max_rowsize", "offload")
        functions = tuple(operations) if isinstance(operations, Sequence) else (operations,)
        kept = [name for name in names if name not in inputs]
        place = sum(name not in inputs for name in names[: names.index(inputs[0])])
        columns = names_of(names if tuple(outputs) == tuple(inputs) else (*kept[:place], *outputs, *kept[place:]))

        def rows(number: int) -> Iterator[Row]:
            for row in self.rows(number):
                values = row | _assigned("map()", outputs, applied(functions, tuple(row[name] for name in inputs)))
                yield {name: as_array(values[name]) for name in columns}

        mapped = self._derived(rows, columns)
        return mapped if column_order is None else mapped.project(column_order)

    def project(self, columns: str | Sequence[str]) -> Dataset:
        """Select columns, in this order."""
        names = self._named(columns)
        return self._derived(lambda number: ({name: row[name] for name in names} for row in self.rows(number)), names)

    def shuffle(self, buffer_size: int) -> Dataset:
        """Shuffle rows: each is drawn from the next ``buffer_size``."""
        size = count_of("buffer_size", buffer_size)

        def rows(number: int) -> Iterator[Row]:
            chance, rest = random.Random(f"{data_seed()} {number}"), self.rows(number)
            buffer = list(itertools.islice(rest, size))
            for row in rest:
                place = chance.randrange(len(buffer))
                yield buffer[place]
                buffer[place] = row
            chance.shuffle(buffer)
            yield from buffer

        return self._derived(rows)

    def take(self, count: int = -1) -> Dataset:
        """Keep the first ``count`` rows; -1: all."""
        return self if count == -1 else self._slice(0, count_of("count", count))

    def skip(self, count: int) -> Dataset:
        """Drop the first ``count`` rows."""
        return self._slice(count_of("count", count, low=0), None)

    def _slice(self, start: int, stop: int | None, *, fixed: bool = False) -> Dataset:
        """Return the rows from ``start`` to ``stop``. ``fixed``: always those of the first pass."""

        def size() -> int:
            whole = self.get_dataset_size()
            return max(0, (whole if stop is None else min(whole, stop)) - start)

        return self._derived(lambda number: itertools.islice(self.rows(0 if fixed else number), start, stop), size=size)


class _Passes(Iterator[Any]):
    """An iterator over passes, as ``create_tuple_iterator`` describes. ``form``: makes an item of column -> value."""

    def __init__(
        self, dataset: Dataset, columns: Columns, num_epochs: int, as_numpy: bool, form: Callable[[dict[str, Any]], Any]
    ) -> None:
        self._left = num_epochs if num_epochs == -1 else count_of("num_epochs", num_epochs)
        self._dataset, self._names, self._form = dataset, dataset._named(columns), form
        self._item: Callable[[Array, str], Any] = (lambda array, _: array.copy()) if as_numpy else _tensor
        self._rows: Iterator[Row] | None = None

    def __next__(self) -> Any:
        if self._rows is None:
            if self._left == 0:
                raise StopIteration
            self._left -= 1
            self._rows = self._dataset.next_pass()
        for row in self._rows:
            return self._form({name: self._item(row[name], name) for name in self._names})
        self._rows = None
        raise StopIteration


def _listed(datasets: Any) -> Sequence[Dataset]:
    return datasets if isinstance(datasets, (tuple, list)) else (datasets,)


def zipped(datasets: Sequence[Dataset]) -> Dataset:
    """Combine the columns of several datasets, as long as the shortest."""
    columns = names_of(tuple(name for dataset in datasets for name in dataset.get_col_names()))
    return Dataset(
        columns,
        lambda number: (
            {name: value for row in rows for name, value in row.items()}
            for rows in zip(*(dataset.rows(number) for dataset in datasets), strict=False)
        ),
        lambda: min(dataset.get_dataset_size() for dataset in datasets),
    )


def _counted(rows: Callable[[int], Iterator[Row]]) -> Callable[[], int]:
    """Return the number of rows, counted once."""
    return cache(lambda: sum(1 for _ in rows(0)))


class BatchInfo(NamedTuple):
    """Position of a batch, for ``per_batch_map`` and for a function that returns its size."""

    batch: int
    epoch: int

    def get_batch_num(self) -> int:
        return self.batch

    def get_epoch_num(self) -> int:
        return self.epoch


def _stack(name: str, parts: Sequence[Array]) -> Array:
    shapes = sorted({part.shape for part in parts})
    if len(shapes) > 1:
        what = f'the column "{name}" has rows of the shapes {list(shapes[0])} and {list(shapes[1])} in one batch'
        raise RuntimeError(problem(what, fix="pad them in map() first"))
    return np.stack(parts)


def _padded(members: list[Row], info: PadInfo, end: int | None = None) -> Row:
    """Stack rows of different lengths, padded as ``info`` says; where it gives no size, to ``end`` or the longest."""

    def stacked(name: str, parts: Sequence[Array]) -> Array:
        if info is not None and name not in info:
            return _stack(name, parts)
        shape, value = (None, 0) if info is None else info[name]
        longest = np.max([part.shape for part in parts], 0) if parts[0].ndim else ()
        wanted = [end if size is None else size for size in shape or [None] * 9]
        sizes = [int(length if size is None else size) for length, size in zip(longest, wanted, strict=False)]
        return np.stack([pad_end(part, pad_shape=sizes, pad_value=value) for part in parts])

    return {name: stacked(name, [row[name] for row in members]) for name in members[0]}


def _assigned(title: str, columns: Sequence[str], result: Any) -> dict[str, Any]:
    """Return a function's results by column. Raises RuntimeError for another number of them."""
    values = result if isinstance(result, tuple) else (result,)
    if len(values) != len(columns):
        what = f"{title} gives {len(values)} values for the columns {', '.join(columns)}"
        raise RuntimeError(problem(what, fix="name them: output_columns=[...]"))
    return dict(zip(columns, values, strict=True))


def _batched(
    source: Dataset, size: int | Callable[[BatchInfo], int], drop: bool, form: Callable[[BatchInfo, list[Row]], Row],
    columns: Sequence[str] | None = None,
) -> Dataset:  # fmt: skip
    """Return batches of a fixed size, or of the size a function returns. ``form``: makes a row of a batch."""
    fixed = 0 if callable(size) else count_of("batch_size", size)

    def size_of(info: BatchInfo) -> int:
        return count_of("what batch_size returns", size(info)) if callable(size) else fixed

    def rows(number: int) -> Iterator[Row]:
        rest = source.rows(number)
        for place in itertools.count():
            info = BatchInfo(place, number)
            count = size_of(info)
            members = list(itertools.islice(rest, count))
            if not members or (len(members) < count and drop):
                return
            yield form(info, members)

    def count() -> int:
        left, batches = source.get_dataset_size(), 0
        if fixed:
            return left // fixed + (left % fixed > 0 and not drop)
        while left > 0 and (left >= (size := size_of(BatchInfo(batches, 0))) or not drop):
            left, batches = left - size, batches + 1
        return batches

    return source._derived(rows, columns, count, lambda: size_of(BatchInfo(0, 0)) * source.get_batch_size())


def _tensor(array: Array, column: str) -> torch.Tensor:
    try:
        return Tensor(torch.tensor(array))
    except TypeError as error:
        what = f'the column "{column}" holds {array.dtype}, which tensors do not support'
        raise TypeError(problem(what, fix="turn it into numbers with map(), or ask for output_numpy=True")) from error
