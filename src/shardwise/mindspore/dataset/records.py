"""Record files that ``mindrecord.FileWriter`` writes and ``MindDataset`` reads.

A file of ``torch.save`` holds the schema, the names of the files that were written together, and per column two
tensors: the values of all rows, one after another (texts and bytes as uint8), and where each row's begin, with the end
of the last one. The reference's own files have another format and are refused.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset as Rows

from shardwise.errors import problem
from shardwise.mindspore.checks import closest, whole
from shardwise.mindspore.dataset.transforms import Array, as_array, named
from shardwise.mindspore.named import absent

NUMBERS, TEXTS = ("int32", "int64", "float32", "float64"), ("string", "bytes")
Schema = Mapping[str, Mapping[str, Any]]
_FIRSTS = ("", "0", "00", "000")  # suffix of the first of 1 file, of up to 10, 100 and 1000


class _Field:
    """A column: its type, and the shape of its values; () is a scalar and -1 any size."""

    def __init__(self, name: str, entry: Any) -> None:
        kind, shape = (entry.get("type"), entry.get("shape")) if isinstance(entry, Mapping) else (entry, None)
        if kind not in (*NUMBERS, *TEXTS):
            fix = closest(str(kind), (*NUMBERS, *TEXTS))
            raise ValueError(problem(f"column {name!r} has the type {kind!r}", fix=fix))
        sizes = () if shape is None else tuple(shape) if isinstance(shape, (list, tuple)) else (shape,)
        is_valid = all(type(n) is int and (n > 0 or n == -1) for n in sizes) and sizes.count(-1) <= 1
        if not is_valid or (sizes and kind in TEXTS):
            fix = f"none for {kind}" if kind in TEXTS else "whole numbers from 1, and at most one -1"
            raise ValueError(problem(f"column {name!r} has the shape {shape!r}", fix=fix))
        self.name, self.kind = str(name), str(kind)  # a file does not hold numpy's strings
        self.shape = (-1,) if kind in TEXTS else sizes
        self.entry = {"type": self.kind, "shape": list(sizes)} if sizes else {"type": self.kind}
        self.dtype = np.dtype(np.uint8 if kind in TEXTS else self.kind)
        self.size = math.prod(n for n in self.shape if n > 0)  # of a value, or a divisor of it where the shape has -1

    def stored(self, row: int, value: Any) -> Array:
        """Return a row's value as it is saved: flat. Raises ValueError for one that would be read back differently."""
        item = value.item() if isinstance(value, np.ndarray) and not value.ndim else value
        if self.kind == "string" and isinstance(item, str):
            return np.frombuffer(item.encode("utf-8", "surrogatepass"), np.uint8)
        if self.kind == "bytes" and isinstance(item, (bytes, bytearray)):
            return np.frombuffer(bytes(item), np.uint8)
        array = as_array(value)
        if self.kind == "bytes" and array.dtype == np.uint8 and array.ndim == 1:
            return array.copy()
        if self.kind in TEXTS or array.dtype.kind not in "biuf":
            raise self._refused(row, array, f"the schema says {self.kind}")
        with np.errstate(invalid="ignore", over="ignore"):
            cast = array.astype(self.dtype)
        if not np.all(cast == array if cast.dtype.kind == "i" else np.isfinite(cast) == np.isfinite(array)):
            raise self._refused(row, array, f"numbers that {self.kind} holds, or another type")
        is_flat = array.ndim < 2 and self.has_size(cast.size)
        sizes = zip(self.shape, array.shape, strict=False)
        is_shaped = array.ndim == len(self.shape) and all(declared in (-1, n) for declared, n in sizes)
        if not is_shaped and not is_flat:
            raise self._refused(row, array, f"the schema says the shape {list(self.shape)}")
        return cast.ravel()

    def has_size(self, sizes: Any) -> Any:
        """Return whether values of these numbers of elements have the column's shape."""
        return sizes % self.size == 0 if -1 in self.shape else sizes == self.size

    def read(self, saved: Mapping[str, torch.Tensor]) -> tuple[Array, Array]:
        """Return the values and the offsets of a saved column. Raises ValueError for those of another one."""
        values, offsets = saved["values"].numpy(), saved["offsets"].numpy()
        sizes, ends = np.diff(offsets), [offsets[0], offsets[-1]]
        is_own = values.dtype == self.dtype and values.ndim == 1 and offsets.dtype == np.int64 and (sizes >= 0).all()
        if not is_own or ends != [0, len(values)] or not np.all(self.has_size(sizes)):
            raise ValueError(f"column {self.name} does not hold {self.entry}")
        return values, offsets

    def _refused(self, row: int, array: Array, fix: str) -> ValueError:
        what = f"{list(array.shape)} of {array.dtype}" if array.ndim else f"{array.item()!r}"
        return ValueError(problem(f"row {row}: column {self.name!r} is {what}", fix=fix))


