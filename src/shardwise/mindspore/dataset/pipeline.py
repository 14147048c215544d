"""Chains of operations on rows.

A row is a tuple of numpy arrays, one per column. Rows are read lazily, in this process. Every pass over a dataset
restarts its source. Shuffled orders depend on the dialect's seed and the pass number, so that all ranks draw the same
one.
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise.errors import problem
from shardwise.mindspore.common.seed import data_seed
from shardwise.mindspore.dataset.transforms import applied
from shardwise.mindspore.dataset.values import (
    Array,
    Columns,
    Row,
    as_array,
    count_of,
    named,
    names_of,
    once,
    unknown_words,
)
from shardwise.mindspore.tensor import Tensor


class Dataset(ABC):
    """Rows of named columns. Every operation returns a new dataset based on this one."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._passes = 0

    @abstractmethod
    def rows(self, number: int) -> Iterator[Row]:
        """Return the rows of a pass; ``number`` counts passes, from 0."""

    @abstractmethod
    def get_dataset_size(self) -> int:
        """Return the number of rows per pass."""

    def get_col_names(self) -> list[str]:
        """Return the names of the columns."""
        return list(self._columns)

    def get_batch_size(self) -> int:
        """Return the number of source items per row."""
        return 1

    def __len__(self) -> int:
        return self.get_dataset_size()

    def __iter__(self) -> Iterator[list[Any]]:
        return self.create_tuple_iterator(num_epochs=1)

    def create_tuple_iterator(
        self, columns: Columns = None, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = True
    ) -> Iterator[list[Any]]:
        """Return an iterator over rows as lists of tensors, or of numpy arrays.

        A ``for`` loop ends with a pass, and the next one continues with the next pass. Arrays are always copied.

        Args:
            num_epochs: number of passes; -1: any number.
        """
        return _Passes(self, columns, num_epochs, output_numpy, lambda names, row: row)

    def create_dict_iterator(
        self, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = True
    ) -> Iterator[dict[str, Any]]:
        """Return an iterator like ``create_tuple_iterator``, with rows as dictionaries by column name."""
        return _Passes(self, None, num_epochs, output_numpy, lambda names, row: dict(zip(names, row, strict=True)))

    def next_pass(self) -> Iterator[Row]:
        """Return the rows of the next pass."""
        self._passes += 1
        return self.rows(self._passes - 1)

    def batch(
        self,
        batch_size: int | Callable[[Any], int],
        drop_remainder: bool = False,
        num_parallel_workers: int | None = None,
        per_batch_map: Callable[..., Any] | None = None,
        input_columns: Columns = None,
        output_columns: Columns = None,
        **settings: Any,
    ) -> Dataset:
        """Batch rows along a new dim 0.

        The last batch may be smaller, or is dropped.

        Args:
            batch_size: number of rows, or a function of an object with ``get_batch_num()`` and ``get_epoch_num()`` that
                returns it.
            per_batch_map: transforms lists of some columns before they are stacked; it takes these lists and the same
                object.
        """
        from shardwise.mindspore.dataset.batches import Batch, MappedBatch

        unknown_words(settings, "python_multiprocessing", "max_rowsize")
        if per_batch_map is None:
            return Batch(self, batch_size, drop_remainder)
        inputs = named(input_columns, self._columns) if input_columns is not None else self._columns
        outputs = inputs if output_columns is None else names_of(output_columns)
        return MappedBatch(self, batch_size, drop_remainder, per_batch_map, inputs, outputs)

    def padded_batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        num_parallel_workers: int | None = None,
        pad_info: dict[str, tuple[Any, Any]] | None = None,
    ) -> Dataset:
        """Batch rows of different lengths, padded. ``pad_info``: column -> (shape or None for the longest, value)."""
        from shardwise.mindspore.dataset.batches import PaddedBatch

        return PaddedBatch(self, batch_size, drop_remainder, pad_info)

    def bucket_batch_by_length(
        self,
        column_names: Sequence[str],
        bucket_boundaries: Sequence[int],
        bucket_batch_sizes: Sequence[int],
        element_length_function: Callable[..., Any] | None = None,
        pad_info: dict[str, tuple[Any, Any]] | None = None,
        pad_to_bucket_boundary: bool = False,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Return padded batches of rows of similar length (``buckets.Buckets``). ``element_length_function``: length of
        a row by its columns; by default the length of the only column."""
        from shardwise.mindspore.dataset.buckets import Buckets

        columns = named(column_names, self._columns)
        return Buckets(self, columns, bucket_boundaries, bucket_batch_sizes, element_length_function, pad_info,
                       pad_to_bucket_boundary, drop_remainder)  # fmt: skip

    def save(self, file_name: str, num_files: int = 1, file_type: str = "mindrecord") -> None:
        """Write the rows of the next pass into files that ``MindDataset`` reads."""
        from shardwise.mindspore.dataset import records

        if file_type != "mindrecord":
            raise ValueError(problem(f"file_type is {file_type!r}", fix='"mindrecord"'))
        records.save(self, file_name, num_files)

    def zip(self, datasets: Any) -> Dataset:
        """Combine the columns of this and other datasets, as long as the shortest."""
        others = datasets if isinstance(datasets, (tuple, list)) else (datasets,)
        return Zipped((self, *others))

    def concat(self, datasets: Any) -> Dataset:
        """Append the rows of other datasets."""
        others = datasets if isinstance(datasets, (tuple, list)) else (datasets,)
        return _Joined((self, *others))

    __add__ = concat

    def rename(self, input_columns: Columns, output_columns: Columns) -> Dataset:
        """Rename columns."""
        old, new = named(input_columns or (), self._columns), names_of(output_columns or ())
        if len(old) != len(new):
            raise ValueError(problem(f"rename of {len(old)} columns to {len(new)} names", fix="one name for each"))
        names = dict(zip(old, new, strict=True))
        return _Renamed(self, [names.get(name, name) for name in self._columns])

    def filter(
        self, predicate: Callable[..., Any], input_columns: Columns = None, num_parallel_workers: int | None = None
    ) -> Dataset:
        """Keep the rows for which a function of some columns, by default all, is true."""
        return _Filter(self, predicate, named(input_columns, self._columns) if input_columns else self._columns)

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
        source = self.shuffle(total) if randomize else self
        starts = [sum(counts[:i]) for i in range(len(counts))]
        return [_Slice(source, at, at + count, fixed=True) for at, count in zip(starts, counts, strict=True)]

    def get_repeat_count(self) -> int:
        return 1

    def output_shapes(self, estimate: bool = False) -> list[list[int]]:
        """Return the shapes of the first row."""
        return [list(array.shape) for array in next(iter(self.rows(0)))]

    def output_types(self) -> list[Any]:
        """Return the dtypes of the first row."""
        return [array.dtype for array in next(iter(self.rows(0)))]

    def reset(self) -> None:
        """Restart with the first pass."""
        self._passes = 0

    def repeat(self, count: int | None = None) -> Dataset:
        """Repeat the rows ``count`` times; None or -1: for ever."""
        return _Repeat(self, None if count in (None, -1) else count_of("count", count))

    def map(
        self,
        operations: Callable[..., Any] | Sequence[Callable[..., Any]],
        input_columns: Columns = None,
        output_columns: Columns = None,
        column_order: Columns = None,
        num_parallel_workers: int | None = None,
        **settings: Any,
    ) -> Dataset:
        """Transform columns by functions in turn. Each takes the numpy arrays of the columns, by default the first, and
        returns one array or a tuple. ``output_columns``: names of the results, if they differ."""
        inputs = named(input_columns, self._columns) if input_columns is not None else self._columns[:1]
        outputs = inputs if output_columns is None else names_of(output_columns)
        unknown_words(settings, "python_multiprocessing", "cache", "callbacks", "max_rowsize", "offload")
        functions = tuple(operations) if isinstance(operations, Sequence) else (operations,)
        mapped = _Map(self, functions, inputs, outputs)
        return mapped if column_order is None else mapped.project(column_order)

    def project(self, columns: str | Sequence[str]) -> Dataset:
        """Select columns, in this order."""
        return _Project(self, named(columns, self._columns))

    def shuffle(self, buffer_size: int) -> Dataset:
        """Shuffle rows: each is drawn from the next ``buffer_size``."""
        return _Shuffle(self, count_of("buffer_size", buffer_size))

    def take(self, count: int = -1) -> Dataset:
        """Keep the first ``count`` rows; -1: all."""
        return self if count == -1 else _Slice(self, 0, count_of("count", count))

    def skip(self, count: int) -> Dataset:
        """Drop the first ``count`` rows."""
        return _Slice(self, count_of("count", count, low=0), None)


class _Passes(Iterator[Any]):
    """An iterator over passes, as ``create_tuple_iterator`` describes."""

    def __init__(
        self, dataset: Dataset, columns: Columns, num_epochs: int, as_numpy: bool, form: Callable[..., Any]
    ) -> None:
        if num_epochs != -1:
            count_of("num_epochs", num_epochs)
        names = dataset.get_col_names()
        self._names = list(named(columns, names)) if columns is not None else names
        self._positions = [names.index(name) for name in self._names]
        self._dataset, self._left, self._form = dataset, num_epochs, form
        self._item: Callable[[Array, str], Any] = (lambda array, _: array.copy()) if as_numpy else _tensor
        self._rows: Iterator[Row] | None = None

    def __next__(self) -> Any:
        if self._rows is None:
            if self._left == 0:
                raise StopIteration
            self._left -= 1
            self._rows = self._dataset.next_pass()
        row = next(self._rows, None)
        if row is None:
            self._rows = None
            raise StopIteration
        items = [self._item(row[i], name) for i, name in zip(self._positions, self._names, strict=True)]
        return self._form(self._names, items)


# ------------------------------------------------------------------------------------------------------- operations


class Over(Dataset):
    """A dataset made from another one's rows; by default with the same number."""

    def __init__(self, source: Dataset, columns: Sequence[str] | None = None) -> None:
        super().__init__(source.get_col_names() if columns is None else columns)
        self._source = source

    def get_dataset_size(self) -> int:
        return self._source.get_dataset_size()

    def get_batch_size(self) -> int:
        return self._source.get_batch_size()


class Zipped(Dataset):
    """The combined columns of several datasets."""

    def __init__(self, datasets: Sequence[Dataset]) -> None:
        super().__init__(once(tuple(name for dataset in datasets for name in dataset.get_col_names())))
        self._sources = tuple(datasets)

    def rows(self, number: int) -> Iterator[Row]:
        for rows in zip(*(source.rows(number) for source in self._sources), strict=False):
            yield tuple(array for row in rows for array in row)

    def get_dataset_size(self) -> int:
        return min(source.get_dataset_size() for source in self._sources)


class _Joined(Dataset):
    def __init__(self, datasets: Sequence[Dataset]) -> None:
        super().__init__(datasets[0].get_col_names())
        self._sources = tuple(datasets)
        for dataset in datasets:
            if tuple(dataset.get_col_names()) != self._columns:
                what = f"concat of the columns {list(self._columns)} and {dataset.get_col_names()}"
                raise ValueError(problem(what, fix="the same names: rename(input_columns, output_columns)"))

    def rows(self, number: int) -> Iterator[Row]:
        return itertools.chain.from_iterable(source.rows(number) for source in self._sources)

    def get_dataset_size(self) -> int:
        return sum(source.get_dataset_size() for source in self._sources)


class _Renamed(Over):
    def rows(self, number: int) -> Iterator[Row]:
        return self._source.rows(number)


class _Filter(Over):
    def __init__(self, source: Dataset, predicate: Callable[..., Any], columns: Sequence[str]) -> None:
        super().__init__(source)
        self._predicate, self._places = predicate, [self._columns.index(name) for name in columns]
        self._counted: int | None = None

    def rows(self, number: int) -> Iterator[Row]:
        return (row for row in self._source.rows(number) if self._predicate(*(row[i] for i in self._places)))

    def get_dataset_size(self) -> int:
        """Return the number of rows, counted once."""
        if self._counted is None:
            self._counted = sum(1 for _ in self.rows(0))
        return self._counted


class _Repeat(Over):
    def __init__(self, source: Dataset, count: int | None) -> None:
        super().__init__(source)
        self._count = count

    def rows(self, number: int) -> Iterator[Row]:
        for i in itertools.count() if self._count is None else range(self._count):
            yield from self._source.rows(number * (self._count or 0) + i)

    def get_dataset_size(self) -> int:
        """Return the number of rows; for an endless repetition, that of one repetition."""
        return super().get_dataset_size() * (self._count or 1)


class _Map(Over):
    def __init__(
        self, source: Dataset, functions: Sequence[Callable[..., Any]], inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        names = source.get_col_names()
        first = names.index(inputs[0])
        kept = [name for name in names if name not in inputs]
        place = sum(name not in inputs for name in names[:first])
        super().__init__(source, names if tuple(outputs) == tuple(inputs) else [*kept[:place], *outputs, *kept[place:]])
        once(self._columns)
        self._functions, self._inputs, self._outputs = functions, tuple(inputs), tuple(outputs)

    def rows(self, number: int) -> Iterator[Row]:
        names = self._source.get_col_names()
        for row in self._source.rows(number):
            values = dict(zip(names, row, strict=True))
            operands: tuple[Any, ...] = tuple(values[name] for name in self._inputs)
            operands = applied(self._functions, operands)
            if len(operands) != len(self._outputs):
                what = f"map() gives {len(operands)} values for the columns {', '.join(self._outputs)}"
                raise RuntimeError(problem(what, fix="name them: output_columns=[...]"))
            values.update(zip(self._outputs, map(as_array, operands), strict=True))
            yield tuple(values[name] for name in self._columns)


class _Project(Over):
    def rows(self, number: int) -> Iterator[Row]:
        names = self._source.get_col_names()
        positions = [names.index(name) for name in self._columns]
        for row in self._source.rows(number):
            yield tuple(row[i] for i in positions)


class _Shuffle(Over):
    def __init__(self, source: Dataset, size: int) -> None:
        super().__init__(source)
        self._size = size

    def rows(self, number: int) -> Iterator[Row]:
        chance, rows = random.Random(f"{data_seed()} {number}"), self._source.rows(number)
        buffer = list(itertools.islice(rows, self._size))
        for row in rows:
            place = chance.randrange(len(buffer))
            yield buffer[place]
            buffer[place] = row
        chance.shuffle(buffer)
        yield from buffer


class _Slice(Over):
    def __init__(self, source: Dataset, start: int, count: int | None, *, fixed: bool = False) -> None:
        super().__init__(source)
        self._start, self._count, self._fixed = start, count, fixed  # fixed: always use the first pass

    def rows(self, number: int) -> Iterator[Row]:
        return itertools.islice(self._source.rows(0 if self._fixed else number), self._start, self._count)

    def get_dataset_size(self) -> int:
        whole = super().get_dataset_size()
        return max(0, (whole if self._count is None else min(whole, self._count)) - self._start)


def _tensor(array: Array, column: str) -> torch.Tensor:
    try:
        return Tensor(torch.tensor(array))
    except TypeError as error:
        what = f'the column "{column}" holds {array.dtype}, which tensors do not support'
        raise TypeError(problem(what, fix="turn it into numbers with map(), or ask for output_numpy=True")) from error
