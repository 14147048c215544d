"""Chains of operations on rows.

A row is a tuple of numpy arrays, one per column. Nothing is read before it is asked for; all work is done in this
process. Every pass over a dataset starts its source anew; shuffled orders follow from the dialect's seed and the number
of the pass, so that all ranks draw the same one.
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import closest
from shardwise.mindspore.common.seed import data_seed

Array = np.ndarray[Any, Any]
Row = tuple[Array, ...]
Columns = str | Sequence[str] | None


class Dataset(ABC):
    """Rows of named columns. Every operation returns a new dataset over this one."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)
        self._passes = 0

    @abstractmethod
    def rows(self, number: int) -> Iterator[Row]:
        """The rows of a pass; ``number`` counts passes, from 0."""

    @abstractmethod
    def get_dataset_size(self) -> int:
        """How many rows a pass has."""

    def get_col_names(self) -> list[str]:
        """The names of the columns."""
        return list(self._columns)

    def get_batch_size(self) -> int:
        """How many items of the source a row has."""
        return 1

    def __len__(self) -> int:
        return self.get_dataset_size()

    def __iter__(self) -> Iterator[list[Any]]:
        return self.create_tuple_iterator(num_epochs=1)

    def create_tuple_iterator(
        self, columns: Columns = None, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = True
    ) -> Iterator[list[Any]]:
        """Rows as lists of tensors, or of numpy arrays; one pass after the other, ``num_epochs`` of them (-1: any
        number). A ``for`` loop ends with a pass, the next one continues with the next pass. Always copies."""
        return _Passes(self, columns, num_epochs, output_numpy, lambda names, row: row)

    def create_dict_iterator(
        self, num_epochs: int = -1, output_numpy: bool = False, do_copy: bool = True
    ) -> Iterator[dict[str, Any]]:
        """As ``create_tuple_iterator``, with rows as dictionaries by the names of the columns."""
        return _Passes(self, None, num_epochs, output_numpy, lambda names, row: dict(zip(names, row, strict=True)))

    def next_pass(self) -> Iterator[Row]:
        """The rows of the next pass."""
        self._passes += 1
        return self.rows(self._passes - 1)

    def batch(self, batch_size: int, drop_remainder: bool = False, num_parallel_workers: int | None = None) -> Dataset:
        """Rows of so many items, stacked along a new dim 0; the last may have fewer, or is left out."""
        return _Batch(self, count_of("batch_size", batch_size), drop_remainder)

    def repeat(self, count: int | None = None) -> Dataset:
        """The same rows so many times; None or -1: for ever."""
        return _Repeat(self, None if count in (None, -1) else count_of("count", count))

    def map(
        self,
        operations: Callable[..., Any] | Sequence[Callable[..., Any]],
        input_columns: Columns = None,
        output_columns: Columns = None,
        num_parallel_workers: int | None = None,
    ) -> Dataset:
        """Columns replaced by what functions make of them, one after the other: each is called with the numpy arrays
        of the columns, by default the first, and returns one array or a tuple. ``output_columns`` names what comes
        out, where that is not the same."""
        inputs = named(input_columns, self._columns) if input_columns is not None else self._columns[:1]
        outputs = inputs if output_columns is None else names_of(output_columns)
        functions = tuple(operations) if isinstance(operations, Sequence) else (operations,)
        return _Map(self, functions, inputs, outputs)

    def project(self, columns: str | Sequence[str]) -> Dataset:
        """Only these columns, in this order."""
        return _Project(self, named(columns, self._columns))

    def shuffle(self, buffer_size: int) -> Dataset:
        """Rows in a random order: each is drawn from the next ``buffer_size``."""
        return _Shuffle(self, count_of("buffer_size", buffer_size))

    def take(self, count: int = -1) -> Dataset:
        """The first so many rows; -1: all."""
        return self if count == -1 else _Slice(self, 0, count_of("count", count))

    def skip(self, count: int) -> Dataset:
        """All but the first so many rows."""
        return _Slice(self, count_of("count", count, low=0), None)


class _Passes(Iterator[Any]):
    """Passes over a dataset, as ``create_tuple_iterator`` describes."""

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


class _Over(Dataset):
    """A dataset made of another one's rows; by default as many."""

    def __init__(self, source: Dataset, columns: Sequence[str] | None = None) -> None:
        super().__init__(source.get_col_names() if columns is None else columns)
        self._source = source

    def get_dataset_size(self) -> int:
        return self._source.get_dataset_size()

    def get_batch_size(self) -> int:
        return self._source.get_batch_size()