class FileWriter:
    """A writer of rows: ``FileWriter("train.mindrecord", 4)`` writes train.mindrecord0 and so on; for one file, the
    name itself. ``overwrite``: replace existing files."""

    def __init__(self, file_name: str, shard_num: int = 1, overwrite: bool = False) -> None:
        count = whole(1, 1000)("shard_num", shard_num)
        self._paths = [Path(f"{file_name}{number:0{len(str(count - 1))}d}") for number in range(count)]
        if count == 1:
            self._paths = [Path(file_name)]
        if not overwrite and (there := [path for path in self._paths if path.exists()]):
            raise RuntimeError(problem(f"{there[0]} exists", fix="remove it, or overwrite=True"))
        firsts = [Path(f"{file_name}{first}") for first in _FIRSTS]
        if there := [path for path in firsts[: firsts.index(self._paths[0])] if path.exists()]:
            what = f"{there[0]} exists, and would be read in place of {self._paths[0]}"
            raise RuntimeError(problem(what, fix="remove it"))
        self._schema: Schema = {}
        self._fields: tuple[_Field, ...] = ()
        self._rows: list[tuple[Array, ...]] = []

    def add_schema(self, content: Schema, desc: str = "") -> int:
        """Set the schema: ``{"image": {"type": "bytes"}, "label": {"type": "int32", "shape": [2]}}``; a shape may have
        one -1. Call it before rows are written. ``desc`` is for readers of the program."""
        if self._rows:
            raise RuntimeError(problem("add_schema after write_raw_data", fix="add_schema first"))
        self._fields = tuple(_Field(*entry) for entry in content.items())
        self._schema = {field.name: field.entry for field in self._fields}
        return 0

    def add_index(self, index_fields: Sequence[str]) -> None:
        """Check the names of index fields. They have no effect, as rows are read by their numbers."""
        if unknown := [name for name in index_fields if name not in self._schema]:
            raise ValueError(problem(f"there is no field {unknown[0]!r}", fix=closest(unknown[0], self._schema)))

    def write_raw_data(self, raw_data: Iterable[Mapping[str, Any]], parallel_writer: bool = False) -> None:
        """Add rows as dictionaries of all fields. If one does not match the schema, none of them is added."""
        self._check_schema()
        rows: list[tuple[Array, ...]] = []
        for number, row in enumerate(raw_data, len(self._rows)):
            if missing := [name for name in self._schema if name not in row]:
                raise ValueError(problem(f"row {number} has no {missing[0]!r}", fix=f"give {', '.join(self._schema)}"))
            rows.append(tuple(field.stored(number, row[field.name]) for field in self._fields))
        self._rows += rows

    def commit(self) -> None:
        """Write the files, with contiguous rows in each. They replace existing files only when all are complete."""
        self._check_schema()
        parts = np.array_split(np.arange(len(self._rows)), len(self._paths))
        with tempfile.TemporaryDirectory(prefix=".mindrecord-", dir=self._paths[0].parent) as beside:
            for path, places in zip(self._paths, parts, strict=True):
                entries = {
                    "schema": self._schema,
                    "files": [path.name for path in self._paths],
                    "columns": [self._column(number, places) for number in range(len(self._fields))],
                }
                torch.save(entries, Path(beside, path.name))
            for path in self._paths:
                os.replace(Path(beside, path.name), path)

    def _column(self, number: int, places: Array) -> dict[str, torch.Tensor]:
        values = [self._rows[place][number] for place in places]
        offsets = torch.tensor([0, *map(len, values)]).cumsum(0)
        joined = np.concatenate([np.empty(0, self._fields[number].dtype), *values])
        return {"values": torch.from_numpy(joined), "offsets": offsets}

    def _check_schema(self) -> None:
        if not self._fields:
            raise RuntimeError(problem("there is no schema", fix="add_schema first"))


