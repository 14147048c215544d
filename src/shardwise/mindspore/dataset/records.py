"""Record files that ``mindrecord.FileWriter`` writes and ``MindDataset`` reads.

A file is a numpy archive with the concatenated bytes of the rows, and the end of each row, per column. ``FILE.db``
beside it has as JSON the schema, and the names of the files that were written together. The reference's own files have
another format and are refused.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset as Rows

from shardwise.errors import problem
from shardwise.mindspore.checks import closest, whole
from shardwise.mindspore.dataset.values import Array, as_array, named
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
        self.name, self.kind, self.shape = name, kind, sizes

    def encoded(self, row: int, value: Any) -> bytes:
        """Return the bytes of a row's value. Raises ValueError for one that would be read back differently."""
        item = value.item() if isinstance(value, np.ndarray) and not value.ndim else value
        if self.kind == "string" and isinstance(item, str):
            return item.encode()
        if self.kind == "bytes" and isinstance(item, (bytes, bytearray)):
            return bytes(item)
        array = as_array(value)
        if self.kind == "bytes" and array.dtype == np.uint8 and array.ndim == 1:
            return array.tobytes()
        if self.kind in TEXTS or array.dtype.kind not in "biuf":
            raise self._refused(row, array, f"the schema says {self.kind}")
        with np.errstate(invalid="ignore", over="ignore"):
            cast = array.astype(self.kind)
        kept = cast == array if cast.dtype.kind == "i" else np.isfinite(cast) == np.isfinite(array)
        if not np.all(kept):
            raise self._refused(row, array, f"numbers that {self.kind} holds, or another type")
        sizes = zip(self.shape, array.shape, strict=False)
        matches_schema = array.ndim == len(self.shape) and all(declared in (-1, n) for declared, n in sizes)
        if not matches_schema and (array.ndim > 1 or not self.has(np.array(cast.nbytes))):  # flat arrays are reshaped
            raise self._refused(row, array, f"the schema says the shape {list(self.shape)}")
        return cast.tobytes()

    def _refused(self, row: int, array: Array, fix: str) -> ValueError:
        what = f"{list(array.shape)} of {array.dtype}" if array.ndim else f"{array.item()!r}"
        return ValueError(problem(f"row {row}: column {self.name!r} is {what}", fix=fix))

    def has(self, lengths: Array) -> Array:
        if self.kind in TEXTS:
            return lengths >= 0
        unit = np.dtype(self.kind).itemsize * math.prod(n for n in self.shape if n > 0)
        return np.asarray(lengths % unit == 0 if -1 in self.shape else lengths == unit)

    def decoded(self, data: Array) -> Array:
        if self.kind == "string":
            return np.asarray(data.tobytes().decode())
        return data.copy() if self.kind == "bytes" else data.copy().view(self.kind).reshape(self.shape)


class FileWriter:
    """A writer of rows: ``FileWriter("train.mindrecord", 4)`` writes train.mindrecord0 and so on; for one file, the
    name itself. ``overwrite``: replace existing files."""

    def __init__(self, file_name: str, shard_num: int = 1, overwrite: bool = False) -> None:
        count = whole(1, 1000)("shard_num", shard_num)
        self._paths = [Path(f"{file_name}{number:0{len(str(count - 1))}d}") for number in range(count)]
        if count == 1:
            self._paths = [Path(file_name)]
        if not overwrite and (there := [path for path in self._paths if path.exists()]):
            raise RuntimeError(problem(f"{there[0]} exists", fix="remove it and its .db, or overwrite=True"))
        firsts = [Path(f"{file_name}{first}") for first in _FIRSTS]
        if there := [path for path in firsts[: firsts.index(self._paths[0])] if path.exists()]:
            what = f"{there[0]} exists, and would be read in place of {self._paths[0]}"
            raise RuntimeError(problem(what, fix="remove it and its .db"))
        self._schema: Schema = {}
        self._fields: tuple[_Field, ...] = ()
        self._rows: list[tuple[bytes, ...]] = []

    def add_schema(self, content: Schema, desc: str = "") -> int:
        """Set the schema: ``{"image": {"type": "bytes"}, "label": {"type": "int32", "shape": [2]}}``; a shape may have
        one -1. Call it before rows are written. ``desc`` is for readers of the program."""
        if self._rows:
            raise RuntimeError(problem("add_schema after write_raw_data", fix="add_schema first"))
        self._fields, self._schema = tuple(_Field(*entry) for entry in content.items()), content
        return 0

    def add_index(self, index_fields: Sequence[str]) -> None:
        """Check the names of index fields. They have no effect, as rows are read by their numbers."""
        if unknown := [name for name in index_fields if name not in self._schema]:
            raise ValueError(problem(f"there is no field {unknown[0]!r}", fix=closest(unknown[0], self._schema)))

    def write_raw_data(self, raw_data: Iterable[Mapping[str, Any]], parallel_writer: bool = False) -> None:
        """Add rows as dictionaries of all fields. If one does not match the schema, none of them is added."""
        self._check_schema()
        rows: list[tuple[bytes, ...]] = []
        for number, row in enumerate(raw_data, len(self._rows)):
            if missing := [name for name in self._schema if name not in row]:
                raise ValueError(problem(f"row {number} has no {missing[0]!r}", fix=f"give {', '.join(self._schema)}"))
            rows.append(tuple(field.encoded(number, row[field.name]) for field in self._fields))
        self._rows += rows

    def commit(self) -> None:
        """Write the files, with contiguous rows in each. They replace existing files only when all are complete."""
        self._check_schema()
        index = json.dumps({"schema": dict(self._schema), "files": [path.name for path in self._paths]})
        folder = self._paths[0].parent
        with tempfile.TemporaryDirectory(prefix=".mindrecord-", dir=folder) as beside:
            for path, places in zip(
                self._paths, np.array_split(np.arange(len(self._rows)), len(self._paths)), strict=True
            ):
                entries: dict[str, Any] = {}
                for number, field in enumerate(self._fields):
                    parts = [self._rows[place][number] for place in places]
                    entries[f"{field.name}.bytes"] = np.frombuffer(b"".join(parts), np.uint8)
                    entries[f"{field.name}.ends"] = np.cumsum([len(part) for part in parts], dtype=np.int64)
                with Path(beside, path.name).open("wb") as file:
                    np.savez(file, **entries)
                _index_of(Path(beside, path.name)).write_text(index)
            for name in os.listdir(beside):
                os.replace(Path(beside, name), folder / name)

    def _check_schema(self) -> None:
        if not self._fields:
            raise RuntimeError(problem("there is no schema", fix="add_schema first"))


