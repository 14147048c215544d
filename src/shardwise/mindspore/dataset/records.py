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

TEXTS = ("string", "bytes")
KINDS = ("int32", "int64", "float32", "float64", *TEXTS)
Schema = Mapping[str, Mapping[str, Any]]


class _Field:
    """A column: its type, and the shape of its values; () is a scalar and -1 any size."""

    def __init__(self, name: str, entry: Any) -> None:
        kind, shape = (entry.get("type"), entry.get("shape")) if isinstance(entry, Mapping) else (entry, None)
        if kind not in KINDS:
            raise ValueError(problem(f"column {name!r} has the type {kind!r}", fix=closest(str(kind), KINDS)))
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
            item = item.encode("utf-8", "surrogatepass")
        elif self.kind == "string" and isinstance(item, bytes):
            item = None
        if self.kind in TEXTS and isinstance(item, (bytes, bytearray)):
            return np.frombuffer(bytes(item), np.uint8)
        array = as_array(value)
        if self.kind == "bytes" and array.dtype == np.uint8 and array.ndim == 1:
            return array.copy()
        fix = f"the schema says {self.kind}" if self.kind in TEXTS or array.dtype.kind not in "biuf" else ""
        with np.errstate(invalid="ignore", over="ignore"):
            cast = array if fix else array.astype(self.dtype)
        if not fix and not np.all(cast == array if cast.dtype.kind == "i" else np.isfinite(cast) == np.isfinite(array)):
            fix = f"numbers that {self.kind} holds, or another type"
        sizes, is_flat = zip(self.shape, array.shape, strict=False), array.ndim < 2 and self.has_size(cast.size)
        is_shaped = array.ndim == len(self.shape) and all(declared in (-1, n) for declared, n in sizes)
        if fix or not (is_shaped or is_flat):
            what = f"{list(array.shape)} of {array.dtype}" if array.ndim else f"{array.item()!r}"
            fix = fix or f"the schema says the shape {list(self.shape)}"
            raise ValueError(problem(f"row {row}: column {self.name!r} is {what}", fix=fix))
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


def _firsts(file_name: str | Path) -> list[Path]:
    """Return the names of the first of 1 file, of up to 10, 100 and 1000."""
    return [Path(f"{file_name}{number}") for number in ("", "0", "00", "000")]


class FileWriter:
    """A writer of rows: ``FileWriter("train.mindrecord", 4)`` writes train.mindrecord0 and so on; for one file, the
    name itself. ``overwrite``: replace existing files."""

    def __init__(self, file_name: str, shard_num: int = 1, overwrite: bool = False) -> None:
        count = whole(1, 1000)("shard_num", shard_num)
        names = (f"{file_name}{number:0{len(str(count - 1))}d}" for number in range(count))
        self._paths = [Path(file_name)] if count == 1 else [*map(Path, names)]
        if not overwrite and (there := [path for path in self._paths if path.exists()]):
            raise RuntimeError(problem(f"{there[0]} exists", fix="remove it, or overwrite=True"))
        firsts = _firsts(file_name)
        if there := [path for path in firsts[: firsts.index(self._paths[0])] if path.exists()]:
            what = f"{there[0]} exists, and would be read in place of {self._paths[0]}"
            raise RuntimeError(problem(what, fix="remove it"))
        self._fields: dict[str, _Field] = {}
        self._rows: list[tuple[Array, ...]] = []

    def add_schema(self, content: Schema, desc: str = "") -> int:
        """Set the schema: ``{"image": {"type": "bytes"}, "label": {"type": "int32", "shape": [2]}}``; a shape may have
        one -1. Call it before rows are written. ``desc`` is for readers of the program."""
        if self._rows:
            raise RuntimeError(problem("add_schema after write_raw_data", fix="add_schema first"))
        self._fields = {str(name): _Field(name, entry) for name, entry in content.items()}
        return 0

    def add_index(self, index_fields: Sequence[str]) -> None:
        """Check the names of index fields. They have no effect, as rows are read by their numbers."""
        if unknown := [name for name in index_fields if name not in self._fields]:
            raise ValueError(problem(f"there is no field {unknown[0]!r}", fix=closest(unknown[0], self._fields)))

    def write_raw_data(self, raw_data: Iterable[Mapping[str, Any]], parallel_writer: bool = False) -> None:
        """Add rows as dictionaries of all fields. If one does not match the schema, none of them is added."""
        fields, rows = self._checked(), []
        for number, row in enumerate(raw_data, len(self._rows)):
            if missing := [name for name in fields if name not in row]:
                raise ValueError(problem(f"row {number} has no {missing[0]!r}", fix=f"give {', '.join(fields)}"))
            rows.append(tuple(field.stored(number, row[name]) for name, field in fields.items()))
        self._rows += rows

    def commit(self) -> None:
        """Write the files, with contiguous rows in each. They replace existing files only when all are complete."""
        fields, together = self._checked(), [path.name for path in self._paths]
        schema = {name: field.entry for name, field in fields.items()}
        parts = np.array_split(np.arange(len(self._rows)), len(self._paths))
        with tempfile.TemporaryDirectory(prefix=".mindrecord-", dir=self._paths[0].parent) as beside:
            for name, places in zip(together, parts, strict=True):
                columns = []
                for at, field in enumerate(fields.values()):
                    values = [self._rows[place][at] for place in places]
                    joined = torch.from_numpy(np.concatenate([np.empty(0, field.dtype), *values]))
                    columns.append({"values": joined, "offsets": torch.tensor([0, *map(len, values)]).cumsum(0)})
                torch.save({"schema": schema, "files": together, "columns": columns}, Path(beside, name))
            for path in self._paths:
                os.replace(Path(beside, path.name), path)

    def _checked(self) -> dict[str, _Field]:
        if not self._fields:
            raise RuntimeError(problem("there is no schema", fix="add_schema first"))
        return self._fields