class RecordFile(Rows[tuple[Array, ...]]):
    """The rows of one file, by index. ``columns``: their names; None: all."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        if not path.exists():
            raise RuntimeError(problem(f"there is no file {path}", fix="mindrecord.FileWriter writes it"))
        entries = _read(path)
        self.path, self.schema = path, entries["schema"]
        self.together = [path.with_name(name) for name in entries["files"]]
        self.names = named(list(self.schema) if columns is None else columns, list(self.schema))
        columns_by_name = dict(zip(self.schema, entries["columns"], strict=True))
        self._columns = [(_Field(name, self.schema[name]), *columns_by_name[name]) for name in self.names]

    def __len__(self) -> int:
        return len(self._columns[0][2]) - 1

    def __getitem__(self, number: int) -> tuple[Array, ...]:
        number = range(len(self))[number]
        row: list[Array] = []
        for field, values, offsets in self._columns:
            value = values[offsets[number] : offsets[number + 1]]
            if field.kind == "string":
                row.append(np.asarray(value.tobytes().decode("utf-8", "surrogatepass")))
            else:
                row.append(value.reshape(field.shape).copy())
        return tuple(row)


def written_with(file_name: str | Path, columns: Sequence[str] | None) -> list[RecordFile]:
    """Open the files that were written with a name. Raises RuntimeError if there is none."""
    firsts = [Path(f"{file_name}{first}") for first in _FIRSTS]
    first = next((path for path in firsts if path.exists()), None)
    if first is None:
        raise RuntimeError(problem(f"there is no file {file_name}", fix="mindrecord.FileWriter writes it"))
    opened = RecordFile(first, columns)
    return [opened if path == first else RecordFile(path, opened.names) for path in opened.together]


def save(dataset: Any, file_name: str, num_files: int) -> None:
    """Write the rows of a pass over a dataset. Sizes of a dim that differ between rows become -1. Raises ValueError for
    a column of several types, and if there are no rows."""
    names, rows = dataset.get_col_names(), [tuple(map(as_array, row)) for row in dataset.next_pass()]
    if not rows:
        raise ValueError(problem("the dataset has no rows, so its types are unknown", fix="at least one row"))
    writer = FileWriter(file_name, num_files, overwrite=True)
    writer.add_schema({name: _entry(name, column) for name, column in zip(names, zip(*rows, strict=True), strict=True)})
    writer.write_raw_data(dict(zip(names, row, strict=True)) for row in rows)
    writer.commit()


def _entry(name: str, arrays: Sequence[Array]) -> dict[str, Any]:
    kinds, ranks = {_kind(array) for array in arrays}, {array.ndim for array in arrays}
    if len(kinds) > 1 or len(ranks) > 1:
        seen = ", ".join(sorted({f"{_kind(array)} {list(array.shape)}" for array in arrays}))
        raise ValueError(problem(f"column {name!r} has {seen}", fix="one type, and shapes of as many dims: map()"))
    kind = kinds.pop()
    sizes = [{*lengths} for lengths in zip(*(array.shape for array in arrays), strict=True)]
    shape = [lengths.pop() if len(lengths) == 1 else -1 for lengths in sizes]
    return {"type": kind} if kind in TEXTS or not shape else {"type": kind, "shape": shape}


def _kind(array: Array) -> str:
    is_bytes = array.dtype.kind == "S" or (array.dtype == np.uint8 and array.ndim == 1)
    return "bytes" if is_bytes else "string" if array.dtype.kind == "U" else str(array.dtype)


def _read(path: Path) -> dict[str, Any]:
    """Return the entries of a file. Raises RuntimeError for other files."""
    try:
        entries: dict[str, Any] = torch.load(path, weights_only=True)
        fields = [_Field(*entry) for entry in entries["schema"].items()]
        entries["columns"] = [field.read(saved) for field, saved in zip(fields, entries["columns"], strict=True)]
        counts = {len(offsets) for _, offsets in entries["columns"]}
        names = entries["files"]
        if len(counts) != 1 or path.name not in names or any(Path(name).name != name for name in names):
            raise ValueError("its entries belong to other files")
    except Exception as error:  # whatever torch raises for other files
        what = f"{path} is not a file of mindrecord.FileWriter ({type(error).__name__})"
        raise RuntimeError(problem(what, fix="write it again from its source")) from error
    return entries


__all__ = ["FileWriter"]
__getattr__ = absent("shardwise.mindspore.mindrecord", lambda: __all__)