class RecordFile(Rows[tuple[Array, ...]]):
    """The rows of one file, by index. ``columns``: their names; None: all."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        if not path.exists():
            raise RuntimeError(problem(f"there is no file {path}", fix="mindrecord.FileWriter writes it"))
        self.schema, _ = _read_index(path)
        self.names = named(list(self.schema) if columns is None else columns, list(self.schema))
        self._columns: list[tuple[_Field, Array, Array]] = []
        try:
            if not zipfile.is_zipfile(path):
                raise ValueError("it is not a numpy archive")
            with np.load(path, allow_pickle=False) as archive:
                for name in self.names:
                    column = _Field(name, self.schema[name]), archive[f"{name}.bytes"], archive[f"{name}.ends"]
                    _check_column(*column, len(column[2]) if not self._columns else len(self))
                    self._columns.append(column)
        except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            raise _foreign(path, error) from error

    def __len__(self) -> int:
        return len(self._columns[0][2])

    def __getitem__(self, number: int) -> tuple[Array, ...]:
        return tuple(
            field.decoded(data[ends[number - 1] if number else 0 : ends[number]]) for field, data, ends in self._columns
        )


def written_with(file_name: str | Path) -> list[Path]:
    """Return the files that were written with a name. Raises RuntimeError if there is none."""
    firsts = [Path(f"{file_name}{first}") for first in _FIRSTS]
    first = next((path for path in firsts if path.exists()), None)
    if first is None:
        raise RuntimeError(problem(f"there is no file {file_name}", fix="mindrecord.FileWriter writes it"))
    return [first.with_name(name) for name in _read_index(first)[1]]


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
    kinds = {_kind(array) for array in arrays}
    ranks = {array.ndim for array in arrays}
    if len(kinds) > 1 or len(ranks) > 1:
        seen = ", ".join(sorted({f"{_kind(array)} {list(array.shape)}" for array in arrays}))
        raise ValueError(problem(f"column {name!r} has {seen}", fix="one type, and shapes of as many dims: map()"))
    kind = kinds.pop()
    sizes = [{*lengths} for lengths in zip(*(array.shape for array in arrays), strict=True)]
    shape = [lengths.pop() if len(lengths) == 1 else -1 for lengths in sizes]
    return {"type": kind} if kind in TEXTS or not shape else {"type": kind, "shape": shape}


def _kind(array: Array) -> str:
    if array.dtype == np.uint8 and array.ndim == 1:
        return "bytes"
    kinds: dict[str, str] = {"U": "string", "S": "bytes"}
    return kinds.get(array.dtype.kind, str(array.dtype))


def _index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.db")


def _read_index(path: Path) -> tuple[Schema, list[str]]:
    """Return the schema of a file, and the names of the files in its folder that were written with it."""
    try:
        index = json.loads(_index_of(path).read_text())
        schema, files = dict(index["schema"]), list(index["files"])
        for entry in schema.items():
            _Field(*entry)
        if not schema or path.name not in files or any(Path(name).name != name for name in files):
            raise ValueError("its .db belongs to other files")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _foreign(path, error) from error
    return schema, files


def _check_column(field: _Field, data: Array, ends: Array, rows: int) -> None:
    """Raise ValueError unless bytes and ends are those of ``rows`` rows."""
    is_formed = (data.dtype, data.ndim, ends.dtype, ends.shape) == (np.uint8, 1, np.int64, (rows,))
    is_within = is_formed and bool(((ends >= 0) & (ends <= len(data))).all()) and len(data) == (ends[-1] if rows else 0)
    lengths = np.diff(ends, prepend=0) if is_within else np.array([-1])
    if not ((lengths >= 0) & field.has(lengths)).all():
        raise ValueError(f"column {field.name!r} does not have {rows} rows")


def _foreign(path: Path, error: Exception) -> RuntimeError:
    what = f"{path} is not a file of mindrecord.FileWriter ({error})"
    return RuntimeError(problem(what, fix="write it again from its source"))


__all__ = ["FileWriter"]
__getattr__ = absent("shardwise.mindspore.mindrecord", lambda: __all__, {"FileReader": "dataset.MindDataset"})
