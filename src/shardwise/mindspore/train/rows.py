"""The rows of what is trained on: a dataset, or anything that can be iterated over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


def size_of(dataset: Any, sink_size: int) -> int:
    """The number of rows of an epoch."""
    if sink_size > 0:
        return sink_size
    return int(dataset.get_dataset_size() if hasattr(dataset, "get_dataset_size") else len(dataset))


def steps_of(dataset: Any, sink_size: int) -> Iterator[tuple[Any, ...]]:
    """The rows of an epoch, each a tuple."""
    rows: Iterable[Any] = (
        dataset.create_tuple_iterator(num_epochs=1) if hasattr(dataset, "create_tuple_iterator") else dataset
    )
    for number, row in enumerate(rows):
        if 0 < sink_size <= number:
            return
        yield tuple(row) if isinstance(row, (tuple, list)) else (row,)
