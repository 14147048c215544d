"""Rows of training data: of a dataset, or of any iterable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def size_of(dataset: Any, sink_size: int) -> int:
    """Return the number of rows of an epoch."""
    if sink_size > 0:
        return sink_size
    return int(dataset.get_dataset_size() if hasattr(dataset, "get_dataset_size") else len(dataset))


def steps_of(dataset: Any, sink_size: int) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of an epoch as tuples."""
    rows: Iterable[Any] = (
        dataset.create_tuple_iterator(num_epochs=1) if hasattr(dataset, "create_tuple_iterator") else dataset
    )
    for number, row in enumerate(rows):
        if 0 < sink_size <= number:
            return
        yield tuple(row) if isinstance(row, (tuple, list)) else (row,)
