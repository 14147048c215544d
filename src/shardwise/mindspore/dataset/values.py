"""Rows, column names, and checks of arguments of datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from shardwise.errors import problem
from shardwise.mindspore.checks import closest, integer

Array = np.ndarray[Any, Any]
Row = tuple[Array, ...]
Columns = str | Sequence[str] | None


def as_array(value: Any) -> Array:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value)


def names_of(columns: str | Sequence[str]) -> tuple[str, ...]:
    """Return column names, given as a list or as a single one."""
    names = (columns,) if isinstance(columns, str) else columns
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(problem(f"the names of columns are {columns!r}", fix='give a list: ["input", "label"]'))
    return once(tuple(names))


def once(names: tuple[str, ...]) -> tuple[str, ...]:
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(problem(f'there are two columns "{twice[0]}"', fix="name every column once"))
    return names


def named(columns: str | Sequence[str], column_names: Sequence[str]) -> tuple[str, ...]:
    """Check column names against those of a dataset and return them."""
    names = names_of(columns)
    if unknown := [name for name in names if name not in column_names]:
        raise ValueError(problem(f'there is no column "{unknown[0]}"', fix=closest(unknown[0], column_names)))
    return names


def count_of(name: str, value: Any, low: int = 1) -> int:
    """Check for a number of rows."""
    if integer(name, value) < low:
        raise ValueError(problem(f"{name} is {value}", fix=f"give an integer from {low} on"))
    return int(value)
