"""Files of rows: what ``mindrecord.FileWriter`` writes and ``MindDataset`` reads.

A file is an archive of numpy: per column its bytes, one row behind the other, and where each row ends. Beside it lies
``FILE.db``, the schema as JSON. They are not the reference's files, which are refused.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.errors import problem
from shardwise.mindspore.checks import closest
from shardwise.mindspore.dataset.sources import GeneratorDataset
from shardwise.mindspore.dataset.values import Array, as_array, count_of

TYPES = ("int32", "int64", "float32", "float64", "string", "bytes")
Schema = Mapping[str, Mapping[str, Any]]


class FileWriter:
    """``FileWriter("train.mindrecord", 4)``: rows of a schema into so many files, train.mindrecord0 and so on; with
    one, into the file itself. ``overwrite``: files that exist are replaced."""

    def __init__(self, file_name: str, shard_num: int = 1, overwrite: bool = False) -> None:
        self._paths = parts_of(file_name, count_of("shard_num", shard_num))
        for path in self._paths:
            if path.exists() and not overwrite:
                raise RuntimeError(problem(f"{path} exists", fix="remove it and its .db, or overwrite=True"))
        self._schema: Schema = {}
        self._rows: list[Mapping[str, Any]] = []

    def add_schema(self, content: Schema, desc: str = "") -> int:
        """``{"image": {"type": "bytes"}, "label": {"type": "int32", "shape": [2]}}``; a shape may have one -1."""
        for name, entry in content.items():
            if entry.get("type") not in TYPES:
                what = f"column {name!r} has the type {entry.get('type')!r}"
                raise ValueError(problem(what, fix=closest(str(entry.get("type")), TYPES)))
        self._schema = content
        return 0

    def add_index(self, index_fields: Sequence[str]) -> None:
        """Fields that are searched for: of no effect, as rows are read by their numbers."""
        if unknown := [name for name in index_fields if name not in self._schema]:
            raise ValueError(problem(f"there is no field {unknown[0]!r}", fix=closest(unknown[0], self._schema)))

    def write_raw_data(self, raw_data: Iterable[Mapping[str, Any]], parallel_writer: bool = False) -> None:
        """Rows as dictionaries of all fields."""
        for row in raw_data:
            if missing := [name for name in self._schema if name not in row]:
                raise ValueError(problem(f"a row has no {missing[0]!r}", fix=f"give {', '.join(self._schema)}"))
            self._rows.append(row)

    def commit(self) -> None:
        """Write the files: contiguous rows in each."""
        for path, places in zip(self._paths, np.array_split(np.arange(len(self._rows)), len(self._paths)), strict=True):
            entries: dict[str, Array] = {}
            for name, entry in self._schema.items():
                parts = [_bytes(self._rows[place][name], entry["type"]) for place in places]
                entries[f"{name}.bytes"] = np.frombuffer(b"".join(parts), np.uint8)
                entries[f"{name}.ends"] = np.cumsum([len(part) for part in parts], dtype=np.int64)
            with path.open("wb") as file:
                np.savez(file, **entries)  # type: ignore[arg-type]
            path.with_name(f"{path.name}.db").write_text(json.dumps(dict(self._schema)))


class _File:
    """The rows of one file, by their numbers."""

    def __init__(self, path: Path, columns: Sequence[str] | None) -> None:
        index = path.with_name(f"{path.name}.db")
        what, fix = f"{path} is no file that mindrecord.FileWriter has written here", "write it anew from its source"
        if not (zipfile.is_zipfile(path) and index.exists()):
            raise RuntimeError(problem(what, fix=fix))
        self.schema: Schema = json.loads(index.read_text())
        names = list(self.schema) if columns is None else list(columns)
        if unknown := [name for name in names if name not in self.schema]:
            raise ValueError(problem(f'there is no column "{unknown[0]}"', fix=closest(unknown[0], self.schema)))
        with np.load(path) as archive:
            self.columns = {name: (archive[f"{name}.bytes"], archive[f"{name}.ends"]) for name in names}

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()))[1])

    def __getitem__(self, number: int) -> tuple[Array, ...]:
        return tuple(
            _value(data[ends[number - 1] if number else 0 : ends[number]].tobytes(), self.schema[name])
            for name, (data, ends) in self.columns.items()
        )


class _Files:
    """The rows of several files, one after the other."""

    def __init__(self, files: Sequence[_File]) -> None:
        self.rows = [(file, number) for file in files for number in range(len(file))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[Array, ...]:
        file, own = self.rows[number]
        return file[own]


class MindDataset(GeneratorDataset):
    """The rows of files that ``mindrecord.FileWriter`` has written. A name: all files that were written with it; a
    list: these. Shuffled unless ``shuffle=False``; other arguments are those of ``GeneratorDataset``."""

    def __init__(
        self,
        dataset_files: str | Sequence[str],
        columns_list: Sequence[str] | None = None,
        num_parallel_workers: int | None = None,
        shuffle: bool | None = None,
        **settings: Any,
    ) -> None:
        paths = written_with(dataset_files) if isinstance(dataset_files, (str, Path)) else map(Path, dataset_files)
        files = [_File(path, columns_list) for path in paths]
        super().__init__(_Files(files), list(files[0].columns), shuffle=shuffle, **settings)


def parts_of(file_name: str, count: int) -> list[Path]:
    """The files of one name."""
    if count == 1:
        return [Path(file_name)]
    return [Path(f"{file_name}{number:0{len(str(count - 1))}d}") for number in range(count)]


def written_with(file_name: str | Path) -> list[Path]:
    """The file, or those with a number behind its name. Raises RuntimeError where there is none."""
    path = Path(file_name)
    stem = path.name if path.name.endswith("mindrecord") else path.name.rstrip("0123456789")
    found = [path] if path.exists() and stem == path.name else []
    found += sorted(own for own in path.parent.glob(f"{stem}*") if own.name.removeprefix(stem).isdigit())
    if not found:
        raise RuntimeError(problem(f"there is no file {path}", fix="mindrecord.FileWriter writes it"))
    return found


def save(dataset: Any, file_name: str, num_files: int) -> None:
    """The rows of a pass over a dataset, as files."""
    kinds = {"U": "string", "S": "bytes"}
    names, rows = dataset.get_col_names(), [tuple(map(as_array, row)) for row in dataset.next_pass()]
    schema = {
        name: {
            "type": kinds.get(array.dtype.kind, array.dtype.name),
            **({"shape": list(array.shape)} if array.ndim else {}),
        }
        for name, array in zip(names, rows[0] if rows else (), strict=False)
    }
    writer = FileWriter(file_name, num_files, overwrite=True)
    writer.add_schema(schema)
    writer.write_raw_data(dict(zip(names, row, strict=True)) for row in rows)
    writer.commit()


def _bytes(value: Any, kind: str) -> bytes:
    if kind == "string":
        return str(value).encode()
    if kind == "bytes":
        return bytes(value)
    return np.ascontiguousarray(as_array(value), kind).tobytes()


def _value(data: bytes, entry: Mapping[str, Any]) -> Array:
    """A scalar, where there is no shape."""
    if entry["type"] == "string":
        return np.asarray(data.decode())
    if entry["type"] == "bytes":
        return np.frombuffer(data, np.uint8)
    return np.frombuffer(data, entry["type"]).reshape(entry.get("shape", ())).copy()


__all__ = ["FileWriter", "MindDataset"]