class _Batch(_Over):
    def __init__(self, source: Dataset, size: int, drop_remainder: bool) -> None:
        super().__init__(source)
        self._size, self._drop = size, drop_remainder

    def rows(self, number: int) -> Iterator[Row]:
        rows = self._source.rows(number)
        while members := list(itertools.islice(rows, self._size)):
            if len(members) == self._size or not self._drop:
                yield tuple(
                    self._stacked(name, parts)
                    for name, parts in zip(self._columns, zip(*members, strict=True), strict=True)
                )

    def _stacked(self, name: str, parts: Sequence[Array]) -> Array:
        shapes = sorted({part.shape for part in parts})
        if len(shapes) > 1:
            what = f'the column "{name}" has rows of the shapes {list(shapes[0])} and {list(shapes[1])} in one batch'
            raise RuntimeError(problem(what, fix="pad them in map() first"))
        return np.stack(parts)

    def get_dataset_size(self) -> int:
        full, rest = divmod(super().get_dataset_size(), self._size)
        return full + (rest > 0 and not self._drop)

    def get_batch_size(self) -> int:
        return self._size * super().get_batch_size()


class _Repeat(_Over):
    def __init__(self, source: Dataset, count: int | None) -> None:
        super().__init__(source)
        self._count = count

    def rows(self, number: int) -> Iterator[Row]:
        for i in itertools.count() if self._count is None else range(self._count):
            yield from self._source.rows(number * (self._count or 0) + i)

    def get_dataset_size(self) -> int:
        """Of an endless repetition the size of what is repeated."""
        return super().get_dataset_size() * (self._count or 1)


class _Map(_Over):
    def __init__(
        self, source: Dataset, functions: Sequence[Callable[..., Any]], inputs: Sequence[str], outputs: Sequence[str]
    ) -> None:
        names = source.get_col_names()
        first = names.index(inputs[0])
        kept = [name for name in names if name not in inputs]
        place = sum(name not in inputs for name in names[:first])
        super().__init__(source, names if tuple(outputs) == tuple(inputs) else [*kept[:place], *outputs, *kept[place:]])
        _once(self._columns)
        self._functions, self._inputs, self._outputs = functions, tuple(inputs), tuple(outputs)

    def rows(self, number: int) -> Iterator[Row]:
        names = self._source.get_col_names()
        for row in self._source.rows(number):
            values = dict(zip(names, row, strict=True))
            operands: tuple[Any, ...] = tuple(values[name] for name in self._inputs)
            for function in self._functions:
                mapped = function(*operands)
                operands = mapped if isinstance(mapped, tuple) else (mapped,)
            if len(operands) != len(self._outputs):
                what = f"map() gives {len(operands)} values for the columns {', '.join(self._outputs)}"
                raise RuntimeError(problem(what, fix="name them: output_columns=[...]"))
            values.update(zip(self._outputs, map(as_array, operands), strict=True))
            yield tuple(values[name] for name in self._columns)


class _Project(_Over):
    def rows(self, number: int) -> Iterator[Row]:
        names = self._source.get_col_names()
        positions = [names.index(name) for name in self._columns]
        for row in self._source.rows(number):
            yield tuple(row[i] for i in positions)


class _Shuffle(_Over):
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


class _Slice(_Over):
    def __init__(self, source: Dataset, start: int, count: int | None) -> None:
        super().__init__(source)
        self._start, self._count = start, count

    def rows(self, number: int) -> Iterator[Row]:
        return itertools.islice(self._source.rows(number), self._start, self._count)

    def get_dataset_size(self) -> int:
        whole = super().get_dataset_size()
        return max(0, (whole if self._count is None else min(whole, self._count)) - self._start)


# ------------------------------------------------------------------------------------------------------------ values


def as_array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value)


def _tensor(array: Array, column: str) -> torch.Tensor:
    try:
        return torch.tensor(array)
    except TypeError as error:
        what = f'the column "{column}" holds {array.dtype}, which no tensor does'
        raise TypeError(problem(what, fix="turn it into numbers with map(), or ask for output_numpy=True")) from error


def names_of(columns: str | Sequence[str]) -> tuple[str, ...]:
    """The names of columns, given as a list or as a single one."""
    names = (columns,) if isinstance(columns, str) else columns
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(problem(f"the names of columns are {columns!r}", fix='give a list: ["input", "label"]'))
    return _once(tuple(names))


def _once(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(problem(f'there are two columns "{twice[0]}"', fix="name every column once"))
    return names


def named(columns: str | Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    """Columns of a dataset, by their names."""
    names = names_of(columns)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(problem(f'there is no column "{unknown[0]}"', fix=closest(unknown[0], known)))
    return names


def count_of(name: str, value: Any, low: int = 1) -> int:
    """A number of rows."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(problem(f"{name} is {value!r}, of type {type(value).__name__}", fix="give an integer"))
    if value < low:
        raise ValueError(problem(f"{name} is {value}", fix=f"give an integer from {low} on"))
    return value