class RecordFile(Rows[tuple[Array, ...]]):
    """The rows of one file, by index. ``columns``: their names; None: all. Raises RuntimeError for other files."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        if not path.exists():
            raise RuntimeError(problem(f"there is no file {path}", fix="mindrecord.FileWriter writes it"))
        try:
            entries: dict[str, Any] = torch.load(path, weights_only=True)
            fields = [_Field(*entry) for entry in entries["schema"].items()]
            read = [(field, *field.read(saved)) for field, saved in zip(fields, entries["columns"], strict=True)]
            names = entries["files"]
            is_foreign = path.name not in names or any(Path(name).name != name for name in names)
            if is_foreign or len({len(offsets) for *_, offsets in read}) != 1:
                raise ValueError("its entries belong to other files")
        except Exception as error:  # whatever torch raises for other files
            what = f"{path} is not a file of mindrecord.FileWriter ({type(error).__name__})"
            raise RuntimeError(problem(what, fix="write it again from its source")) from error
        self.path, self.schema, self.together = path, entries["schema"], [path.with_name(name) for name in names]
        self.names = named(list(self.schema) if columns is None else columns, list(self.schema))
        self._columns = [read[list(self.schema).index(name)] for name in self.names]

    def __len__(self) -> int:
        return len(self._columns[0][2]) - 1

    def __getitem__(self, number: int) -> tuple[Array, ...]:
        number = range(len(self))[number]
        cut = ((field, values[offsets[number] : offsets[number + 1]]) for field, values, offsets in self._columns)
        return tuple(
            np.asarray(value.tobytes().decode("utf-8", "surrogatepass")) if field.kind == "string"
            else value.reshape(field.shape).copy() for field, value in cut
        )  # fmt: skip


def written_with(file_name: str | Path, columns: Sequence[str] | None) -> list[RecordFile]:
    """Open the files that were written with a name. Raises RuntimeError if there is none."""
    first = next((path for path in _firsts(file_name) if path.exists()), Path(file_name))
    opened = RecordFile(first, columns)
    return [opened if path == first else RecordFile(path, opened.names) for path in opened.together]


def save(dataset: Any, file_name: str, num_files: int) -> None:
    """Write the rows of a pass over a dataset. Sizes of a dim that differ between rows become -1. Raises ValueError for
    a column of several types, and if there are no rows."""
    rows = [{name: as_array(value) for name, value in row.items()} for row in dataset.next_pass()]
    if not rows:
        raise ValueError(problem("the dataset has no rows, so its types are unknown", fix="at least one row"))
    writer = FileWriter(file_name, num_files, overwrite=True)
    writer.add_schema({name: _entry(name, [row[name] for row in rows]) for name in rows[0]})
    writer.write_raw_data(rows)
    writer.commit()


def _entry(name: str, arrays: Sequence[Array]) -> dict[str, Any]:
    kinds = [_kind(array) for array in arrays]
    if len({(kind, array.ndim) for kind, array in zip(kinds, arrays, strict=True)}) > 1:
        seen = ", ".join(sorted({f"{kind} {list(array.shape)}" for kind, array in zip(kinds, arrays, strict=True)}))
        raise ValueError(problem(f"column {name!r} has {seen}", fix="one type, and shapes of as many dims: map()"))
    sizes = [{*lengths} for lengths in zip(*(array.shape for array in arrays), strict=True)]
    shape = [lengths.pop() if len(lengths) == 1 else -1 for lengths in sizes]
    return {"type": kinds[0]} if kinds[0] in TEXTS or not shape else {"type": kinds[0], "shape": shape}


def _kind(array: Array) -> str:
    is_bytes = array.dtype.kind == "S" or (array.dtype == np.uint8 and array.ndim == 1)
    return "bytes" if is_bytes else "string" if array.dtype.kind == "U" else str(array.dtype)


__all__ = ["FileWriter"]
__getattr__ = absent("shardwise.mindspore.mindrecord", lambda: __all__)
